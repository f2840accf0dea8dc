"""Curves over steps, of each way of keeping numbers: the loss, the metric, the loss scale with what was skipped."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mptrain.results.document import Cell, Column
from mptrain.results.quantities import logged
from mptrain.results.report import charts
from mptrain.results.report.figure import Figure, number
from mptrain.results.row import Group
from mptrain.results.summary import clean, number_or_none

POINTS = 60  # of one curve; more lines of a log are averaged
TABLE_LINES = 20
LOG_FROM = 20.0  # a curve whose values differ by this factor is drawn on a logarithmic axis
Curve = dict[int, float]


@dataclass(frozen=True)
class Log:
    """The log of one run: {quantity: {step: value}}, {step: loss scale after it}, the steps that were skipped."""

    seed: str
    values: dict[str, Curve]
    scale: Curve
    skipped: list[int]
    last: int


def read_log(folder: str, seed: str, metric: str) -> Log:
    """What metrics.jsonl says; what is malformed in it is left out, as what is not finite."""
    values: dict[str, Curve] = defaultdict(dict)
    scale: Curve = {}
    skipped, last = [], 0
    for line in logged(Path(folder) / "metrics.jsonl"):
        step = line.get("step")
        if type(step) is not int or not 0 <= step < 2**40:
            continue
        last = max(last, step)
        loss = line.get("loss")
        parts = {f"loss of {clean(str(name), 40)}": v for name, v in loss.items()} if isinstance(loss, dict) else {}
        evaluated = line.get("eval")
        score = {metric: evaluated.get(metric)} if isinstance(evaluated, dict) else {}
        for name, value in {"loss": loss, **parts, **score}.items():
            if (given := number_or_none(value)) is not None:
                values[name][step] = given
        if (factor := number_or_none(line.get("scale"))) is not None and factor > 0:
            scale[step] = factor
        if line.get("skipped") is True:
            skipped.append(step)
    return Log(seed, dict(values), scale, skipped, last)


def logs(group: Group) -> dict[str, list[Log]]:
    """The logs of each row's seeds, by the row's name."""
    found = {}
    for row in group.rows:
        name = f"{row.precision}, scale {row.scale}"
        name = name if name not in found else f"{name}, {row.backend}"
        seeds = zip(row.folders.split(" | "), row.seeds.split(" "), strict=False)
        found[name] = [read_log(folder, seed, row.metric) for folder, seed in seeds]
    return found


def curves(name: str, group: Group, found: dict[str, list[Log]]) -> list[Figure]:
    """A figure for every loss, one for the metric where it was taken more than once, one for scales that moved."""
    metric = group.rows[0].metric
    quantities = dict.fromkeys(q for seeds in found.values() for log in seeds for q in log.values)
    figures = []
    for quantity in quantities:
        several = any(len(log.values.get(quantity, {})) > 1 for seeds in found.values() for log in seeds)
        if several:
            figures.append(_curve(f"{name}-{_word(quantity)}", quantity, quantity == metric, found))
    return figures + _scales(f"{name}-scale", found)


def _word(quantity: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in quantity.lower())


def _curve(name: str, quantity: str, exact: bool, found: dict[str, list[Log]]) -> Figure:
    last = max(log.last for seeds in found.values() for log in seeds)
    width = 1 if exact else max(1, math.ceil(last / POINTS))
    points: list[dict[str, Any]] = []
    for run, seeds in found.items():
        by_step: dict[int, list[float]] = defaultdict(list)
        for log in seeds:
            for step, value in binned(log.values.get(quantity, {}), width, last).items():
                by_step[step].append(value)
        for step, values in sorted(by_step.items()):
            points.append({"run": run, "step": step, "mean": statistics.fmean(values), "low": min(values),
                           "high": max(values), "seeds": len(values)})  # fmt: skip
    low, high = min(p["low"] for p in points), max(p["high"] for p in points)
    log_axis = low > 0 and high / low >= LOG_FROM
    counts = sorted({len(seeds) for seeds in found.values()})
    of = (
        f"{counts[0]} seed{'s' if counts[0] != 1 else ''}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
    )
    caption = f"{quantity} over steps: mean of {of}, the band from the lowest to the highest seed"
    caption += f"; means over {width} steps" if width > 1 else ""
    caption += ", logarithmic axis." if log_axis else "."
    columns, cells = _table(points, lambda p: Cell(number(p["mean"]), _range(p)))
    return Figure(name, caption, lambda: charts.lines(points, quantity, log_axis), columns, cells)


def binned(curve: Curve, width: int, last: int) -> Curve:
    """Means over windows of so many steps, each at the window's last step."""
    windows: dict[int, list[float]] = defaultdict(list)
    for step, value in curve.items():
        windows[min(last, math.ceil(step / width) * width)].append(value)
    return {step: statistics.fmean(values) for step, values in sorted(windows.items())}


