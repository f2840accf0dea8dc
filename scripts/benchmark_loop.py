"""How much the runner costs beside a loop written by hand for the same model, precision and data.

    python scripts/benchmark_loop.py [--steps 50] [--blocks 15] [--threads 1]

Blocks of steps of the two alternate in one process; printed are medians over blocks, their spread and their ratio.
The loop written by hand does what such loops do: zero_grad, forward, scaled backward, step, on batches in memory; in
FP16 it uses this project's own arithmetic and scaler, since the question is what the runner adds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mptrain import compose, files, tasks
from mptrain.config import check
from mptrain.data.dataset import BatchKey, Dataset
from mptrain.precision import scaling
from mptrain.results.record import Record
from mptrain.tasks.task import Task
from mptrain.train import Run


class Numbers(Dataset):
    name, kind = "numbers", "synthetic"

    def __init__(self, wide: int):
        self.x, self.y = torch.randn(2048, wide), torch.randint(10, (2048,))

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


def steps_of_runner(recipe: str, precision: str, folder: Path, threads: int) -> Callable[[int], None]:
    values = compose.baseline(recipe, precision)
    values |= {"tensorboard": False, "threads": threads, "out": str(folder), "clip": None}
    config = check(values)
    run = Run(config, Record(folder))
    windows = run.loader.windows()

    def steps(count: int) -> None:
        for _ in range(count):
            run.step(next(windows))
        run.recent.clear()

    return steps


def steps_by_hand(recipe: str, precision: str) -> Callable[[int], None]:
    config = check(compose.baseline(recipe, precision))
    torch.manual_seed(config.seed)
    task: Any = tasks.build(config.task.name, tasks.DataSpec(config.data, None, config.seed), **config.task.options)
    (model,) = task.models.values()
    optimizer = torch.optim.SGD(model.parameters(), lr=config.optimizer.lr, **config.optimizer.options)
    arithmetic = config.numbers.arithmetic("cpu")
    scaler = scaling.loss_scaler(config.scale_name) if precision != "fp32" else None

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        dataset, seed = task.train_set, 0
        while True:
            for start in torch.randperm(len(dataset)).split(config.batch_size):
                seed += 1
                yield dataset.__getitems__(BatchKey(start.numpy(), (seed,), False, train=True))

    stream = batches()

    def steps(count: int) -> None:
        for _ in range(count):
            x, y = next(stream)
            optimizer.zero_grad()
            if scaler is None:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            else:
                with arithmetic:
                    loss = F.cross_entropy(model(x).float(), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()

    return steps


def compare(name: str, ours: Callable[[int], None], theirs: Callable[[int], None], steps: int, blocks: int) -> float:
    times: dict[str, list[float]] = {"runner": [], "by hand": []}
    for block in range(blocks + 1):
        for which, run in (("runner", ours), ("by hand", theirs))[:: 1 if block % 2 else -1]:
            start = time.perf_counter()
            run(steps)
            if block:  # the first warms up
                times[which].append((time.perf_counter() - start) / steps * 1e3)
    runner, by_hand = (statistics.median(values) for values in times.values())
    pairs = [a / b for a, b in zip(*times.values(), strict=True)]
    low, _, high = statistics.quantiles(pairs, n=4)
    print(
        f"{name:<18} {runner:9.3f} ms {by_hand:9.3f} ms   {statistics.median(pairs):6.3f}   [{low:.3f}, {high:.3f}]",
        flush=True,
    )
    return statistics.median(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--steps", type=int, default=50, help="steps of the perceptron in a block")
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--wide", type=int, default=128, help="units of the perceptron")
    parser.add_argument("--batch", type=int, default=128, help="samples in a batch of the perceptron")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{'':<18} {'runner':>12} {'by hand':>12}    ratio   quartiles over {options.blocks} pairs of blocks")
    with tempfile.TemporaryDirectory() as folder:
        for precision in ("fp32", "fp16"):
            with perceptron(options.wide, options.batch):
                pair = (
                    steps_of_runner("resnet", precision, Path(folder) / f"perceptron-{precision}", options.threads),
                    steps_by_hand("resnet", precision),
                )
            compare(f"perceptron {precision}", *pair, options.steps, options.blocks)
        if "resnet" in files.names("recipe"):
            for precision in ("fp32", "fp16"):
                pair = (
                    steps_of_runner("resnet", precision, Path(folder) / precision, options.threads),
                    steps_by_hand("resnet", precision),
                )
                compare(f"resnet {precision}", *pair, 3, max(3, options.blocks // 3))


class perceptron:  # noqa: N801
    """Inside, every recipe trains a perceptron."""

    def __init__(self, wide: int, batch: int):
        self.wide, self.batch = wide, batch

    def __enter__(self) -> None:
        self.build, self.compose = tasks.build, compose.baseline
        tasks.build = lambda *args, **kwargs: Perceptron(self.wide)  # type: ignore[assignment]
        compose.baseline = lambda *args: self.compose(*args) | {"batch_size": self.batch, "accumulate": 1}

    def __exit__(self, *exception: object) -> None:
        tasks.build, compose.baseline = self.build, self.compose


if __name__ == "__main__":
    main()
