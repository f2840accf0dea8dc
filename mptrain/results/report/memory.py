"""Memory of a training step by kind: of the runs whose records tell, and of every network against its batch size.

The second comes from memory.csv, which scripts/memory_table.py writes with `mptrain estimate`'s own counting.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mptrain.results.csvfile import read_csv
from mptrain.results.document import Cell, Column
from mptrain.results.report import charts
from mptrain.results.report.figure import Figure
from mptrain.results.report.page import Part, embedded, script
from mptrain.results.row import Group
from mptrain.results.summary import BadSummary, load, number_or_none

KINDS = ("weights", "copies", "gradients", "optimizer", "activations", "buffers", "input")
MIB = 2**20


@dataclass(frozen=True)
class Memory:
    """One line of memory.csv: bytes by kind at the peak of one step of a recipe, in a precision, at a batch size."""

    recipe: str
    precision: str
    batch_size: int
    own_batch: bool  # whether it is the recipe's own batch size
    weights: int
    copies: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    input: int

    @property
    def kinds(self) -> dict[str, int]:
        return {kind: getattr(self, kind) for kind in KINDS}


def estimated() -> list[Memory]:
    """The lines of memory.csv."""
    return read_csv(script("memory.csv"), Memory)


def memory_part(lines: Sequence[Memory]) -> tuple[Part, list[Figure]]:
    """The section in which network and batch size are chosen, and the figures in it."""
    by_recipe: dict[str, dict[int, dict[str, list[int]]]] = defaultdict(lambda: defaultdict(dict))
    own = {line.recipe: line.batch_size for line in lines if line.own_batch}
    for line in lines:
        by_recipe[line.recipe][line.batch_size][line.precision] = list(line.kinds.values())
    networks = [
        {"name": recipe, "own": sorted(batches).index(own[recipe]),
         "batches": [{"size": size, "bytes": of} for size, of in sorted(batches.items())]}
        for recipe, batches in by_recipe.items()
    ]  # fmt: skip
    figures = [_shares([line for line in lines if line.own_batch])]
    data = embedded({"kinds": KINDS, "networks": networks})
    heads = "".join(f'<th scope="col" class="number">{kind}</th>' for kind in (*KINDS, "peak"))
    html = script("memory.html").replace("{heads}", heads).replace("{figures}", figures[0].html())
    html = html.replace("{data}", data)
    return Part("memory", "Memory against network and batch size", html), figures


def _shares(lines: Sequence[Memory]) -> Figure:
    """Every recipe at its own batch: FP16 beside FP32, whose peak is 1."""
    of = {(line.recipe, line.precision): line.kinds for line in lines}
    recipes = [r for r in dict.fromkeys(line.recipe for line in lines) if (r, "fp32") in of and (r, "fp16") in of]
    points, cells, rows = [], [], []
    for recipe in recipes:
        whole = sum(of[recipe, "fp32"].values())
        for precision in ("fp32", "fp16"):
            name = f"{recipe}, {precision}"
            rows.append(name)
            kinds = of[recipe, precision]
            points += [_point(name, kind, size / whole) for kind, size in kinds.items()]
            peak = sum(kinds.values())
            cells.append(
                [Cell(recipe, precision), *map(_mib, kinds.values()), _mib(peak), Cell(f"{peak / whole:.2f}x")]
            )
    columns = [Column("recipe", "precision"), *(Column(kind, "MiB", number=True) for kind in (*KINDS, "peak")),
               Column("beside FP32", number=True)]  # fmt: skip
    caption = "Memory of one step at each recipe's own batch size, by kind, as a share of the peak in FP32."
    return Figure(
        "memory-by-kind", caption, partial(charts.bars, points, rows, KINDS, "share of FP32's peak"), columns, cells
    )


def _point(run: str, kind: str, value: float) -> dict[str, Any]:
    return {"run": run, "kind": kind, "value": value, "place": KINDS.index(kind)}


def _mib(size: float) -> Cell:
    return Cell(f"{size / MIB:,.2f}" if size < 100 * MIB else f"{size / MIB:,.0f}")


def recorded(name: str, group: Group) -> list[Figure]:
    """Memory by kind of the rows whose records tell it apart; no figure if none does."""
    points, cells, rows = [], [], []
    for row in group.rows:
        kinds = _kinds(row.folders.split(" | "))
        if kinds:
            label = f"{row.precision}, scale {row.scale}"
            rows.append(label)
            points += [_point(label, kind, size) for kind, size in kinds.items()]
            cells.append(
                [
                    Cell(label),
                    *(Cell(f"{kinds.get(kind, 0):.2f}") for kind in KINDS),
                    Cell(f"{sum(kinds.values()):.2f}"),
                ]
            )
    if not points:
        return []
    columns = [Column("run"), *(Column(kind, "MiB", number=True) for kind in (*KINDS, "peak"))]
    caption = "Memory at the peak of a step by kind, MiB: live tensors; under emulation activations hold FP32 images."
    chart = partial(charts.bars, points, rows, KINDS, "MiB")
    return [Figure(f"{name}-memory", caption, chart, columns, cells)]


def _kinds(folders: Iterable[str]) -> dict[str, float]:
    """Of the run with the largest peak: {kind: MiB}; empty if a record does not say."""
    found: list[dict[str, float]] = []
    for folder in folders:
        try:
            memory = load(os.path.join(folder, "summary.json")).get("memory")
            kinds = memory.get("kinds_mib") if isinstance(memory, dict) else None
        except (OSError, BadSummary, AttributeError):
            continue
        if isinstance(kinds, dict) and all(_is_size(kinds.get(kind, 0)) for kind in KINDS):
            found.append({kind: float(kinds[kind]) for kind in KINDS if kind in kinds})
    return max(found, key=lambda kinds: (sum(kinds.values()), json.dumps(kinds, sort_keys=True)), default={})


def _is_size(value: Any) -> bool:
    return (size := number_or_none(value)) is not None and size >= 0
