"""The tables of gpu_check.py: speed beside FP32, and beside what was published for related networks."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarking import table
from gpu_speed import Speed

PUBLISHED = Path(__file__).parent.parent / "results" / "gpu" / "published.csv"


def outcomes(lines: Sequence[str]) -> str:
    """How many tests passed, failed or were skipped, and which failed; of pytest -v, whether it came to its end or not.

    What it said last if no test ran.
    """
    found = [m.groups() for line in lines if (m := re.match(r"(\S+::.*) (PASSED|FAILED|ERROR|SKIPPED)\b", line))]
    counts = ", ".join(f"{n} {outcome.lower()}" for outcome, n in Counter(outcome for _, outcome in found).items())
    failed = [f"- {test}" for test, outcome in found if outcome in ("FAILED", "ERROR")]
    return "\n".join([f"{counts or lines[-1]} (tests.txt)", *([""] if failed else []), *failed])


def speed_tables(speeds: Sequence[Speed], tops: dict[str, float]) -> list[str]:
    """One table a recipe, each beside what was published for a network like it."""
    shown = ", ".join(f"{name} {top / 1e12:.3g}" for name, top in tops.items())
    parts = [
        f"TFLOP/s of a large square product in this run, by format: {shown or 'not measured'}. Units per second are of "
        "whole steps on one batch of synthetic data that lies on the device; 'of the peak' is the time that a step's "
        "products would take at those rates, each in its format, over that of the step. The paper has no training "
        "times: it names 2 to 6 times FP32 for DeepBench operations on Volta."
    ]
    published = read_published()
    for recipe in dict.fromkeys(row.recipe for row in speeds):
        rows = []
        base = {row.which: row for row in speeds if row.recipe == recipe and row.precision == "fp32"}
        for row in (row for row in speeds if row.recipe == recipe):
            beside = base.get(row.which)
            faster = beside and row.throughput and beside.throughput and row.throughput / beside.throughput
            smaller = beside and row.peak_gib and beside.peak_gib and row.peak_gib / beside.peak_gib
            cells = [row.throughput, faster, row.peak_gib, smaller if row.which == "equal" else None]
            cells += [row.tflops, row.of_peak, row.watts, row.joules_per_1000]
            written = [cell(value, digits) for value, digits in zip(cells, (0, 2, 2, 2, 1, 2, 0, 1), strict=True)]
            rows.append([f"{row.precision} {row.backend}", row.which, str(row.batch or ""), *written, row.note])
        unit = next((row.unit for row in speeds if row.recipe == recipe and row.unit), "units/s")
        header = ["precision", "which batch", "batch", unit, "to fp32", "peak GiB", "to fp32"]
        header += ["TFLOP/s", "of the peak", "W", "J per 1000", "note"]
        parts.append(f"### {recipe}\n\n" + table(header, rows))
        parts += [f"Here, at the same batch: {here}."] if (here := ratios(speeds, recipe)) else []
        known = [f"{p['model']} on {p['machine']}: {p['ratio']} over {p['base_precision']}" for p in published(recipe)]
        parts += [f"Published for mixed precision: {'; '.join(known)} (results/gpu/published.csv)."] if known else []
    return parts


def ratios(speeds: Sequence[Speed], recipe: str) -> str:
    """Of the 16-bit formats over FP32 and over TF32, which is what the published tables of newer GPUs start from."""
    found = {row.precision: row.throughput for row in speeds if row.recipe == recipe and row.which == "equal"}
    pairs = [(a, b) for a in ("fp16", "bf16") for b in ("fp32", "tf32")]
    measured = [(a, b, x, y) for a, b in pairs if (x := found.get(a)) and (y := found.get(b))]
    return ", ".join(f"{a} over {b} {x / y:.2f}" for a, b, x, y in measured)


def read_published() -> Callable[[str], list[dict[str, str]]]:
    with open(PUBLISHED, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return lambda recipe: [row for row in rows if row["recipe"] == recipe]


def cell(value: float | None, digits: int) -> str:
    return "" if not value else f"{value:.{digits}f}"
