"""`mptrain estimate`: memory, operations and a lower bound on time of a training step, without a GPU and without data.

The real step runs (the task's losses, the precision's policy, backward, optimizer) on FakeTensors, which know shapes
and formats and hold no numbers: a network of two billion parameters costs seconds. torch's MemTracker counts their
bytes as it counts real ones, and every operation reports its floating point operations and the bytes it touches.

16-bit results are stored as a GPU stores them; the FP32 images of CPU emulation are left out. The time is a roofline:
each operation at the data sheet's peak or bandwidth, whichever takes longer, one after the other. No step is faster
unless a compiler fuses operations; real steps take longer.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from mptrain import compose, files, optim, tasks
from mptrain.config import Config
from mptrain.data.dataset import Batch, BatchKey, DataSpec
from mptrain.errors import UserError
from mptrain.gpus import GPU, GPUS
from mptrain.memory import StepMemory
from mptrain.precision.modes import Precision

ABOUT = "Memory, operations and a roofline time per training step of a recipe, without a GPU and without data."
LEFT_OUT = """left out: what the allocator keeps and fragments, the CUDA context and libraries (0.5 to 1 GiB),
workspaces inside kernels, the input pipeline, evaluation, launch overhead, communication.
Recurrent layers are torch's CPU layers, which keep other tensors than cuDNN's; where they are single kernels (FP32)
their operations are not counted. One batch of synthetic data: texts and recordings of other lengths cost otherwise.
"activations" includes temporaries and, at the peak, gradients that no parameter holds yet.
Checked on a CPU in FP32: resnet and gan within 2 % of a measured step; translate and language differ by more."""
KINDS = {
    "Parameter": "weights",
    "Gradient": "gradients",
    "Optstate": "optimizer",
    "Activation": "activations",
    "Temp": "activations",
    "Buffer": "buffers",
    "Other": "copies",
}
"""What MemTracker calls a kind of tensor -> what we call it; "copies" are master copies and averages."""


@dataclass
class Step:
    """One training step: bytes at the peak by kind, and every operation as (format, FLOP, bytes touched)."""

    batch_size: int
    memory: dict[str, int] = field(default_factory=dict)
    parameters: int = 0
    operations: list[tuple[str, float, float]] = field(default_factory=list)

    @property
    def peak(self) -> int:
        return sum(self.memory.values())

    @property
    def flops(self) -> float:
        return sum(flops for _, flops, _ in self.operations)

    @property
    def bytes(self) -> float:
        return sum(size for _, _, size in self.operations)

    def seconds(self, gpu: GPU, tf32: bool) -> float:
        """Each operation at the peak of its format or at full bandwidth, whichever takes longer, one after another."""
        total = 0.0
        names = {"float32": "tf32"} if tf32 else {}
        for dtype, flops, size in self.operations:
            peak = gpu.peaks[names.get(dtype, dtype)] if flops else 1.0
            total += max(flops / peak, size / gpu.bandwidth)
        return total

    def renamed(self, before: str, after: str) -> Step:
        """The same step in a format as wide: TF32 products are those of FP32 numbers."""
        names = {before: after} if before != "tf32" and after != "tf32" else {}
        operations = [(names.get(dtype, dtype), flops, size) for dtype, flops, size in self.operations]
        return replace(self, operations=operations)


class Operations(TorchDispatchMode):
    """Notes format, FLOP and bytes touched of every operation; a view touches nothing."""

    def __init__(self, found: list[tuple[str, float, float]]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func.is_view:
            read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            written = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
            size = sum(t.numel() * t.element_size() for t in (*read, *written))
            formula = flop_registry.get(func._overloadpacket)
            flops = float(formula(*args, **kwargs, out_val=result)) if formula else 0.0
            dtype = next((str(t.dtype).removeprefix("torch.") for t in read if t.is_floating_point()), "float32")
            self.found.append((dtype, flops, float(size)))
        return result


def step(config: Config, numbers: Precision) -> Step:
    """Runs one settled training step of a configuration on FakeTensors; raises UserError where values decide shapes."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with torch.random.fork_rng(devices=[]):
            return _step(config, numbers, fake)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UserError(
            f"recipe={config.recipe} cannot be estimated: in its step values decide shapes ({error.func}), and an "
            "estimate computes no values; train a few steps and read the memory in its summary: "
            f"mptrain +recipe={config.recipe} data=synthetic steps=3"
        ) from error


def _step(config: Config, numbers: Precision, fake: FakeTensorMode) -> Step:
    from mptrain.precision.arithmetic import Arithmetic
    from mptrain.precision.policy import FUNCTIONS

    task, batch = _built(config, fake)
    stored = Step(config.batch_size)
    stored.parameters = sum(p.numel() for model in task.models.values() for p in model.parameters())
    region: Any = nullcontext()
    if numbers.compute in ("float16", "bfloat16"):
        region = Arithmetic("cpu", numbers.compute, emulated=False, keep_fp32=frozenset(numbers.keep_fp32) & FUNCTIONS)
    options = config.optimizer
    with fake:
        weights = numbers.prepare(task.models)
        optimizers = {
            name: optim.optimizer(options.name, weights.of(name), options.lr, **options.options) for name in task.models
        }
        average = optim.Average({n: weights.of(n) for n in task.models}, config.ema) if config.ema else None

        def train() -> None:
            weights.zero_grad()
            for _ in range(config.accumulate):
                phases = task.losses(batch)
                while True:
                    with region:
                        phase = next(phases, None)
                    if phase is None:
                        break
                    name, loss = phase
                    (loss if config.scale_name == "none" else loss.float() * 2.0).backward()
                    weights.gather(name)
                    if config.clip is not None:
                        torch.nn.utils.clip_grad_norm_(weights.of(name), config.clip)
                    optimizers[name].step()
                    weights.publish(name)

        for name, optimizer in optimizers.items():  # creates their state
            for parameter in weights.of(name):
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            weights.zero_grad()
        tracker = StepMemory(_copies(task.models, weights, average))
        tracker.track_external(*task.models.values(), *optimizers.values())
        with tracker, Operations(stored.operations):
            train()
    for places in tracker.get_tracker_snapshot("peak").values():
        for kind, size in places.items():
            if (value := getattr(kind, "value", kind)) in KINDS:
                stored.memory[KINDS[value]] = stored.memory.get(KINDS[value], 0) + size
    return stored


