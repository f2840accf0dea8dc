"""Throughput, memory, distance to the peak and energy of training steps, recipe by recipe; for gpu_check.py.

Measured are whole training steps of the runner on one batch of synthetic data that lies on the device: cast, forward,
backward, unscaling, check, update. The input pipeline is not in them. Peak memory is `max_memory_allocated`, energy is
NVML's counter or, without it, what nvidia-smi says of the power; on a CPU there is neither, and the cells stay empty.
"""

from __future__ import annotations

import copy
import gc
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_meters import Energy
from torch import nn

from mptrain import compose, hollow, measure, tasks
from mptrain.config import Config, check
from mptrain.data.dataset import Batch, BatchKey, DataSpec
from mptrain.precision import hardware
from mptrain.results.record import Record
from mptrain.roofline import counted
from mptrain.train import Run

GIB = 2**30
ROOM = 0.92
"""Share of the device's memory that the guess of the largest batch counts on; the allocator and cuDNN take theirs."""
LONGEST_STEP = 3.0
"""Seconds; a batch whose step would take longer is not tried."""


class DeviceLost(Exception):
    """The GPU answers nothing any more, in this process."""


@dataclass
class Speed:
    """Steps of one recipe in one precision at one batch size; None where it was not or could not be measured."""

    recipe: str
    precision: str
    which: str  # "equal": one batch for every precision; "largest": the largest that fits
    batch: int | None = None
    backend: str = ""
    step_ms: float | None = None
    throughput: float | None = None
    unit: str = ""
    peak_gib: float | None = None
    tflops: float | None = None  # FLOP of the products in a step over its time
    of_peak: float | None = None  # least time of the products, by large ones measured in this run, over its time
    watts: float | None = None
    joules_per_1000: float | None = None  # units of throughput
    steps: int = 0
    skipped: int = 0
    note: str = ""


