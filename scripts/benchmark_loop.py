"""The runner beside a loop written by hand, Lightning and Accelerate: same network, data, optimizer and precision.

    python scripts/benchmark_loop.py [--blocks 9] [--threads 1] [--growth]

Lightning and Accelerate are optional (`pip install lightning accelerate`); what is not installed has no column. Each
of the four is a process of its own, so that none runs with another's patches, caches or allocator. Blocks of steps
alternate between them, one runs at a time, and all draw batches in memory from a generator that holds them back
between two blocks. Progress bars, logs, checkpoints and TensorBoard are off for all; Lightning runs in its "barebones"
mode. The runner's loop is the whole one that `mptrain` runs. The loop by hand does what such loops do: zero_grad,
forward, backward, step; in FP16, which no CPU library has, with this project's arithmetic and scaler.

--growth measures instead how the runner's share grows with the width of a network and its batch.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from benchmarking import Loop, Spread, alternate, clock, flops, parser, peak, ratio, report, table
from torch import Tensor, nn

from mptrain import compose, tasks
from mptrain.config import Config, check
from mptrain.data.dataset import BatchKey, Dataset, DataSpec
from mptrain.precision import scaling
from mptrain.results.record import Record
from mptrain.tasks.task import Task
from mptrain.train import Run

FOREVER = 10**9
PEERS = ("lightning", "accelerate")


@dataclass(frozen=True)
class Case:
    """What is trained: the recipe resnet, or a perceptron of three layers with `wide` units and its batch."""

    precision: str
    wide: int = 0
    batch: int = 128

    @property
    def name(self) -> str:
        return f"perceptron {self.wide}, batch {self.batch}" if self.wide else "resnet, batch 128"


class Numbers(Dataset):
    name, kind = "numbers", "synthetic"

    def __init__(self, wide: int):
        self.x, self.y = torch.randn(4096, wide), torch.randint(10, (4096,))

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, key: BatchKey) -> tuple[Tensor, Tensor]:
        return self.x[key.indices], self.y[key.indices]


class Perceptron(Task):
    metric, higher_is_better, margin, unit = "top1", True, 0.01, "samples"

    def __init__(self, wide: int):
        layers = [nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, 10)]
        self.model = nn.Sequential(*layers)
        self.models = {"model": self.model}
        self.train_set = self.test_set = Numbers(wide)

    def losses(self, batch: tuple[Tensor, Tensor]) -> Iterator[tuple[str, Tensor]]:
        yield "model", F.cross_entropy(self.model(batch[0]).float(), batch[1])

    def size(self, batch: tuple[Tensor, Tensor]) -> int:
        return len(batch[1])


def configured(case: Case, folder: str) -> Config:
    """The resnet recipe without an end; its task is replaced where a perceptron is asked for."""
    values = compose.baseline("resnet", case.precision)
    off = {"tensorboard": False, "progress": False, "log_every": FOREVER, "checkpoint_every": FOREVER}
    values |= off | {"steps": FOREVER, "device": "cpu", "clip": None, "out": folder}
    values |= {"batch_size": case.batch} if case.wide else {}
    values["schedule"] = {"name": "constant", "warmup": 0}
    return check(values)


def built(case: Case, config: Config) -> Any:
    torch.manual_seed(config.seed)
    if case.wide:
        return Perceptron(case.wide)
    return tasks.build(config.task.name, DataSpec(config.data, None, config.seed), **config.task.options)


def batches(task: Any, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches in memory, each epoch in another order."""
    seed = 0
    while True:
        for start in torch.randperm(len(task.train_set)).split(size):
            seed += 1
            yield task.train_set.__getitems__(BatchKey(start.numpy(), (seed,), False, train=True))


# The contenders. Each trains until `pace` raises Done.


class Done(Exception):
    """No further block is asked for."""


Pace = Callable[[Iterator[Any]], Iterator[Any]]


def runner(case: Case, folder: str, pace: Pace) -> None:
    config = configured(case, folder)
    build = tasks.build
    if case.wide:
        tasks.build = lambda *args, **kwargs: Perceptron(case.wide)  # type: ignore[assignment]
    try:
        run = Run(config, Record(config.folder()))
    finally:
        tasks.build = build
    windows = run.loader.windows
    run.loader.windows = lambda: pace(windows())  # type: ignore[method-assign]
    run.to_the_end()


