"use strict";
// Moves a histogram of exponents against FP16's range. Multiplying by 2^k adds k to every exponent, so counts stay exact.
const FATES = [
  { name: "rounded to zero", range: "below 2^-25", upto: -25, tone: "lost" },
  { name: "subnormal: fewer bits", range: "2^-25 to 2^-14", upto: -14, tone: "thin" },
  { name: "normal", range: "2^-14 to 2^16", upto: 16, tone: "kept" },
  { name: "overflow to infinity", range: "2^16 and above", upto: Infinity, tone: "over" },
];

function fateOf(exponent) {
  return FATES.findIndex((fate) => exponent < fate.upto);
}

// Counts by fate of {first, counts} times 2^k.
function fates(set, k) {
  const found = [0, 0, 0, 0];
  set.counts.forEach((count, i) => { found[fateOf(set.first + i + k)] += count; });
  return found;
}

function percent(part, whole) {
  const share = (100 * part) / whole;
  if (part === 0 || part === whole) return share + " %";
  if (share < 0.01) return "under 0.01 %";
  return share > 99.99 ? "over 99.99 %" : share.toFixed(2) + " %";
}

function scaleWord(k) {
  return "2^" + k + " = " + (k < 0 ? "1/" + 2 ** -k : (2 ** k).toLocaleString("en"));
}

function raised(exponent) {
  const digits = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079";
  return "2" + String(exponent).replace(/./g, (sign) => (sign === "-" ? "\u207b" : digits[sign]));
}

function makeRow(texts, numbers) {
  const row = document.createElement("tr");
  texts.forEach((text, i) => {
    const cell = document.createElement(i ? "td" : "th");
    if (!i) cell.scope = "row";
    if (numbers.includes(i)) cell.className = "number";
    cell.textContent = text;
    row.append(cell);
  });
  return row;
}

(function () {
  const source = document.getElementById("histograms");
  if (!source) return;
  const LOW = -72, HIGH = 32, LEFT = 44, TOP = 30, WIDE = 584, TALL = 170;
  const runs = JSON.parse(source.textContent);
  const by = (id) => document.getElementById(id);
  const at = (exponent) => LEFT + (WIDE * (Math.min(HIGH, Math.max(LOW, exponent)) - LOW)) / (HIGH - LOW);

  function draw(kind, attributes, text) {
    const made = document.createElementNS(by("bins").namespaceURI, kind);
    for (const name in attributes) made.setAttribute(name, attributes[name]);
    if (text !== undefined) made.textContent = text;
    by("bins").append(made);
  }

  function fill(select, names) {
    select.replaceChildren(...names.map((name, i) => new Option(name, i)));
  }

  function picture(set, k, nonzero) {
    by("bins").replaceChildren();
    const edges = [LOW, -25, -14, 16, HIGH];
    ["zero", "subnormal", "normal", "infinite"].forEach((word, i) => {
      const x = at(edges[i]);
      draw("rect", { x, y: TOP, width: at(edges[i + 1]) - x, height: TALL, class: "range " + FATES[i].tone });
      draw("text", { x: (x + at(edges[i + 1])) / 2, y: TOP - 8, "text-anchor": "middle" }, word);
    });
    const shares = set.counts.map((count) => count / nonzero);
    const top = Math.max(...shares);
    [0, 0.5, 1].forEach((part) => {
      const y = TOP + TALL * (1 - part);
      draw("line", { x1: LEFT, x2: LEFT + WIDE, y1: y, y2: y, class: "grid" });
      draw("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, (100 * top * part).toFixed(top < 0.1 ? 1 : 0) + "%");
    });
    const wide = WIDE / (HIGH - LOW);
    shares.forEach((share, i) => {
      const moved = set.first + i + k;
      const place = Math.min(HIGH - 1, Math.max(LOW, moved));
      const height = (TALL * share) / top;
      if (share) {
        draw("rect", { x: at(place) + 0.5, y: TOP + TALL - height, width: wide - 1, height,
          class: "bar " + FATES[fateOf(moved)].tone });
      }
    });
    for (let exponent = -64; exponent <= 32; exponent += 16) {
      draw("text", { x: at(exponent), y: TOP + TALL + 18, "text-anchor": "middle" }, raised(exponent));
    }
    draw("text", { x: LEFT + WIDE / 2, y: TOP + TALL + 40, "text-anchor": "middle" }, "gradient times loss scale");
  }

  function show() {
    const set = runs[by("histogram-run").value].sets[by("histogram-layer").value];
    const k = Number(by("scale").value);
    const found = fates(set, k);
    const nonzero = found.reduce((sum, count) => sum + count, 0);
    by("scale-shown").textContent = scaleWord(k);
    by("scale").setAttribute("aria-valuetext", scaleWord(k));
    by("scale-best").textContent = "largest safe scale: 2^" + set.best;
    by("scale-best").title = "It keeps the largest of these gradients a factor of 4 from overflow";
    by("lost").textContent =
      "At loss scale " + scaleWord(k) + ", of the nonzero gradients " + percent(found[0], nonzero) +
      " are rounded to zero, " + percent(found[1], nonzero) + " are subnormal, " + percent(found[3], nonzero) +
      " overflow. Exact zeros before any rounding: " + percent(set.zero, set.zero + nonzero) + " of all.";
    by("fates").tBodies[0].replaceChildren(
      ...FATES.map((fate, i) =>
        makeRow([fate.name, fate.range, found[i].toLocaleString("en"), percent(found[i], nonzero)], [2, 3])),
    );
    by("counts").tBodies[0].replaceChildren(
      ...set.counts.map((count, i) => [set.first + i, count]).filter((pair) => pair[1]).map(([exponent, count]) =>
        makeRow([exponent, exponent + k, count.toLocaleString("en"), FATES[fateOf(exponent + k)].name], [0, 1, 2])),
    );
    picture(set, k, nonzero);
  }

  function chooseRun() {
    const run = runs[by("histogram-run").value];
    by("histogram-about").textContent = run.about;
    fill(by("histogram-layer"), run.sets.map((set) => set.name));
    show();
  }

  fill(by("histogram-run"), runs.map((run) => run.name));
  by("histogram-run").addEventListener("change", chooseRun);
  by("histogram-layer").addEventListener("change", show);
  by("scale").addEventListener("input", show);
  by("scale-best").addEventListener("click", () => {
    by("scale").value = runs[by("histogram-run").value].sets[by("histogram-layer").value].best;
    show();
  });
  chooseRun();
})();
