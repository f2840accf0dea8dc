"""Throughput, memory and surroundings of a run, each named by how it was measured."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mptrain import __version__
from mptrain.precision import hardware
from mptrain.precision.ran import RanDtypes


class Throughput:
    """Units per second over the steps after the warm-up, without evaluations and checkpoints.

    The device is waited for when the window opens, closes and pauses, and at no other time. `clock` and `wait` can be
    replaced in tests.
    """

    def __init__(
        self, unit: str, warmup: int, wait: Callable[[], None], clock: Callable[[], float] = time.perf_counter
    ):
        self.unit = unit
        self.warmup = warmup
        self.steps = 0
        self._seen = 0
        self._units = 0
        self._seconds = 0.0
        self._since: float | None = None
        self._wait = wait
        self._clock = clock

    def step(self, units: int) -> None:
        """One training step over so many units has been issued."""
        self._seen += 1
        if self._since is not None:
            self.steps += 1
            self._units += units
        elif self._seen == self.warmup:
            self._wait()
            self._since = self._clock()

    def begin(self) -> None:
        """Training begins; with no warm-up the window opens here."""
        if self.warmup == 0:
            self._wait()
            self._since = self._clock()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that is not training."""
        if self._since is None:
            yield
            return
        self._wait()
        self._seconds += self._clock() - self._since
        try:
            yield
        finally:
            self._wait()
            self._since = self._clock()

    def result(self) -> dict[str, Any]:
        """{value, unit, warmup, steps}; value is None if no step came after the warm-up."""
        if self._since is not None:
            self._wait()
            now = self._clock()
            self._seconds += now - self._since
            self._since = now
        value = self._units / self._seconds if self.steps and self._seconds > 0 else None
        return {"value": value, "unit": f"{self.unit}/s", "warmup": self.warmup, "steps": self.steps}


class FirstStep:
    """Looks at one step, the first, which the throughput leaves out: formats that ran, and memory on a CPU.

    On a CPU memory is the peak of live tensor bytes that torch's MemTracker counts over that step; under emulation
    this includes the FP32 image of one operation at a time. On a GPU it is `max_memory_allocated` of the whole run.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.dtypes: dict[str, str] = {}
        self.peak_bytes: int | None = None

    @contextmanager
    def watching(self, models: list[nn.Module], optimizers: list[Optimizer]) -> Iterator[None]:
        with ExitStack() as stack:
            tracker = None
            if self.device.type == "cpu":
                from torch.distributed._tools.mem_tracker import MemTracker

                tracker = MemTracker()
                tracker.track_external(*models, *optimizers)
                stack.enter_context(tracker)
            ran = stack.enter_context(RanDtypes())
            yield
        self.dtypes = ran.table()
        if tracker is not None:
            peak = tracker.get_tracker_snapshot("peak")
            self.peak_bytes = next((total["Total"] for place, total in peak.items() if place.type == "cpu"), None)

    def memory(self) -> dict[str, Any]:
        """{peak_mib, how}"""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
            return {"peak_mib": peak / 2**20, "how": "torch.cuda.max_memory_allocated"}
        peak_mib = None if self.peak_bytes is None else self.peak_bytes / 2**20
        return {"peak_mib": peak_mib, "how": "MemTracker: live tensor bytes, peak of one step"}


def waiter(device: torch.device) -> Callable[[], None]:
    """Waits until the device has done what it was given."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, device, threads, TF32 switches and commit, as they are now."""
    return {
        "mptrain": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "device_name": device_name(device),
        "threads": torch.get_num_threads(),
        "tf32": hardware.tf32_flags(device.type),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "commit": commit(),
    }


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of the checkout this package lies in, with "+" if files differ from it; None outside of one."""
    top = Path(__file__).parent.parent

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(top), *args], capture_output=True, text=True, timeout=10, check=True
        ).stdout

    try:
        if not (top / ".git").exists():
            return None
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "mptrain", "configs", "recipes").strip()
        return git("rev-parse", "--short=12", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
