"""Numbers that one run left, by name: for claims about more than the metric.

Everything here is read from files that nobody vouches for; what is missing or malformed is None, and a test that needs
it has one seed fewer.
"""

import json
import os
from pathlib import Path
from typing import Any

from mptrain.results.runs import Run
from mptrain.results.summary import LARGEST_NUMBER, BadSummary, load

LARGEST_LOG = 200_000_000  # bytes of metrics.jsonl
LAST = 0.1  # share of the logged steps at the end over which the training loss is averaged

EXACT = ("memory",)
"""Quantities that no seed changes, so that one run decides."""


def quantity(run: Run, name: str) -> float | None:
    """The number of this name, or None.

    metric, throughput, memory (MiB), skipped (share of attempted steps), final scale, seconds (of the run's last
    process), training loss (mean over the last tenth of the logged steps), metrics.NAME, counts.DIRECTION.KIND: of all
    values counted in a direction (forward, grad_input, grad_weight) the share that was zero, or of the nonzero ones the
    share that was flushed, subnormal or overflowed.
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
            return _number(load(os.path.join(run.folder, "summary.json")).get("wall_s"))
        if kind == "metrics":
            return _number(load(os.path.join(run.folder, "summary.json")).get("metrics", {}).get(rest))
        if kind == "counts":
            return _counted(load(os.path.join(run.folder, "counts.json")), *rest.split("."))
    except (OSError, BadSummary, AttributeError, TypeError):
        pass
    return None


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and abs(value) < LARGEST_NUMBER else None


def last_step(folder: Path) -> int:
    """The last step that a run logged; 0 if none."""
    steps = [line["step"] for line in logged(folder / "metrics.jsonl") if type(line.get("step")) is int]
    return max(steps, default=0)


def _training_loss(log: Path) -> float | None:
    losses = [loss for line in logged(log) if (loss := _number(line.get("loss"))) is not None]
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
    sums = {name: sum(_number(row.get(name)) or 0.0 for row in rows) for name in ("values", "zero", kind)}
    of = sums["values"] if kind == "zero" else sums["values"] - sums["zero"]
    return sums[kind] / of if of > 0 else None
