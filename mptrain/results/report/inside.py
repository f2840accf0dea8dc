"""What was seen inside of runs: gradients by exponent, and what rounding made zero, layer by layer and step by step.

From watch.parquet of watched runs and probe.json of probes, which nobody vouches for: a file that is not what it should
be is named with the reason, and the page goes on without it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mptrain.results.runs import Run
from mptrain.results.summary import BadSummary, Fields, clean, load
from mptrain.results.watched import parts, read
from mptrain.watch.histogram import Histogram

KINDS = {"grad_output": "activation gradients", "grad_weight": "weight gradients"}
ALL = "(all layers)"
LARGEST_PART, LARGEST_WATCH = 100_000_000, 500_000_000  # bytes of one part of watch.parquet, of all
LOWEST, HIGHEST = -160, 160  # exponents that a file may name
COLUMNS = ("step", "layer", "order", "kind", "name", "scale", "count", "zero", "flushed", "sampled", "first_exponent",
           "exponents")  # fmt: skip


@dataclass(frozen=True)
class Gradients:
    """Histograms of one run, without the loss scale: by layer (ALL: of all) and kind of gradient."""

    label: str
    about: str
    of: dict[tuple[str, str], Histogram]


@dataclass(frozen=True)
class Losses:
    """Of a watched run, the share of gradients that rounding made zero.

    share: {(layer, step): share of the nonzero products}, layers as the forward pass meets them. counted: False where
    products were not counted; share then is that of zeros among all activation gradients.
    """

    layers: list[str]
    steps: list[int]
    share: dict[tuple[str, int], float]
    counted: bool


@dataclass
class Seen:
    """All of it. losses: by the folder of the run. unread: files that could not be used, with the reason."""

    gradients: list[Gradients] = field(default_factory=list)
    losses: dict[str, Losses] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)


def seen(runs: Iterable[Run], folders: Iterable[Path]) -> Seen:
    """What these runs and the probes below these folders hold."""
    found = Seen()
    for path in probes(folders):
        try:
            found.gradients.append(read_probe(path))
        except (OSError, BadSummary) as error:
            found.unread.append(clean(f"{path}: {_why(error)}"))
    for run in runs:
        folder = Path(run.folder) / "watch.parquet"
        if not folder.is_dir() or folder.is_symlink():
            continue
        try:
            gradients, found.losses[run.folder] = watched(label(run), rows(folder))
        except (OSError, BadSummary, ArithmeticError) as error:
            found.unread.append(clean(f"{folder}: {_why(error)}"))
        else:
            found.gradients += [gradients] if gradients.of else []
    return found


def label(run: Run) -> str:
    return f"{run.recipe}, {run.precision_label}, scale {run.scale}, seed {run.seed}"


def _why(error: Exception) -> str:
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)


def probes(folders: Iterable[Path]) -> Iterator[Path]:
    """Every probe.json below the folders, once, in order; links are not followed."""
    seen_already = set()
    for top in folders:
        for folder, inner, names in os.walk(top):
            inner[:] = sorted(name for name in inner if not name.startswith("."))
            path = Path(folder) / "probe.json"
            if "probe.json" in names and (place := os.path.realpath(path)) not in seen_already:
                seen_already.add(place)
                yield path


def read_probe(path: Path) -> Gradients:
    """The census of a probe; raises BadSummary."""
    probe = Fields(load(str(path)), "")
    advice = probe.inner("recommended")
    found: dict[tuple[str, str], Histogram] = {}
    census = probe.mapping.get("census")
    if not isinstance(census, list):
        raise BadSummary("lacks census (a list)")
    for number, line in enumerate(census):
        row = Fields(line, f"census.{number}.")
        layer, kind = row.text("layer", optional=True, longest=None), row.text("kind") + "s"
        counts = row.inner("exponents")
        exponents = {_exponent(name): counts.whole(name) for name in counts.mapping}
        zero = round(row.required_number("zero") * row.whole("values"))
        found[ALL if layer == "(all)" else layer, kind] = Histogram(_checked(exponents), zero)
    steps, advised = probe.whole("steps"), f"precision={advice.text('precision')} scale={advice.text('scale')}"
    about = (
        f"Census of {steps} FP32 steps on {probe.text('device')}: a zero is a true zero. "
        f"Recommended by the probe: {advised}, because {advice.text('reason', longest=None)}."
    )
    return Gradients(f"{probe.text('recipe')}, FP32 census, seed {probe.whole('seed')}", about, found)


def _exponent(name: str) -> int:
    try:
        return int(name)
    except ValueError:
        raise BadSummary(f"{clean(name, 40)!r} is no exponent") from None


def _checked(exponents: dict[int, int]) -> dict[int, int]:
    if any(not LOWEST <= e <= HIGHEST or count < 0 for e, count in exponents.items()):
        raise BadSummary(f"a histogram has a negative count or an exponent beyond {LOWEST}..{HIGHEST}")
    return {e: count for e, count in exponents.items() if count}


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of all parts; raises BadSummary where one cannot be read."""
    found = parts(folder)
    sizes = [path.stat().st_size for path in found]
    if max(sizes, default=0) > LARGEST_PART or sum(sizes) > LARGEST_WATCH:
        raise BadSummary(f"has {sum(sizes) / 1e6:.0f} MB; at most {LARGEST_WATCH / 1e6:.0f} MB are read")
    for part in found:
        yield from read(part, COLUMNS)


