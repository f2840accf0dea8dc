"use strict";
// Fills the table of bit layouts for the number that was typed.
function show() {
  const text = document.getElementById("number").value.trim().replace(",", ".");
  const named = { inf: Infinity, "-inf": -Infinity, infinity: Infinity, "-infinity": -Infinity, nan: NaN };
  const known = text.toLowerCase() in named;
  const x = known ? named[text.toLowerCase()] : Number(text);
  const wrong = text === "" || (!known && Number.isNaN(x));
  document.getElementById("wrong").textContent = wrong ? "Type a number, for example 0.1, 6e-8, 70000, inf or nan." : "";
  for (const row of document.querySelectorAll("#layouts tbody tr")) {
    const name = row.dataset.format;
    const value = wrong ? NaN : rounded(x, name);
    const parts = wrong ? ["", "", ""] : bits(value, name);
    row.querySelectorAll(".bits span").forEach((span, i) => { span.textContent = parts[i]; });
    const stored = Object.is(value, -0) ? "-0" : String(value);
    row.querySelector(".stored").textContent = wrong ? "" : stored;
    row.querySelector(".kind").textContent = wrong ? "" : kind(x, value, name);
  }
}
document.getElementById("number").addEventListener("input", show);
show();
