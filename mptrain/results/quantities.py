"""Numbers that one run left, by name: for claims about more than the metric.

Everything here is read from files that nobody vouches for; what is missing or malformed is None, and a test that needs
it has one seed fewer.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mptrain.results.runs import Run
from mptrain.results.summary import BadSummary, load, number_or_none
from mptrain.results.watched import parts, read

LARGEST_LOG = 200_000_000  # bytes of metrics.jsonl
LAST = 0.1  # share of the logged steps at the end over which the training loss is averaged

LARGEST_PART = 500_000_000  # bytes of one file of watch.parquet
TINY = -24  # FP16's smallest number is 2^-24

EXACT = ("memory", "memory.weights")
"""Quantities that no seed changes, so that one run decides."""


def quantity(run: Run, name: str) -> float | None:
    """The number of this name, or None.

    metric, throughput, memory (MiB), skipped (share of attempted steps), final scale, seconds (of the run's last
    process), training loss (mean over the last tenth of the logged steps), metrics.NAME, counts.DIRECTION.KIND: of all
    values counted in a direction (forward, grad_input, grad_weight) the share that was zero, or of the nonzero ones the
    share that was flushed, subnormal or overflowed, memory.weights (MiB of parameters and of the FP32 copy). Of a
    watched run: watch.KIND.zero, share of zeros among what was seen of that kind in all steps, watch.KIND.tiny, share
    of its nonzero values below 2^-24 without the loss scale, watch.updates.small, of the FP32 weights that have a
    gradient the share that is over 2048 times its update, and alarms.RULE, 1 if this alarm was raised and 0 if not.
    """
    own = {
        "metric": run.value,
        "throughput": run.throughput,
        "memory": run.memory_mib,
        "skipped": run.skipped / run.attempted if run.attempted else None,
        "final scale": run.final_scale,
    }
    if name in own:
        return own[name]
    if name == "training loss":
        return _training_loss(Path(run.folder) / "metrics.jsonl")
    kind, _, rest = name.partition(".")
    try:
        if name == "seconds":
            return number_or_none(load(os.path.join(run.folder, "summary.json")).get("wall_s"))
        if kind == "metrics":
            return number_or_none(load(os.path.join(run.folder, "summary.json")).get("metrics", {}).get(rest))
        if kind == "memory":
            return number_or_none(load(os.path.join(run.folder, "summary.json")).get("memory", {}).get("weights_mib"))
        if kind == "alarms":
            return _raised(load(os.path.join(run.folder, "summary.json")), rest)
        if kind == "counts":
            return _counted(load(os.path.join(run.folder, "counts.json")), *rest.split("."))
        if kind == "watch":
            return _watched(list(_rows(Path(run.folder) / "watch.parquet")), *rest.split("."))
    except (OSError, BadSummary, AttributeError, TypeError):
        pass
    return None


def last_step(folder: Path) -> int:
    """The last step that a run logged; 0 if none."""
    steps = [line["step"] for line in logged(folder / "metrics.jsonl") if type(line.get("step")) is int]
    return max(steps, default=0)


def _training_loss(log: Path) -> float | None:
    losses = [loss for line in logged(log) if (loss := number_or_none(line.get("loss"))) is not None]
    last = losses[-max(1, round(LAST * len(losses))) :]
    return sum(last) / len(last) if last else None


def logged(log: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; none if it cannot be read. The last may be cut short by a kill."""
    lines = []
    try:
        if log.is_symlink() or log.stat().st_size > LARGEST_LOG:
            return []
        with open(log, encoding="utf-8") as file:
            for text in file:
                if isinstance(line := json.loads(text), dict):
                    lines.append(line)
    except (OSError, ValueError, RecursionError):
        pass
    return lines


def _counted(table: Any, direction: str, kind: str) -> float | None:
    rows = [row for row in table if isinstance(row, dict) and row.get("direction") == direction]
    sums = {name: sum(number_or_none(row.get(name)) or 0.0 for row in rows) for name in ("values", "zero", kind)}
    of = sums["values"] if kind == "zero" else sums["values"] - sums["zero"]
    return sums[kind] / of if of > 0 else None


def _raised(summary: Any, rule: str) -> float | None:
    verdict = summary.get("watch")  # names every rule; "alarms" lists the first twenty only
    return float(rule in verdict.split(", ")) if isinstance(verdict, str) else None


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of watch.parquet that quantities are about, up to a part that cannot be read."""
    columns = ("step", "layer", "kind", "name", "scale", "count", "sampled", "zero", "first_exponent", "exponents")
    for part in parts(folder):
        try:
            if part.stat().st_size > LARGEST_PART:
                return
            rows = read(part, columns, later=("small_updates",))
        except (OSError, BadSummary):
            return
        yield from rows


def _watched(rows: list[dict[str, Any]], kind: str, what: str) -> float | None:
    if (kind, what) == ("updates", "small"):
        moving = {_place(row): row["sampled"] - row["zero"] for row in rows if row.get("kind") == "grad_weight"}
        counted = [row for row in rows if row.get("small_updates") is not None and _place(row) in moving]
        return _share(
            (_of_all(row, row["small_updates"]) for row in counted),
            (_of_all(row, moving[_place(row)]) for row in counted),
        )
    rows = [row for row in rows if row.get("kind") == kind and row.get("name") != "products"]
    if what == "zero":
        return _share((_of_all(row, row["zero"]) for row in rows), (row["count"] for row in rows))
    return _share((_of_all(row, _tiny(row)) for row in rows), (_of_all(row, sum(row["exponents"])) for row in rows))


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["step"], row["layer"], row["name"]


def _of_all(row: dict[str, Any], counted: int) -> float:
    """From a count in the sample to one in the whole tensor."""
    return counted * row["count"] / max(1, row["sampled"])


def _tiny(row: dict[str, Any]) -> int:
    """How many nonzero numbers of a row are below 2^-24; a loss scale that is no power of two is taken as the next."""
    end = TINY + math.ceil(math.log2(row["scale"] or 1.0)) - row["first_exponent"]
    return sum(row["exponents"][: max(0, end)])


def _share(parts: Iterable[float], wholes: Iterable[float]) -> float | None:
    whole = sum(wholes)
    return sum(parts) / whole if whole > 0 else None
