"use strict";
// Bars of a step's memory by kind, of the network and the batch size that were chosen.
(function () {
  const source = document.getElementById("memory-data");
  if (!source) return;
  const { kinds, networks } = JSON.parse(source.textContent);
  const by = (id) => document.getElementById(id);
  const NUMBERS = [...kinds.keys()].map((i) => i + 1).concat(kinds.length + 1);
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const size = (bytes) => {
    const mib = bytes / 2 ** 20;
    return mib >= 1024 ? (mib / 1024).toFixed(2) + " GiB" : (mib >= 100 ? mib.toFixed(0) : mib.toFixed(2)) + " MiB";
  };
  const LEFT = 90, WIDE = 370, HIGH = 26;
  const mib = (bytes) => (bytes / 2 ** 20).toLocaleString("en", { maximumSignificantDigits: 4 });

  function draw(kind, attributes, text) {
    const made = document.createElementNS(by("memory-bars").namespaceURI, kind);
    for (const name in attributes) made.setAttribute(name, attributes[name]);
    if (text !== undefined) made.textContent = text;
    by("memory-bars").append(made);
  }

  function show() {
    const network = networks[by("memory-network").value];
    const batch = network.batches[by("memory-batch").value];
    const names = Object.keys(batch.bytes);
    const top = Math.max(...names.map((name) => sum(batch.bytes[name])));
    const word = batch.size.toLocaleString("en");
    by("memory-shown").textContent = word;
    by("memory-batch").setAttribute("aria-valuetext", word);
    by("memory-bars").replaceChildren();
    by("memory-bars").setAttribute("viewBox", "0 0 460 " + (HIGH * names.length + 4));
    names.forEach((name, i) => {
      draw("text", { x: LEFT - 8, y: HIGH * i + 17, "text-anchor": "end" }, name);
      let x = LEFT;
      batch.bytes[name].forEach((bytes, k) => {
        const width = (WIDE * bytes) / top;
        draw("rect", { x, y: HIGH * i + 3, width, height: HIGH - 6, class: "kind" + k });
        x += width;
      });
    });
    const whole = sum(batch.bytes.fp32 || []);
    const beside = names.filter((name) => name !== "fp32" && whole)
      .map((name) => name + " " + (sum(batch.bytes[name]) / whole).toFixed(2) + "x");
    by("memory-said").textContent = network.name + " at batch " + word + ": fp32 " + size(whole) +
      (beside.length ? "; beside it " + beside.join(", ") : "") + ".";
    by("memory-table").tBodies[0].replaceChildren(
      ...names.map((name) => makeRow([name, ...batch.bytes[name].map(mib), mib(sum(batch.bytes[name]))], NUMBERS)));
  }

  function chooseNetwork() {
    const network = networks[by("memory-network").value];
    by("memory-batch").max = network.batches.length - 1;
    by("memory-batch").value = network.own;
    show();
  }

  by("memory-network").replaceChildren(...networks.map((network, i) => new Option(network.name, i)));
  by("memory-legend").replaceChildren(...kinds.map((kind, k) => {
    const entry = document.createElement("span");
    entry.className = "entry kind" + k;
    entry.textContent = kind;
    return entry;
  }));
  by("memory-network").addEventListener("change", chooseNetwork);
  by("memory-batch").addEventListener("input", show);
  chooseNetwork();
})();
