"""Who runs in benchmark_loop.py: the runner, a loop by hand, Lightning, Accelerate; each in a process of its own."""

from __future__ import annotations

import logging
import multiprocessing
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from benchmarking import Loop, as_in_runs, clock
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
    as_in_runs(threads)
    now = clock()
    warnings.filterwarnings("ignore")  # advice of the libraries
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
