"""What a probe found, in words and tables: by exponent, by scale, by layer, by operation and by precision."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mptrain.config import Config
from mptrain.results.cells import short_dtypes, significant
from mptrain.results.document import Block, Cell, Column, Document
from mptrain.watch.census import SCALES, Advice, Census
from mptrain.watch.histogram import FLUSHED_BELOW, INFINITE_FROM, SUBNORMAL_BELOW, Histogram

ACTIVATIONS, WEIGHTS = "activation gradient", "weight gradient"
EDGES = (-200, -60, -48, -40, -36, -32, -29, -27, -25, -24, -22, -20, -17, -14, -10, -6, -2, 2, 8, 16, 200)
"""Exponents between which gradients are counted together; as in the paper's figure 3 the bins differ in width."""
BAR = 20  # columns of the longest bar
MOST_LAYERS = 20
LEAST, FEW, OVER = 0.001, 0.01, 0.05
"""Shares of a layer's gradients: what is worth a line, a look, and a cure."""


@dataclass(frozen=True)
class Probed:
    """A census, what it advises, and what a step under each precision showed (`probe.tried_out`).

    told: the command line, without what concerns the probe alone.
    """

    config: Config
    told: tuple[str, ...]
    device: str
    census: Census
    advice: Advice
    tried: Mapping[str, Mapping[str, Any]]

    @property
    def scale(self) -> float:
        """The scale that is recommended, 1 where none is."""
        return float(self.advice.scale) if self.advice.scale.replace(".", "").isdecimal() else 1.0


def document(found: Probed) -> Document:
    """Everything that is printed."""
    blocks = [_by_exponent(found), _by_scale(found), *_by_layer(found), _terms(found), _operations(found)]
    return Document([*blocks, _storage(found)], {"Recommended": _recommended(found)})


def _share(value: float) -> str:
    """A share in percent, never rounded to none or all."""
    if value in (0.0, 1.0):
        return f"{100 * value:.0f} %"
    return "<0.01 %" if value < 0.0001 else ">99.99 %" if value > 0.9999 else f"{100 * value:.2f} %"


def _tone(value: float) -> Any:
    return "bad" if value >= OVER else "plain" if value >= FEW else "quiet"


def _by_exponent(found: Probed) -> Block:
    config = found.config
    kinds = [found.census.whole(kind) for kind in (ACTIVATIONS, WEIGHTS)]
    counts = [[("zero", "", h.zero) for h in kinds]]
    for low, high in zip(EDGES, EDGES[1:], strict=False):
        kept = "zero" if high <= FLUSHED_BELOW else "fewer bits" if high <= SUBNORMAL_BELOW else ""
        kept = "infinite" if low >= INFINITE_FROM else kept
        name = (
            f"below 2^{high}" if low == EDGES[0] else f"from 2^{low}" if high == EDGES[-1] else f"2^{low} to 2^{high}"
        )
        counts.append([(name, kept, h.below(high) - h.below(low)) for h in kinds])
    seen = [number for number, row in enumerate(counts) if any(count for *_, count in row)]
    counts = [counts[0], *counts[max(1, min(seen[1:], default=1)) : max(seen, default=0) + 1]]
    totals = [max(1, h.zero + h.nonzero) for h in kinds]
    most = [max(1, *(row[side][2] for row in counts)) for side in (0, 1)]
    cells = []
    for row in counts:
        line = [Cell(row[0][0]), Cell(row[0][1], tone="bad" if row[0][1] in ("zero", "infinite") else "quiet")]
        for side in (0, 1):
            count = row[side][2]
            line += [Cell(_share(count / totals[side])), Cell("█" * round(BAR * count / most[side]))]
        cells.append(line)
    columns = [Column("|x|"), Column("in FP16", "scale 1")]
    columns += [Column("of activation", "gradients", number=True), Column("", least=BAR)]
    columns += [Column("of weight", "gradients", number=True), Column("", least=BAR)]
    about = (
        f"{config.steps} FP32 steps, batch {config.batch_size}, seed {config.seed}, {found.device}; all layers together"
    )
    return Block(f"{config.recipe}: gradients by exponent", [about], columns, cells, [])


def _by_scale(found: Probed) -> Block:
    layers = _layers(found.census)
    kinds = [found.census.whole(kind) for kind in (ACTIVATIONS, WEIGHTS)]
    columns = [Column("scale", number=True)]
    for name in ("activation", "weight"):
        columns += [Column(f"{name} gr.", "flushed", number=True), Column("", "overflowed", number=True)]
    columns.append(Column("worst layer", "flushed", number=True))
    cells = []
    for scale in SCALES:
        best = f"{found.scale:g}" == f"{scale:g}" and found.advice.precision == "fp16"
        line = [Cell(f"{scale:,.0f}", tone="good" if best else "plain")]
        for h in kinds:
            flushed, over = h.flushed(scale), h.overflowed(scale)
            line += [Cell(_share(flushed), tone=_tone(flushed)), Cell(_share(over), tone="bad" if over else "quiet")]
        worst = max((h.flushed(scale) for h in layers.values()), default=0.0)
        cells.append([*line, Cell(_share(worst), tone=_tone(worst))])
    about = "Shares of the nonzero values that FP16 would make zero or infinite."
    return Block("Every loss scale", [about], columns, cells, [])


def _layers(census: Census) -> dict[str, Histogram]:
    both = ((ACTIVATIONS, ""), (WEIGHTS, " (weights)"))
    return {f"{layer}{mark}": h for kind, mark in both for layer, h in census.layers(kind).items()}


