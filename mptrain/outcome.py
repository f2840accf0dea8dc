"""How a run ended, as its summary says it."""

from __future__ import annotations

import time
import traceback
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from mptrain import measure
from mptrain.config import Config
from mptrain.errors import UserError
from mptrain.results.record import Record

if TYPE_CHECKING:
    from mptrain.train import Run


def summary(run: Run, metrics: dict[str, float], throughput: dict[str, Any] | None) -> dict[str, Any]:
    """Everything that stands in summary.json, status and reason apart."""
    task, config = run.task, run.config
    environment = measure.environment(run.device)
    fp8 = run.precision.fp8_layers(run.models)
    if run.ranks.size > 1:
        environment["device_name"] = f"{run.ranks.size} x {environment['device_name']}"
    now = datetime.now(UTC)
    return {
        **identity(config),
        "device": run.device.type,
        "backend": run.precision.backend(run.device.type),
        "dtypes": run.instruments.dtypes,
        **({} if fp8 is None else {"fp8": fp8}),
        **({"compiled": config.compile} if config.compile else {}),
        "metric": {
            "name": task.metric,
            "value": metrics.get(task.metric),
            "higher_is_better": task.higher_is_better,
            "margin": task.margin,
        },
        "metrics": {key: value for key, value in metrics.items() if key != task.metric},
        "throughput": throughput,
        "memory": {**run.instruments.memory(), "weights_mib": _weights(run) / 2**20},
        "steps": {
            "attempted": run.attempted,
            "applied": min(run.applied.values()),
            "skipped": max(run.skipped.values()),
            **({"by_optimizer": run.skipped} if len(run.skipped) > 1 else {}),
        },
        "final_scale": None if run.scaler.label == "none" else run.scaler.value,
        "data": {"name": task.train_set.name, "kind": task.train_set.kind},
        "eval_precision": config.eval.precision,
        **({} if run.observer is None else run.observer.summary()),
        "environment": environment,
        "started": run.started.isoformat(timespec="seconds"),
        "finished": now.isoformat(timespec="seconds"),
        "wall_s": round(time.monotonic() - run.began, 3),  # the clock may be set while a run lasts
        "key": {
            "recipe": config.recipe,
            "data": task.train_set.name,
            "steps": config.steps,
            "batch_size": config.batch_size,
            "accumulate": config.accumulate,
            "settings": config.comparable(),
            "device": environment["device_name"],
            "threads": environment["threads"],
            "torch": environment["torch"],
        },
    }


def _weights(run: Run) -> int:
    """Bytes of the networks' parameters and of the copies that are updated in their place."""
    held = [p for name in run.models for p in run.weights.kept(name)]
    return sum(p.numel() * p.element_size() for p in {id(p): p for p in held}.values())


def identity(config: Config) -> dict[str, Any]:
    """What every summary says of the run itself, however it ended."""
    return {
        "recipe": config.recipe,
        "precision": config.numbers.name,
        "precision_label": config.numbers.label,
        "scale": config.scale_label,
        "seed": config.seed,
    }


def sentence(summary: dict[str, Any]) -> str:
    """The result in a few words."""
    if summary["reason"] is not None:
        return summary["reason"]
    value = summary["metric"]["value"]
    return f"{summary['metric']['name']} {'is not finite' if value is None else f'{value:.4g}'}"


def note_failure(record: Record, config: Config, error: Exception) -> None:
    """Writes status "failed"; a mistake of the user's before the first step leaves nothing behind instead.

    Where even that cannot be written, the original error is what the user sees.
    """
    with suppress(OSError):
        if isinstance(error, UserError) and record.abandon():
            return
        trace = "".join(traceback.format_exception(error))
        reason = f"{type(error).__name__}: {error}"[:2000]
        record.finish("failed", reason, {**identity(config), "traceback": trace[-8000:]})
