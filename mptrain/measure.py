"""Throughput, memory and surroundings of a run, each named by how it was measured."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
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

    def step(self, units: int, counted: bool = True) -> None:
        """One training step over so many units has been issued; not counted if it was slowed by instruments."""
        self._seen += 1
        if self._since is not None:
            self.steps += counted
            self._units += units * counted
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
        with self.paused():
            value = self._units / self._seconds if self.steps and self._seconds > 0 else None
        return {"value": value, "unit": f"{self.unit}/s", "warmup": self.warmup, "steps": self.steps}

    def state_dict(self) -> dict[str, Any]:
        """What was counted and timed so far; call while paused. A resumed process warms up anew."""
        return {"steps": self.steps, "units": self._units, "seconds": self._seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self._units, self._seconds = state["steps"], state["units"], state["seconds"]


class Instruments:
    """Look at two steps that the throughput leaves out: formats that ran, and memory on a CPU.

    These are the first step and the first that finds the optimizers' state in place. On a CPU memory is the peak of
    live tensor bytes in such a step (memory.py); under emulation this includes the FP32 image of one operation at a
    time. On a GPU it is `max_memory_allocated` of the whole run.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.dtypes: dict[str, str] = {}
        self.peak_bytes = 0
        self.kinds: dict[str, int] = {}
        self.settled = False

    @contextmanager
    def watching(
        self, held: Iterable[Tensor], models: Iterable[nn.Module] = (), optimizers: Iterable[Optimizer] = ()
    ) -> Iterator[None]:
        """held: the tensors that live through the step whether it uses them or not, e.g. averaged weights.

        models, optimizers: whose tensors these are, to tell kinds of memory apart.
        """
        memory: Any = nullcontext()
        if self.device.type == "cpu":
            from mptrain.memory import StepMemory  # slow to import, and of no use on a GPU

            memory = StepMemory(held, models, optimizers)
        with memory, RanDtypes() as ran:
            yield
        self.dtypes = ran.table()
        if self.device.type == "cpu" and memory.peak() > self.peak_bytes:
            self.peak_bytes, self.kinds = memory.peak(), memory.kinds()

    def memory(self) -> dict[str, Any]:
        """{peak_mib, how}; on a CPU kinds_mib, the peak by kind; on a GPU reserved_mib, what the allocator keeps."""
        if self.device.type == "cuda":
            return {
                "peak_mib": torch.cuda.max_memory_allocated(self.device) / 2**20,
                "reserved_mib": torch.cuda.max_memory_reserved(self.device) / 2**20,
                "how": "torch.cuda.max_memory_allocated",
            }
        peak_mib = self.peak_bytes / 2**20 if self.peak_bytes else None
        kinds_mib = {kind: size / 2**20 for kind, size in self.kinds.items()}
        return {"peak_mib": peak_mib, "kinds_mib": kinds_mib, "how": "MemTracker: live tensor bytes, peak of one step"}

    def state_dict(self) -> dict[str, Any]:
        return {
            "dtypes": self.dtypes,
            "peak_bytes": self.peak_bytes,
            "kinds": self.kinds,
            "settled": self.settled,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dtypes, self.peak_bytes, self.settled = state["dtypes"], state["peak_bytes"], state["settled"]
        self.kinds = state.get("kinds", {})  # checkpoints of older versions lack it


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
