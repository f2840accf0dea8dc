"""Configurations and runs of the tiny family, in this process or in a forked one."""

import copy
import functools
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver as forkserver_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tiny import install

from mptrain import compose, config, files
from mptrain.results import checkpoint
from mptrain.results.record import Record

forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(["tiny.warm"])


def settings(recipe: str = "tiny", precision: str = "fp32", **changes: Any) -> config.Config:
    """As `mptrain +recipe=... precision=... KEY=VALUE`; dots in keys are written `__`."""
    values = copy.deepcopy(composed(recipe, precision))
    values["tensorboard"] = False
    for key, value in changes.items():
        *path, last = key.split("__")
        at = values
        for part in path:
            at = at[part]
        at[last] = value
    return config.check(values)


@functools.cache
def composed(recipe: str, precision: str) -> dict[str, Any]:
    return compose.baseline(recipe, precision)


@contextmanager
def stopped_at_each_checkpoint() -> Iterator[None]:
    """Inside, Ctrl-C arrives as soon as a checkpoint is written."""
    real = checkpoint.save

    def save_and_stop(*args: Any) -> None:
        real(*args)
        raise KeyboardInterrupt

    with patch.object(checkpoint, "save", save_and_stop):
        yield


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The networks' parameters and buffers in the last checkpoint."""
    models = last_state(folder)["models"]
    return {f"{name}.{key}": value for name, model in models.items() for key, value in model.items()}


def last_state(folder: Path) -> dict[str, Any]:
    state, notices = checkpoint.load_latest(Record(folder).checkpoints)
    assert state is not None and not notices, notices
    return state["run"]


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]) for key in a)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def lasting(folder: Path) -> dict[str, Any]:
    """What of a summary depends neither on the clock nor on which process took the watched step."""
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["memory"].pop("peak_mib") > 0 or summary["status"] == "diverged"
    summary["memory"].pop("kinds_mib")
    for key in ("started", "finished", "wall_s", "throughput"):
        del summary[key]
    return summary


def started(target: Any, *args: Any) -> Any:
    """A process forked from a clean, warm one, in which the tests' recipes and family are installed."""
    with patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}):
        forkserver_module.ensure_running()  # Python 3.11 does not hand its own path over
    process = forkserver.Process(target=_prepared, args=(target, sys.path, *args))
    process.start()
    return process


def _prepared(target: Any, path: list[str], *args: Any) -> None:
    sys.path[:] = path
    files.folder = install.folder
    install.family()
    torch.set_num_threads(1)
    target(*args)