def _by_layer(found: Probed) -> list[Block]:
    scales = sorted({1.0, 8.0, 1024.0, found.scale})
    blocks = []
    for kind in (ACTIVATIONS, WEIGHTS):
        layers = found.census.layers(kind)
        worst = sorted(layers, key=lambda name: -layers[name].flushed())[:MOST_LAYERS]
        shown = [name for name in worst if layers[name].flushed() >= LEAST]
        columns = [Column("layer"), Column("zeros", number=True)]
        columns += [Column("flushed", f"at {scale:g}", number=True) for scale in scales]
        columns.append(Column("exponents", number=True))
        cells = []
        for name, h in layers.items():
            if name in shown:
                shares = [h.flushed(scale) for scale in scales]
                zeros = Cell(_share(h.zero / max(1, h.zero + h.nonzero)), tone="quiet")
                cells.append(
                    [
                        Cell(name),
                        zeros,
                        *(Cell(_share(s), tone=_tone(s)) for s in shares),
                        Cell(_range(h), tone="quiet"),
                    ]
                )
        rest = len(layers) - len(shown)
        under = f"under {100 * LEAST:.1f} %" if len(shown) < MOST_LAYERS else "less"
        told = f"{rest} of {len(layers)} lose {under} of their values at scale 1; all are in probe.csv"
        about = "Zeros are of all values, flushed of the nonzero ones; exponents without the smallest 0.1 %."
        notes = [told] if rest else []
        blocks.append(Block(f"{kind.capitalize()}s by layer", [about], columns, cells, notes))
    return blocks


def _range(h: Histogram) -> str:
    return f"{h.exponent_of_share(0.001)} to {max(h.exponents)}" if h.exponents else ""


def _terms(found: Probed) -> Block:
    scales = sorted({1.0, found.scale})
    cells = []
    for name, largest in found.census.outputs.items():
        if largest > 0:
            lost = [min(1.0, 2.0**-25 / scale / largest) for scale in scales]
            cells.append([Cell(name), Cell(f"{1 / largest:,.0f}"), *(Cell(_share(p), tone=_tone(p)) for p in lost)])
    columns = [Column("output"), Column("terms N", number=True)]
    columns += [Column("p*", f"at {scale:g}", number=True) for scale in scales]
    about = (
        "A mean over N terms gives a class whose probability is below p* = N x 2^-25 / scale no gradient in FP16. N is "
        "one over the largest gradient that the loss gives to one number of an output."
    )
    missing = [] if cells else ["not visible: the network returns the loss itself"]
    return Block("Terms under the loss's mean", [about], columns, cells, missing)


def _operations(found: Probed) -> Block:
    """One column for all precisions that ran alike; what one emulation alone adds, its casts, is no operation."""
    ran = Counter(op for each in found.tried.values() for op in each["operations"])
    names = [op for op, precisions in ran.items() if precisions > 1 or op in found.tried["fp32"]["operations"]]
    alike: dict[tuple[str, ...], list[str]] = {}
    for precision, each in found.tried.items():
        column = [short_dtypes(each["operations"].get(op, "")) for op in names]
        alike.setdefault((*column, short_dtypes(each["sums"]), each["backend"]), []).append(precision)
    cells = [
        [Cell(row), *(Cell(column[number], tone="quiet" if column[number] == "f32" else "plain") for column in alike)]
        for number, row in enumerate([*names, "sums of products", "kernels"])
    ]
    about = "Formats of the results in one forward pass with its loss; an empty cell: another kernel did that work."
    also = [f"{first} also stands for {', '.join(others)}" for first, *others in alike.values() if others]
    columns = [Column("operation"), *(_heading(first) for first, *_ in alike.values())]
    return Block("Which operation runs in which format", [about], columns, cells, also)


def _heading(name: str) -> Column:
    first, _, rest = name.partition("_")
    return Column(first, rest)


def _storage(found: Probed) -> Block:
    columns = [Column("precision")]
    columns += [Column(name, number=True) for name in ("weights", "FP32 copy", "gradients", "optimizer")]
    columns += [Column("step's peak", number=True), Column("ratio", number=True)]
    base = found.tried["fp32"]["storage"]["peak"]
    cells = []
    for name, each in found.tried.items():
        kept = each["storage"]
        sizes = [kept[part] for part in ("weights", "copies", "gradients", "optimizer", "peak")]
        ratio = f"{kept['peak'] / base:.2f}x" if base else ""
        cells.append([Cell(name), *(Cell(significant(size / 2**20) if size else "0") for size in sizes), Cell(ratio)])
    about = (
        "MiB of live tensors; the peak also has activations, and under emulation the FP32 image of one operation. "
        "fp16_nomaster keeps its rounded weights in FP32 as well here: it shows the arithmetic, not the memory."
    )
    return Block("What is stored", [about], columns, cells, [])


def _recommended(found: Probed) -> list[str]:
    advice = found.advice
    choice = f"precision={advice.precision}" + ("" if advice.precision == "bf16" else f" scale={advice.scale}")
    lost, weights = found.census.lost
    return [
        f"{choice}: {advice.reason}",
        f"{_share(lost / max(1, weights))} of the weights that have a gradient are over 2048 times their update: FP16 "
        "weights would lose it, an FP32 copy keeps it",
        f"mptrain {shlex.join(found.told)} {choice}",
    ]