def _built(config: Config, fake: FakeTensorMode) -> tuple[Any, Batch]:
    """The task with networks without numbers, and a batch of the same kind."""
    spec = DataSpec("synthetic", None, config.seed)
    try:
        with fake:
            task = tasks.build(config.task.name, spec, **config.task.options)
    except (DataDependentOutputException, DynamicOutputShapeException):  # its data set looks at values
        task = tasks.build(config.task.name, spec, **config.task.options)
        with FakeCopyMode(fake):
            task.models |= copy.deepcopy(task.models)
    batches = task.train_set.epoch(config.batch_size, None)
    if len(batches[0]) < config.batch_size:
        raise UserError(f"batch_size={config.batch_size}: synthetic data has {len(batches[0])} samples; give fewer")
    batch = task.train_set.__getitems__(BatchKey(batches[0], (0, 0, 0), first=True, train=True))
    return task, tree_map(lambda x: fake.from_tensor(x) if type(x) is Tensor else x, batch)


def _copies(models: Any, weights: Any, average: Any) -> Iterator[Tensor]:
    """Master copies and averaged weights."""
    own = {id(p) for model in models.values() for p in model.parameters()}
    for name in models:
        yield from (p for p in weights.of(name) if id(p) not in own)
        yield from average.shadow[name] if average is not None else ()


def estimate(argv: Sequence[str]) -> int:
    """Prints the tables; returns 0."""
    parser = argparse.ArgumentParser(
        prog="mptrain estimate",
        description=ABOUT,
        epilog=LEFT_OUT,
        usage="mptrain estimate +recipe=NAME [KEY=VALUE ...]",
    )
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="as for training; precision= for one alone")
    settings = parser.parse_args(argv).settings
    config = compose.config(settings)
    if config.numbers.accumulate == "float16":
        raise UserError(
            f"precision={config.numbers.name} sums in FP16, for which GPUs have no kernels of ours; "
            "precision=fp16 has the same memory"
        )
    if config.numbers.compute == "float8":
        raise UserError(
            f"precision={config.numbers.name} is not estimated: no roofline here knows which layers FP8 takes; "
            "precision=bf16 bounds it from above"
        )
    one = any(text.lstrip("+").startswith("precision=") for text in settings)
    traced: dict[Any, tuple[Precision, Step]] = {}
    steps = {}
    for numbers in _asked(config, one):
        of, found = traced.setdefault(_shape(numbers), (numbers, Step(0)))
        if of is numbers:
            found = step(config, numbers)
            traced[_shape(numbers)] = (numbers, found)
        steps[numbers.label] = (numbers, found.renamed(of.compute, numbers.compute))
    _show(config, steps)
    return 0


def _shape(numbers: Precision) -> tuple:
    """What decides the bytes of a step: FP16 and BF16, FP32 and TF32 cost the same."""
    bits = {"float16": 16, "bfloat16": 16}
    fields = (numbers.compute, numbers.storage)
    return *(bits.get(f, 32) for f in fields), numbers.master, numbers.update, numbers.keep_fp32


def _asked(config: Config, one: bool) -> list[Precision]:
    """The precision that was named, or every one that keeps FP32 parameters and that GPUs have kernels for."""
    if one:
        return [config.numbers]
    loaded = [Precision.load(name) for name in files.names("precision")]
    native = [p for p in loaded if p.storage == p.accumulate == "float32" and p.kernels == "auto"]
    native = [p for p in native if p.compute != "float8"]
    return sorted(native, key=lambda p: (p.name != "fp32", p.name))


def _show(config: Config, steps: dict[str, tuple[Precision, Step]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=170)
    first = next(iter(steps.values()))[1]
    title = f"{config.recipe}: {first.parameters / 1e6:,.1f} M parameters, batch {config.batch_size}, one step"
    table = Table(title=title)
    kinds = list(dict.fromkeys(KINDS.values()))
    for column in ("precision", "peak MiB", "ratio", *kinds, "GFLOP", "GB moved", *(f"{g.name} ms" for g in GPUS)):
        table.add_column(column, justify="left" if column == "precision" else "right")
    for label, (numbers, found) in steps.items():
        tf32 = numbers.compute == "tf32"
        table.add_row(
            label,
            f"{found.peak / 2**20:,.0f}",
            f"{found.peak / first.peak:.2f}x",
            *(f"{found.memory.get(kind, 0) / 2**20:,.0f}" for kind in kinds),
            f"{found.flops / 1e9:,.0f}",
            f"{found.bytes / 1e9:,.1f}",
            *(f"{found.seconds(g, tf32) * 1e3:.1f}" if g.runs(numbers.compute) else "-" for g in GPUS),
        )
    console.print(table)
    console.print(
        f"ms: roofline, a lower bound without fusion; -: no units for this format\n{LEFT_OUT}", highlight=False
    )
