"""A window of a run computed once more, outside of the count: what was not finite first, what native products lose.

Nothing of it stays: buffers, a task's own state and the random numbers are as they were.
"""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from mptrain import layout, process
from mptrain.data.dataset import Batch
from mptrain.results.record import write_atomically
from mptrain.watch.provenance import Finding, first_nonfinite

if TYPE_CHECKING:
    from mptrain.train import Run


def no_scale_helps(run: Run) -> bool:
    """Whether a skipped step is more than a scale on its way down: not FP16, at the floor, or a loss of NaN."""
    if run.precision.compute != "float16":
        return True
    if run.scaler.label == "dynamic" and run.scaler.value <= run.config.scaling.floor:
        return True
    alone = run.ranks.size == 1  # among several, all have to decide alike
    return alone and not all(bool(values[-1].isfinite()) for values in run.recent.values())


def explain(run: Run, window: list[Batch]) -> list[Finding]:
    """Runs the window again to find what was not finite first; leaves provenance.json and a message."""

    def again() -> list[torch.Tensor]:
        losses = []
        scaler = run.scaler.aside()
        scaler.value, drawn_from = run.begun  # the step's own scale, and dropout as it fell
        process.set_torch_state(drawn_from, run.device)
        run.weights.zero_grad()
        run.buffers.keep()
        carried = run.task.state_dict()
        for batch in window:
            for _, loss in run.losses(batch, run.region):
                losses.append(loss.detach())
                scaler.scale(loss).backward()
        run.buffers.restore()
        run.task.load_state_dict(carried)
        run.weights.zero_grad()
        return losses

    run.explained = True
    unseen = nullcontext() if run.observer is None else run.observer.watch.blind()
    written = layout.as_written(run.config)
    with unseen, written, run.throughput.paused(), process.same_random_state(run.device), run.weights.whole():
        found = [f for f in run.ranks.gathered(first_nonfinite(run.models, again)) if f is not None]
    if found and run.ranks.leads:
        content = {"step": run.attempted, "scale": run.scaler.value, **found[0].as_dict()}
        write_atomically(run.record.folder / "provenance.json", json.dumps(content, indent=1) + "\n")
        message = f"step {run.attempted} is not finite, first in the {found[0]}; {found[0].advice}"
        print("\n  ".join([f"mptrain: {message}", *found[0].details]), file=sys.stderr)
    return found


def blame(run: Run, window: list[Batch]) -> str:
    """Why the run diverged: step, scale, and the layer where the last batch first went wrong."""
    found = explain(run, window)
    where = found[0] if found else "no single layer (the batch is finite when it is run again)"
    return (
        f"{run.scaler.consecutive_skips} updates in a row were not finite, the last at step {run.attempted} "
        f"with scale {run.scaler.value:g}; first in the {where}"
    )


def shadow(run: Run, window: list[Batch]) -> None:
    """Runs the coming window where Watch can count what its native products will lose to rounding."""

    def again(region: AbstractContextManager[Any]) -> None:
        scaler, carried = run.scaler.aside(), run.task.state_dict()
        sizes = [run.task.size(batch) for batch in window]
        for batch, size in zip(window, sizes, strict=True):
            for _, loss in run.losses(batch, region):
                scaler.scale(loss * (size / sum(sizes))).backward()
        run.task.load_state_dict(carried)

    assert run.observer is not None
    with run.throughput.paused(), process.same_random_state(run.device):
        run.observer.watch.shadow(again)