def watched(name: str, lines: Iterable[dict[str, Any]]) -> tuple[Gradients, Losses]:
    """Gradients and losses of one watched run; raises BadSummary for rows that no Watch writes."""
    found: dict[tuple[str, str], Histogram] = {}
    order: dict[str, int] = {}
    counted: dict[tuple[str, int], tuple[float, float]] = {}
    zeros: dict[tuple[str, int], tuple[int, int]] = {}
    odd, formats = 0, set()
    try:
        for row in lines:
            layer, at = clean(row["layer"]), (clean(row["layer"]), int(row["step"]))
            if row["kind"] not in ("grad_output", "grad_weight", "grad_input"):
                continue
            order.setdefault(layer, len(order) if row["order"] is None else int(row["order"]))
            if row["flushed"] is not None:
                lost, nonzero = counted.get(at, (0, 0))
                of = int(row["count"]) / max(1, int(row["sampled"]))  # a sample stands for a large tensor
                counted[at] = (
                    lost + int(row["flushed"]) * of,
                    nonzero + (int(row["sampled"]) - int(row["zero"])) * of,
                )
            elif row["name"] != "products":
                if row["kind"] == "grad_output":
                    zero, sampled = zeros.get(at, (0, 0))
                    zeros[at] = zero + int(row["zero"]), sampled + int(row["sampled"])
                power = math.log2(row["scale"] or 1.0)
                if power != int(power):
                    odd += 1
                    continue
                first = int(row["first_exponent"] or 0) - int(power)
                bins = {first + i: int(count) for i, count in enumerate(row["exponents"] or ())}
                histogram = Histogram(_checked(bins), int(row["zero"]))
                for key in ((layer, KINDS[row["kind"]]), (ALL, KINDS[row["kind"]])):
                    found[key] = found.get(key, Histogram()) + histogram
                formats.add(float(row["scale"] or 1.0))
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise BadSummary(
            f"holds a row that no watch writes ({type(error).__name__}: {clean(str(error), 80)})"
        ) from error
    scales = f"{min(formats):g}" if len(formats) == 1 else f"{min(formats):g} to {max(formats):g}" if formats else ""
    about = "Watched while it trained, all collected steps together, loss scale taken out again"
    about += f" (it was {scales})." if scales and scales != "1" else "."
    about += " What this run's own rounding had made zero is among its zeros." if counted else ""
    about += f" Left out: {odd} tensors whose loss scale was no power of two." if odd else ""
    share = counted or zeros
    layers = sorted({layer for layer, _ in share}, key=lambda layer: (order[layer], layer))
    shares = {at: lost / of for at, (lost, of) in share.items() if of}
    losses = Losses(layers, sorted({step for _, step in share}), shares, bool(counted))
    return Gradients(name, about, found), losses
