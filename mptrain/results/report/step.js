"use strict";
// One training step of one linear unit, in mixed precision beside FP64: y = x1 w1 + x2 w2, the loss the mean of
// (y - 1)^2 over n equal places, as a detector has it at every anchor. Every number is rounded as the scheme rounds it;
// n and the scale are powers of two, so that sums over n equal products and (un)scaling are exact.
const INPUTS = [0.5, -1.5];
const TARGET = 1;
const START = { weights: [1.3, -0.2], scale: 1, clean: 0 };
const INTERVAL = 2000;

function stepped(state, n, rate) {
  const half = (x) => rounded(x, "FP16"), single = (x) => rounded(x, "FP32");
  const { scale } = state;
  const copies = state.weights.map(half);
  const output = half(single(copies.reduce((sum, w, i) => sum + w * INPUTS[i], 0)));
  const difference = single(output - TARGET);
  const loss = single(single(difference * difference) / n) * n;
  const term = single(scale / n);
  const wanted = single(term * single(2 * difference));
  const atOutput = half(wanted);
  const scaled = INPUTS.map((x) => half(single(n * atOutput * x)));
  const unscaled = scaled.map((g) => single(g / scale));
  const finite = unscaled.every(Number.isFinite);
  const updates = unscaled.map((g) => single(single(rate) * g));
  const weights = state.weights.map((w, i) => (finite ? single(w - updates[i]) : w));
  const halves = copies.map((w, i) => (finite ? half(w - updates[i]) : w));
  const clean = finite ? state.clean + 1 : 0;
  const grows = clean === INTERVAL;
  return {
    copies, output, loss, scaledLoss: scale * loss, wanted, atOutput, scaled, unscaled, finite, updates, weights, halves,
    next: { weights, scale: finite ? scale * (grows ? 2 : 1) : Math.max(1, scale / 2), clean: grows ? 0 : clean },
  };
}

// The same in FP64, without a scale.
function exactly(weights, rate) {
  const output = weights.reduce((sum, w, i) => sum + w * INPUTS[i], 0);
  const gradients = INPUTS.map((x) => 2 * (output - TARGET) * x);
  return { output, loss: (output - TARGET) ** 2, gradients, weights: weights.map((w, i) => w - rate * gradients[i]) };
}

(function () {
  const body = document.querySelector("#walk tbody");
  if (!body) return;
  const by = (id) => document.getElementById(id);
  const short = (x) => (Number.isFinite(x) ? String(Number(x.toPrecision(7))) : String(x));
  const both = (xs) => xs.map(short).join(", ");
  let state = { ...START };
  let taken = 0;

  function show() {
    const n = 2 ** Number(by("walk-terms").value), rate = Number(by("walk-rate").value);
    state.scale = 2 ** Number(by("walk-scale").value);
    const s = stepped(state, n, rate), e = exactly(state.weights, rate);
    const lost = s.atOutput === 0 && s.wanted !== 0;
    const still = s.finite && s.halves.some((w, i) => w === s.copies[i] && s.updates[i] !== 0);
    const rows = [
      ["copy the weights", "FP16", both(s.copies), both(state.weights),
        "The FP32 weights are the master copy; the network computes with these."],
      ["forward", "FP16", "y = " + short(s.output), short(e.output), "Products of FP16 numbers, summed in FP32, rounded once."],
      ["loss", "FP32", short(s.loss), short(e.loss), "The mean of (y - 1)\u00b2 over " + n.toLocaleString("en") + " places."],
      ["scale the loss", "FP32", short(s.scaledLoss), "", "times " + state.scale.toLocaleString("en") + "."],
      ["backward, at one output", "FP16", short(s.atOutput), short((state.scale * 2 * (e.output - TARGET)) / n),
        "2 (y - 1) scale / places = " + short(s.wanted) + ": " + kind(s.wanted, s.atOutput, "FP16") + "."],
      ["backward, weights", "FP16", both(s.scaled), both(e.gradients.map((g) => state.scale * g)),
        "Summed over the places in FP32, rounded once."],
      ["unscale", "FP32", both(s.unscaled), both(e.gradients), "divided by the scale, in FP32."],
      ["check", "", s.finite ? "finite" : "not finite", "", s.finite ? "The step is taken." : "The step is skipped."],
      ["step", "FP32", both(s.weights), both(e.weights), !s.finite ? "The weights stay." :
        lost ? "Nothing was learned: the gradient was lost." :
          "weight - rate \u00d7 gradient, in the master copy. Kept in FP16 alone the weights would be " + both(s.halves) +
          (still ? ": one of them would not move." : ".")],
      ["update the scale", "", short(s.next.scale), "", !s.finite ? "Halved after an overflow." :
        s.next.clean + " good steps in a row; doubled after " + INTERVAL.toLocaleString("en") + "."],
    ];
    body.replaceChildren(...rows.map((row, i) => makeRow([i + 1 + ". " + row[0], ...row.slice(1)], [])));
    by("walk-shown").textContent = scaleWord(Number(by("walk-scale").value));
    by("walk-scale").setAttribute("aria-valuetext", by("walk-shown").textContent);
    by("walk-said").textContent = "Step " + (taken + 1) + ": " + (!s.finite ? "overflow, skipped." :
      lost ? "the gradient is rounded to zero; FP64 has " + both(e.gradients) + "." :
        "gradients " + both(s.unscaled) + "; FP64 has " + both(e.gradients) + ".");
    return s;
  }

  function take() {
    state = show().next;
    taken += 1;
    by("walk-scale").value = Math.log2(state.scale);
    show();
  }

  function again() {
    state = { ...START };
    taken = 0;
    by("walk-scale").value = 0;
    show();
  }

  for (const id of ["walk-terms", "walk-rate", "walk-scale"]) by(id).addEventListener("input", show);
  by("walk-take").addEventListener("click", take);
  by("walk-again").addEventListener("click", again);
  show();
})();