class Built:
    """A recipe's task on synthetic data, built once; every precision starts from a copy of its networks."""

    def __init__(self, recipe: str, device: str, changes: dict[str, Any]):
        self.recipe, self.device = recipe, torch.device(device)
        off = {"tensorboard": False, "progress": False, "accumulate": 1, "data_dir": None}
        self.changes = changes | off | {"device": device, "data": "synthetic"}
        config = self.config("fp32")
        self.batch_size = config.batch_size
        torch.manual_seed(config.seed)
        self.task = tasks.build(config.task.name, DataSpec("synthetic", None, config.seed), **config.task.options)
        data = self.task.train_set
        first = data.epoch(min(self.batch_size, len(data)), None)[0]
        self.samples = len(first)
        self.first = data.__getitems__(BatchKey(first, (0, 0, 0), first=True, train=True))

    def config(self, precision: str, **more: Any) -> Config:
        """As composed; of the changes, the keys may have dots."""
        values = compose.baseline(self.recipe, precision)
        for key, value in (self.changes | more).items():
            *path, last = key.split(".")
            at = values
            for part in path:
                at = at[part]
            at[last] = value
        return check(values)

    def fresh(self) -> Any:
        """The task with networks of its own; on a GPU they become so when they are brought there."""
        kept: dict[int, Any] = {id(data): data for data in (self.task.train_set, self.task.test_set)}
        if self.device.type != "cpu":
            for model in self.task.models.values():
                kept |= {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
                kept |= {id(buffer): buffer for buffer in model.buffers()}
        return copy.deepcopy(self.task, kept)

    def batch(self, size: int) -> Batch:
        """The first batch, with its samples repeated or fewer of them."""
        return hollow.batch(self.first, None, self.samples, size)


class Steps:
    """Training steps of a run, all on one batch that lies on its device."""

    def __init__(self, built: Built, precision: str, size: int, folder: str):
        config = built.config(precision, batch_size=size, out=folder)
        self.run = Run(config, Record(Path(folder)), task=built.fresh())
        self.window = [built.batch(size)]
        moved = self.run.to_device(self.window[0])
        self.run.to_device = lambda batch: moved  # the task still asks the one on the CPU for its size
        self.wait = measure.waiter(self.run.device)

    def __call__(self, count: int) -> float:
        """Seconds that so many steps took."""
        self.wait()
        start = time.perf_counter()
        for _ in range(count):
            self.run.step(self.window)
            self.run.recent.clear()
        self.wait()
        return time.perf_counter() - start

    @property
    def skipped(self) -> int:
        return sum(self.run.skipped.values())


@contextmanager
def training(built: Built, precision: str, size: int) -> Iterator[Steps]:
    """Steps under the switches of a precision; afterwards nothing of the run is left on the device."""
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(built, precision, size, folder)
        numbers = steps.run.precision
        native_tf32 = numbers.compute == "tf32" and numbers.backend(built.device.type) == "native"
        try:
            with hardware.tf32(native_tf32):
                yield steps
        finally:
            steps.run.__dict__.clear()  # whoever holds `steps` holds no tensor any more
            if built.device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()


@dataclass
class Bench:
    """What all rows share: the seconds that each is measured for, the peaks, the meter, and how much time is left."""

    seconds: float
    peaks: dict[str, float]
    energy: Energy
    left: Callable[[], float]

    def fill(self, row: Speed, steps: Steps, products: dict[str, float]) -> None:
        """Measures into a row; `products` are the FLOP of those of one step, by format."""
        if steps(1) < 1.0:
            steps(1)
        once = steps(1)
        skipped = steps.skipped
        count = max(1, min(500, math.ceil(min(self.seconds, self.left()) / once)))
        with self.energy.drawn() as drawn:
            took = steps(count)
        run = steps.run
        units = run.units * count
        row.backend, row.unit = run.precision.backend(run.device.type), f"{run.task.unit}/s"
        row.steps, row.step_ms, row.throughput = count, took / count * 1e3, units / took
        row.skipped = steps.skipped - skipped
        if run.device.type == "cuda":
            row.peak_gib = torch.cuda.max_memory_allocated(run.device) / GIB
        row.tflops = sum(products.values()) * count / took / 1e12 or None
        if row.tflops and self.peaks.keys() >= products.keys():
            row.of_peak = sum(flop / self.peaks[name] for name, flop in products.items()) * count / took
        if drawn.joules:
            row.watts, row.joules_per_1000 = drawn.joules / took, drawn.joules / units * 1e3

    def rows(self, built: Built, precisions: list[str], largest: bool) -> Iterator[Speed]:
        """Every precision at the recipe's batch, halved until FP32 fits; then each at the largest that fits it."""
        size, flop, fixed = built.batch_size, 0.0, {}
        products: dict[str, float]
        for precision in precisions:
            row = Speed(built.recipe, precision, "equal", size)
            while self._tried(row):
                try:
                    with training(built, precision, row.batch or 1) as steps:
                        compute = steps.run.precision.compute
                        if compute == "float8":  # the only one whose products are of several formats
                            products = _by_format(steps)
                        else:
                            flop = flop or sum(_by_format(steps).values()) / (row.batch or 1)
                            products = {compute: flop * (row.batch or 1)}
                        self.fill(row, steps, products)
                        fixed[precision] = (_allocated(built.device), row, products)
                    break
                except Exception as error:  # a line of the table, not its end
                    if not _no_room(error):
                        row.note = _said(error, built.device)
                        break
                    if precision != precisions[0] or size == 1:
                        row.note = "does not fit"
                        break
                    row.batch = size = size // 2
            if size < built.batch_size and not row.note:
                row.note = f"batch {built.batch_size} does not fit in {precisions[0]}"
            yield row
        for precision, (held, row, products) in fixed.items() if largest and built.device.type == "cuda" else ():
            yield self.largest(built, precision, held, row, products)

    def largest(self, built: Built, precision: str, held: int, equal: Speed, products: dict[str, float]) -> Speed:
        """By a guess from the equal batch: `held` bytes stay between steps, the rest of the peak grows with the batch.

        Each batch that does not fit is followed by one a seventh smaller, three times.
        """
        assert equal.batch and equal.peak_gib and equal.step_ms
        room = torch.cuda.get_device_properties(built.device).total_memory * ROOM - held
        size = int(equal.batch * room / max(equal.peak_gib * GIB - held, 1))
        row = Speed(built.recipe, precision, "largest")
        if size * equal.step_ms > equal.batch * LONGEST_STEP * 1e3:
            size = int(equal.batch * LONGEST_STEP * 1e3 / equal.step_ms)
            row.note = f"limited by a step of {LONGEST_STEP:g} s, not by memory"
        row.batch = max(equal.batch, size // 8 * 8)
        for _ in range(4):
            if not self._tried(row):
                return row
            try:
                with training(built, precision, row.batch) as steps:
                    self.fill(row, steps, {name: f / equal.batch * row.batch for name, f in products.items()})
                return row
            except Exception as error:
                if not _no_room(error):
                    row.note = _said(error, built.device)
                    return row
                row.batch = max(equal.batch, row.batch * 6 // 7 // 8 * 8)
        row.batch, row.note = None, "none of four batches fits"
        return row

    def _tried(self, row: Speed) -> bool:
        if self.left() <= 0:
            row.note = "no time left"
        return self.left() > 0


def _by_format(steps: Steps) -> dict[str, float]:
    """FLOP of the products of one step, which is taken for this, by the format of their operands."""
    found: dict[str, float] = {}
    for name, flop, _ in counted(lambda: steps(1)).operations:
        if flop:
            found[name] = found.get(name, 0.0) + flop
    return found


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _no_room(error: Exception) -> bool:
    """Libraries have errors of their own for memory that cannot be had."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in str(error) for words in ("out of memory", "ALLOC_FAILED", "unable to find an engine")
    )


def _said(error: Exception, device: torch.device) -> str:
    """A line for the table; raises DeviceLost if the device answers no more, as after an illegal memory access."""
    said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}"
    try:
        measure.waiter(device)()
    except RuntimeError as lost:
        raise DeviceLost(said) from lost
    return said
