"""What a run has to find again after an interruption: into a checkpoint, and back."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from mptrain import process
from mptrain.errors import UserError
from mptrain.results import checkpoint

if TYPE_CHECKING:
    from mptrain.train import Run


def state_dict(run: Run) -> dict[str, Any]:
    """All that a run has to find again, as tensors and plain values."""
    rank_0, *others = run.ranks.gathered(process.random_state(run.device))
    return {
        "models": {name: run.weights.network_state(name) for name in run.models},
        "weights": run.weights.state_dict(),
        "optimizers": {n: run.weights.optimizer_state(n, opt.state_dict()) for n, opt in run.optimizers.items()},
        "scaler": run.scaler.state_dict(),
        "average": None
        if run.average is None
        else {name: run.weights.collected(name, values) for name, values in run.average.state_dict().items()},
        "task": run.task.merged(run.ranks.gathered(run.task.state_dict())),
        "loader": run.loader.state_dict(),
        "counter": None if run.counter is None else run.counter.state_dict(),
        "steps": {"attempted": run.attempted, "applied": run.applied, "skipped": run.skipped},
        "diverged": run.diverged,
        "recent": run.recent_losses(),
        "random": rank_0,
        "random_of_others": others,
        "throughput": run.throughput.state_dict(),
        "instruments": run.instruments.state_dict(),
    }


def load_state_dict(run: Run, state: dict[str, Any]) -> None:
    """Puts a run where `state_dict` found one."""
    for name, optimizer in run.optimizers.items():
        run.weights.load_network_state(name, state["models"][name])
        optimizer.load_state_dict(run.weights.optimizer_part(name, state["optimizers"][name]))
    run.weights.load_state_dict(state["weights"])
    run.scaler.load_state_dict(state["scaler"])
    if run.average is not None:
        run.average.load_state_dict({n: run.weights.distributed(n, values) for n, values in state["average"].items()})
    part = run.task.part(state["task"], run.ranks.rank, run.ranks.size)
    run.task.load_state_dict(run.to_device(part))
    run.loader.load_state_dict(state["loader"])
    if run.counter is not None:
        run.counter.load_state_dict(state["counter"])
    steps = state["steps"]
    run.attempted, run.applied, run.skipped = steps["attempted"], steps["applied"], steps["skipped"]
    run.diverged = state["diverged"]
    for name, values in state["recent"].items():  # of the whole batch, and summed over the ranks again
        run.recent[name] = list((values if run.ranks.leads else torch.zeros_like(values)).unbind())
    run.throughput.load_state_dict(state["throughput"])
    run.instruments.load_state_dict(state["instruments"])
    states = [state["random"], *state.get("random_of_others", [])]
    if run.ranks.rank < len(states):
        process.set_random_state(states[run.ranks.rank], run.device)
    else:
        process.seed_everything(process.seed_of(run.config.seed, run.ranks.rank, run.attempted))


def resume(run: Run) -> None:
    """Goes on from the newest whole checkpoint, or starts anew."""
    length = load_newest(run, "starting anew")
    if run.ranks.leads:
        run.record.cut_log(length or 0)
        if run.observer is not None:
            run.observer.watch.resume(run.attempted)
        if length is not None:
            print(f"resuming after step {run.attempted}: {run.record.folder}")


def load_newest(run: Run, otherwise: str) -> int | None:
    """Puts the run where its newest whole checkpoint is; the length of its log then, None if there is no checkpoint."""
    state, notices = run.ranks.first(lambda: checkpoint.load_latest(run.record.checkpoints))
    for notice in notices if run.ranks.leads else ():
        print(f"mptrain: {notice}; " + ("using the one before" if state else otherwise), file=sys.stderr)
    if state is None:
        return None
    try:
        load_state_dict(run, state["run"])
        return int(state["log_bytes"])
    except (LookupError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        raise UserError(
            f"the checkpoint in {run.record.folder} does not fit this version's networks ({error}); "
            "start anew in another folder: out=FOLDER"
        ) from error


def save(run: Run) -> None:
    """Writes a checkpoint; among several ranks all have to call it."""
    state = state_dict(run)
    run.ranks.first(lambda: _write(run, state))


def _write(run: Run, state: dict[str, Any]) -> None:
    run.progress.flush()
    if run.observer is not None:
        run.observer.watch.flush()
    checkpoint.save(run.record.checkpoints, run.attempted, {"run": state, "log_bytes": run.record.flush()})
