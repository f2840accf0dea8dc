"""The exponent histogram that a slider moves against FP16's range; what is lost is counted, never estimated."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from mptrain.results.report.inside import ALL, Gradients
from mptrain.results.report.page import embedded

MOST_BYTES = 1_500_000
"""Of all histograms together, so that the page stays small."""
LOWEST_SCALE, HIGHEST_SCALE = -8, 48  # powers of two that the slider reaches

SECTION = """
<section id="histogram"><h2>Gradients by exponent, under a loss scale</h2>
<p>Every bar counts the gradients of one power of two. The slider multiplies the loss, which moves all bars against the
range of FP16: what comes to lie below 2^-25 is rounded to zero, below 2^-14 it keeps fewer bits, from 2^16 on it is
infinite.</p>
{body}</section>
"""
BODY = """
<div class="controls">
<label>Run <select id="histogram-run"></select></label>
<label>Gradients <select id="histogram-layer"></select></label>
<label for="scale">Loss scale <output id="scale-shown" for="scale"></output></label>
<input type="range" id="scale" min="{low}" max="{high}" step="1" value="0" aria-describedby="lost">
<button type="button" id="scale-best"></button>
</div>
<p id="histogram-about"></p>
<p id="lost" role="status" aria-live="polite"></p>
<div class="beside">
<figure><svg id="bins" viewBox="0 0 640 250" role="img" aria-labelledby="lost"></svg>
<figcaption>Horizontally: power of two of the scaled gradient; vertically: share of the nonzero gradients.</figcaption>
</figure>
<div><div class="scroll"><table id="fates"><thead><tr><th scope="col">in FP16</th><th scope="col">magnitude</th>
<th scope="col" class="number">gradients</th><th scope="col" class="number">share of the nonzero</th></tr></thead>
<tbody></tbody></table></div>
<details><summary>Numbers: gradients by exponent</summary><div class="scroll"><table id="counts"><thead><tr>
<th scope="col" class="number">2^e before scaling</th><th scope="col" class="number">scaled</th>
<th scope="col" class="number">gradients</th><th scope="col">in FP16</th></tr></thead><tbody></tbody></table></div>
</details></div></div>
<script type="application/json" id="histograms">{data}</script>
"""
NONE = (
    "<p>No run here was watched and no probe was found. Make one: "
    "<code>mptrain probe +recipe=ssd</code>, or train with <code>watch=true</code>.</p>"
)


def histogram_section(gradients: list[Gradients]) -> tuple[str, list[str]]:
    """The section, and lines on what had no room."""
    sources, left_out = kept(gradients)
    if not sources:
        return SECTION.format(body=NONE), left_out
    return SECTION.format(body=BODY.format(low=LOWEST_SCALE, high=HIGHEST_SCALE, data=embedded(sources))), left_out


def kept(gradients: Iterable[Gradients]) -> tuple[list[dict[str, Any]], list[str]]:
    """As the page's script reads them, while there is room: censuses first, as they are given."""
    found, left_out, room = [], [], MOST_BYTES
    for run in gradients:
        sets = []
        for (layer, kind), histogram in sorted(run.of.items(), key=lambda item: (item[0][1], item[0][0] != ALL)):
            if histogram.nonzero:
                first, counts = histogram.bins()
                best = max(LOWEST_SCALE, min(HIGHEST_SCALE, round(math.log2(histogram.best_scale()))))
                sets.append({"name": f"{kind}, {layer}", "first": first, "counts": counts, "zero": histogram.zero,
                             "best": best})  # fmt: skip
        source = {"name": run.label, "about": run.about, "sets": sets}
        size = len(embedded(source))
        if not sets or size > room:
            why = "all its gradients are zero" if not sets else "no room left on the page"
            left_out.append(f"{run.label}: histograms left out, {why}")
            continue
        room -= size
        found.append(source)
    return found, left_out
