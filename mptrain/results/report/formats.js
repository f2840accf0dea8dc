"use strict";
// Number formats, and rounding to nearest even as hardware does it. A double holds every value of every format below,
// and scaling it by a power of two is exact, so rounding is one exact division, one choice and one exact product.
const FORMATS = {
  FP32: { exponent: 8, mantissa: 23, bias: 127 },
  TF32: { exponent: 8, mantissa: 10, bias: 127 },
  BF16: { exponent: 8, mantissa: 7, bias: 127 },
  FP16: { exponent: 5, mantissa: 10, bias: 15 },
  "FP8 E4M3": { exponent: 4, mantissa: 3, bias: 7, finite: true },
  "FP8 E5M2": { exponent: 5, mantissa: 2, bias: 15 },
};

// E4M3 has no infinity: its highest exponent counts, and only the highest pattern is NaN.
function largest(f) {
  const top = 2 ** f.exponent - (f.finite ? 1 : 2) - f.bias;
  return (2 - 2 ** -f.mantissa * (f.finite ? 2 : 1)) * 2 ** top;
}

// floor(log2 |x|) of a finite double other than zero, from its bits.
function binade(x) {
  const view = new DataView(new ArrayBuffer(8));
  view.setFloat64(0, x);
  const field = (view.getUint32(0) >>> 20) & 2047;
  if (field) return field - 1023;
  view.setFloat64(0, x * 2 ** 64);
  return ((view.getUint32(0) >>> 20) & 2047) - 1023 - 64;
}

function rounded(x, name) {
  const f = FORMATS[name];
  if (Number.isNaN(x) || x === 0) return x;
  if (!Number.isFinite(x)) return f.finite ? NaN : x;
  const power = Math.max(binade(x), 1 - f.bias) - f.mantissa;
  if (power + f.mantissa > f.bias + 2) return f.finite ? NaN : Math.sign(x) * Infinity;
  const units = Math.abs(x) / 2 ** power;
  let whole = Math.floor(units);
  const rest = units - whole;
  if (rest > 0.5 || (rest === 0.5 && whole % 2)) whole += 1;
  const size = whole * 2 ** power;
  if (size > largest(f)) return f.finite ? NaN : Math.sign(x) * Infinity;
  return (x < 0 ? -1 : 1) * size;
}

// [sign, exponent, mantissa] as texts of bits, of a value the format holds.
function bits(value, name) {
  const f = FORMATS[name];
  const sign = value < 0 || Object.is(value, -0) ? "1" : "0";
  const ones = (n) => "1".repeat(n);
  const text = (n, width) => n.toString(2).padStart(width, "0");
  if (Number.isNaN(value)) {
    return ["0", ones(f.exponent), f.finite ? ones(f.mantissa) : "1" + "0".repeat(f.mantissa - 1)];
  }
  if (!Number.isFinite(value)) return [sign, ones(f.exponent), "0".repeat(f.mantissa)];
  const size = Math.abs(value);
  if (size < 2 ** (1 - f.bias)) {
    return [sign, "0".repeat(f.exponent), text(size / 2 ** (1 - f.bias - f.mantissa), f.mantissa)];
  }
  const power = binade(size);
  return [sign, text(power + f.bias, f.exponent), text((size / 2 ** power - 1) * 2 ** f.mantissa, f.mantissa)];
}

function kind(x, value, name) {
  const f = FORMATS[name];
  if (Number.isNaN(value)) return Number.isNaN(x) ? "not a number" : "overflow: the format has no infinity, so NaN";
  if (!Number.isFinite(value)) return Number.isFinite(x) ? "overflow to infinity" : "infinity";
  if (value === 0) return x === 0 ? "zero" : "lost: rounded to zero";
  const small = Math.abs(value) < 2 ** (1 - f.bias) ? "subnormal, " : "";
  if (value === x) return small + "exact";
  return small + "off by " + (Math.abs(value / x - 1) * 100).toPrecision(2) + " %";
}
