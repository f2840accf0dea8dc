"""Underflow by layer over the steps of a watched run."""

from __future__ import annotations

from collections.abc import Sequence

from mptrain.results.document import Cell, Column
from mptrain.results.report import charts
from mptrain.results.report.curves import thinned
from mptrain.results.report.figure import Figure
from mptrain.results.report.inside import Losses

MOST_STEPS, MOST_LAYERS, TABLE_STEPS = 40, 80, 12
LONGEST = 28  # characters of a layer's path beside the picture; the table has all of it


def heatmap(name: str, run: str, losses: Losses) -> list[Figure]:
    """The figure; none if nothing was collected."""
    steps = thinned(losses.steps, MOST_STEPS)
    layers = losses.layers[:MOST_LAYERS]
    points = [
        {"layer": layer, "step": step, "share": share}
        for layer in layers
        for step in steps
        if (share := losses.share.get((layer, step))) is not None
    ]
    if not points:
        return []
    if losses.counted:
        what, title = "of the nonzero gradient products that rounding made zero, counted exactly", "rounded to zero"
    else:
        what, title = "of zeros among activation gradients (products run natively and were not counted)", "zeros"
    caption = f"{run}: share {what}, by layer and step; layers as the forward pass meets them."
    if len(losses.layers) > MOST_LAYERS:
        caption += f" The first {MOST_LAYERS} of {len(losses.layers)} layers."
    if len(steps) < len(losses.steps):
        caption += f" {len(steps)} of {len(losses.steps)} collected steps."
    shown = thinned(steps, TABLE_STEPS)
    columns = [Column("layer")] + [Column(f"step {step}", number=True) for step in shown]
    cells = [[Cell(layer), *(_share(losses.share.get((layer, step))) for step in shown)] for layer in layers]
    shown_as = shortened(layers)
    named = [{**point, "layer": shown_as[point["layer"]]} for point in points]
    return [Figure(name, caption, lambda: charts.heat(named, list(shown_as.values()), title), columns, cells)]


def shortened(layers: Sequence[str]) -> dict[str, str]:
    """Long paths by their ends, which tell them apart; in full where two would become one."""
    ends = {layer: layer if len(layer) <= LONGEST else f"…{layer[-LONGEST + 1 :]}" for layer in layers}
    return ends if len(set(ends.values())) == len(ends) else dict(zip(layers, layers, strict=True))


def _share(share: float | None) -> Cell:
    if share is None:
        return Cell("")
    return Cell(f"{share:.1%}" if share >= 0.0005 or share == 0 else "<0.1%")