def by_hand(case: Case, folder: str, pace: Pace) -> None:
    config = configured(case, folder)
    task = built(case, config)
    model = task.models["model"]
    optimizer = torch.optim.SGD(model.parameters(), lr=config.optimizer.lr, **config.optimizer.options)
    stream = pace(batches(task, config.batch_size))
    if case.precision == "fp16":
        arithmetic, scaler = config.numbers.arithmetic("cpu"), scaling.loss_scaler(config.scale_name)
        for x, y in stream:
            optimizer.zero_grad()
            with arithmetic:
                loss = F.cross_entropy(model(x).float(), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    if case.precision == "bf16":
        for x, y in stream:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
            optimizer.step()
    for x, y in stream:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def lightning(case: Case, folder: str, pace: Pace) -> None:
    import lightning.pytorch as pl

    config = configured(case, folder)
    task = built(case, config)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.models["model"]

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return F.cross_entropy(self.model(batch[0]).float(), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=config.optimizer.lr, **config.optimizer.options)

    class Batches:
        def __iter__(self) -> Iterator[Any]:
            return pace(batches(task, config.batch_size))

        def __len__(self) -> int:  # known, so that no batch is fetched ahead
            return FOREVER

    precision = {"fp32": "32-true", "bf16": "bf16-mixed"}[case.precision]
    pl.Trainer(accelerator="cpu", devices=1, precision=precision, max_epochs=1, barebones=True).fit(Module(), Batches())


def accelerate(case: Case, folder: str, pace: Pace) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    config = configured(case, folder)
    task = built(case, config)
    model = task.models["model"]
    optimizer = torch.optim.SGD(model.parameters(), lr=config.optimizer.lr, **config.optimizer.options)
    AcceleratorState._reset_state(reset_partial_state=True)  # one precision a process, otherwise
    accelerator = Accelerator(mixed_precision={"fp32": "no", "bf16": "bf16"}[case.precision], cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    for x, y in pace(batches(task, config.batch_size)):
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()


CONTENDERS = {"runner": runner, "by hand": by_hand, "lightning": lightning, "accelerate": accelerate}


def child(name: str, threads: int, pipe: Any) -> None:
    """A contender's process: cases come in, then numbers of steps, for which seconds go out; 0 ends a case."""
    torch.set_num_threads(threads)
    now = clock()
    warnings.filterwarnings("ignore")  # advice of the libraries
    import logging

    logging.disable(logging.WARNING)

    def pace(stream: Iterator[Any]) -> Iterator[Any]:
        while count := pipe.recv():
            start = now()
            for _ in range(count):
                yield next(stream)
            pipe.send(now() - start)
        raise Done

    while (case := pipe.recv()) is not None:
        with tempfile.TemporaryDirectory() as folder, suppress(Done):
            CONTENDERS[name](case, folder, pace)
        pipe.send("ended")


class Contender:
    """A contender's process, as this one sees it."""

    def __init__(self, name: str, threads: int):
        here = multiprocessing.get_context("spawn")
        self.name = name
        self.pipe, theirs = here.Pipe()
        self.process = here.Process(target=child, args=(name, threads, theirs), daemon=True)
        self.process.start()
        theirs.close()

    @contextmanager
    def training(self, case: Case) -> Iterator[Loop]:
        def steps(count: int) -> float:
            self.pipe.send(count)
            return self.pipe.recv()

        self.pipe.send(case)
        yield steps
        self.pipe.send(0)
        assert self.pipe.recv() == "ended"


def race(contenders: list[Contender], case: Case, seconds: float, blocks: int) -> dict[str, list[float]]:
    """Seconds per step of each, in blocks of about `seconds`."""
    if case.precision == "fp16":
        contenders = [c for c in contenders if c.name not in PEERS]
    loops, trainings = {}, [(c.name, c.training(case)) for c in contenders]
    for name, training in trainings:
        loops[name] = training.__enter__()
    for loop in loops.values():
        loop(2)  # in these the runner looks at memory and formats
    steps = max(2, round(2 * seconds / loops["by hand"](2)))
    found = alternate(loops, steps, blocks)
    for _, training in trainings:
        training.__exit__(None, None, None)
    return found


def work(case: Case) -> float:
    """FLOP of a training step's products."""
    with tempfile.TemporaryDirectory() as folder:
        config = configured(case, folder)
        task = built(case, config)
        x, y = next(batches(task, config.batch_size))
        return flops(lambda: F.cross_entropy(task.models["model"](x), y).backward())


def compared(contenders: list[Contender], cases: list[Case], seconds: float, blocks: int) -> list[str]:
    """The table of all contenders, with the distance to the peak."""
    others = [c.name for c in contenders if c.name != "by hand"]
    rows = []
    tops = {"fp32": peak(torch.float32), "bf16": peak(torch.bfloat16)}
    for case in cases:
        times = race(contenders, case, seconds, blocks)
        own = Spread.of(times["by hand"]).median
        done = work(case)
        share = done / own / tops.get(case.precision, tops["fp32"])
        row = [case.name, case.precision, f"{own * 1e3:.3f}", f"{done / 1e9:.3g}", f"{share:.0%}"]
        for name in others:
            row.append("{} ({})".format(*ratio(times[name], times["by hand"]).cells()) if name in times else "")
        rows.append(row)
        print("  ".join(row), file=sys.stderr, flush=True)
    header = ["network", "precision", "by hand, ms", "GFLOP", "of the peak"]
    peaks = f"Peak: a product of two 1024 x 1024 matrices in this run, FP32 {tops['fp32'] / 1e9:.0f} and BF16 "
    peaks += f"{tops['bf16'] / 1e9:.0f} GFLOP/s; emulated FP16 computes in FP32."
    return [table([*header, *(f"{name} / by hand (quartiles)" for name in others)], rows), peaks]


def growth(contenders: list[Contender], seconds: float, blocks: int) -> list[str]:
    """The runner beside the loop by hand over widths and batches."""
    rows = []
    for wide, batch in ((32, 32), (64, 64), (128, 128), (256, 128), (512, 128), (1024, 128), (512, 16), (512, 512)):
        row = [str(wide), str(batch)]
        for precision in ("fp32", "bf16", "fp16"):
            times = race(contenders, Case(precision, wide, batch), seconds, blocks)
            median, quartiles = ratio(times["runner"], times["by hand"]).cells()
            more = Spread.of([a - b for a, b in zip(times["runner"], times["by hand"], strict=True)]).median
            row += [f"{Spread.of(times['by hand']).median * 1e3:.2f}", f"{median} ({quartiles})", f"{more * 1e6:+.0f}"]
        rows.append(row)
        print("  ".join(row), file=sys.stderr, flush=True)
    columns = [
        f"{p}: {what}" for p in ("fp32", "bf16", "fp16") for what in ("by hand, ms", "ratio", "runner's more, us")
    ]
    return [table(["width", "batch", *columns], rows)]


def main() -> None:
    options = parser(__doc__, "loop")
    options.add_argument("--blocks", type=int, default=9, help="rounds of blocks (default: 9)")
    options.add_argument("--seconds", type=float, default=0.2, help="length of a block (default: 0.2)")
    options.add_argument("--growth", action="store_true", help="widths and batches instead")
    options.add_argument("--only", metavar="TEXT", default="", help="cases whose name holds this")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    peers = [] if given.growth else [name for name in PEERS if importlib.util.find_spec(name)]
    contenders = [Contender(name, given.threads) for name in ("runner", "by hand", *peers)]
    try:
        measured(contenders, peers, given)
    finally:
        for contender in contenders:
            contender.process.kill()  # Lightning answers no gentler signal


def measured(contenders: list[Contender], peers: list[str], given: argparse.Namespace) -> None:
    ratios = "Ratios are medians over rounds of the time per step over that of the loop by hand in the same round"
    if given.growth:
        out = given.out.with_stem(given.out.stem + "_growth")
        parts = growth(contenders, given.seconds, given.blocks)
        report(out, "What the runner adds, by width and batch", f"{ratios}, with quartiles.", parts)
        return
    sizes = [(64, 64), (128, 128), (0, 128)]
    cases = [Case(p, wide, batch) for wide, batch in sizes for p in ("fp32", "bf16", "fp16")]
    parts = compared(
        contenders, [c for c in cases if given.only in f"{c.name} {c.precision}"], given.seconds, given.blocks
    )
    about = f"Each contender is a process of its own; blocks alternate. {ratios}, with quartiles; below 1 is faster."
    report(given.out, "The runner beside a loop by hand, Lightning and Accelerate", about, parts, peers)


if __name__ == "__main__":
    main()