def _range(point: dict[str, Any]) -> str:
    if point["seeds"] == 1:
        return ""
    return f"{number(point['low'])}..{number(point['high'])}"


def _table(
    points: Sequence[dict[str, Any]], cell: Callable[[dict[str, Any]], Cell]
) -> tuple[list[Column], list[list[Cell]]]:
    """A line a step, a column a run; of many steps evenly spaced ones, the last always among them."""
    runs = list(dict.fromkeys(point["run"] for point in points))
    by = {(point["run"], point["step"]): point for point in points}
    steps = thinned(sorted({point["step"] for point in points}), TABLE_LINES)
    columns = [Column("step", number=True)] + [Column(run, "mean, range", number=True) for run in runs]
    cells = [[Cell(str(s)), *(cell(by[run, s]) if (run, s) in by else Cell("") for run in runs)] for s in steps]
    return columns, cells


def thinned(values: Sequence[Any], most: int) -> list[Any]:
    """At most so many of them, evenly spaced, with the last."""
    stride = max(1, math.ceil(len(values) / most))
    return list(values[::-1][::stride][::-1])


def _scales(name: str, found: dict[str, list[Log]]) -> list[Figure]:
    moved = {
        run: seeds
        for run, seeds in found.items()
        if any(log.skipped or len(set(log.scale.values())) > 1 for log in seeds)
    }
    if not moved:
        return []
    points: list[dict[str, Any]] = []
    skips: list[dict[str, Any]] = []
    cells = []
    for run, seeds in moved.items():
        for log in seeds:
            of = {"run": run, "seed": f"{run} {log.seed}"}
            points += [{**of, "step": step, "scale": scale} for step, scale in turns(log.scale)]
            at = [{**of, "step": step, "scale": log.scale[step]} for step in log.skipped if step in log.scale]
            skips += thinned(at, 200)
            cells.append(_scale_line(run, log))
    columns = [Column("run", "seed"), Column("skipped", number=True), Column("first scale", number=True),
               Column("lowest", number=True), Column("highest", number=True), Column("last", number=True),
               Column("skipped at steps")]  # fmt: skip
    caption = (
        "Loss scale over steps, a line a seed, logarithmic axis; a triangle marks a step whose update was skipped."
    )
    return [Figure(name, caption, lambda: charts.steps(points, skips), columns, cells)]


def turns(scale: Curve) -> list[tuple[int, float]]:
    """The points of a stepped line where it turns, with its first and last."""
    at = sorted(scale.items())
    inner = (now for before, now in zip(at, at[1:], strict=False) if before[1] != now[1])
    return list(dict.fromkeys([*at[:1], *inner, *at[-1:]]))


def _scale_line(run: str, log: Log) -> list[Cell]:
    values = list(log.scale.values())
    ends: Iterable[float | None] = (
        (values[0], min(values), max(values), values[-1]) if values else (None, None, None, None)
    )
    listed = ", ".join(map(str, log.skipped[:12])) + (f" and {len(log.skipped) - 12} more" if log.skipped[12:] else "")
    return [
        Cell(run, f"seed {log.seed}"),
        Cell(str(len(log.skipped))),
        *(Cell("" if v is None else f"{v:g}") for v in ends),
        Cell(listed),
    ]
