"""How much watching costs: whole steps of a recipe, unwatched, watched every N steps, and with the usual hooks.

    python scripts/benchmark_watch.py [--recipes resnet,language] [--precisions fp32,fp16] [--out FILE.md]

One network is trained; blocks of N steps of the three alternate in one process, with TensorBoard files and tables
written. Printed are medians over blocks of the paired ratios, in seconds of the process and of the clock, with
quartiles. The usual hooks are what people write first: least, largest and mean value of every output, gradient of an
output and weight gradient of every module that owns parameters, each fetched by `.item()`: every step, and only in
one step of N. Then the first layers alone are watched: the cost of one collection by the number of layers.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mptrain import compose
from mptrain.config import check
from mptrain.progress import Progress
from mptrain.results.record import Record
from mptrain.train import Run

Times = tuple[float, float]
"""Seconds of the process, of the clock."""


class Subject:
    """A run, of which steps are taken in several ways."""

    def __init__(self, recipe: str, precision: str, every: int, folder: Path):
        values = compose.baseline(recipe, precision)
        values |= {"out": str(folder), "device": "cpu", "progress": False, "threads": torch.get_num_threads()}
        config = check(values | {"watch": {"enabled": True, "every": every}})
        self.record = Record(folder)
        folder.mkdir(parents=True)
        self.run = Run(config, self.record)
        assert self.run.observer is not None
        self.watch = self.run.observer.watch
        self.watch.on_alarm = lambda alarm: None
        self.watch.skip()
        self.progress = Progress(config, self.record, 0)
        self.windows = self.run.loader.windows()
        self.every = every
        self.seen: list[float] = []

    def plain(self) -> None:
        for _ in range(self.every):
            self.run.step(next(self.windows))
        self.run.recent.clear()

    def watched(self) -> None:
        """One of the steps is looked at, whatever number it has."""
        for number in range(self.every):
            if number == self.every - 1:
                self.watch.done = self.every - 1
                self.watch.dense_until = 0
                self.watch._begin()
            self.run.step(next(self.windows))
        self.run.observer.step(next(iter(self.run.recent.values()))[-1], self.progress)  # type: ignore[union-attr]
        self.watch.skip()
        self.watch.flush()
        self.run.recent.clear()

    def hooked(self, steps: int) -> None:
        handles = list(usual_hooks(self.run.models, self.seen))
        for number in range(self.every):
            if number == steps:
                while handles:
                    handles.pop().remove()
            self.run.step(next(self.windows))
        for handle in handles:
            handle.remove()
        self.seen.clear()
        self.run.recent.clear()

    def collection(self, layers: int) -> None:
        """One step in which so many layers are looked at; 0: none."""
        if layers:
            names = self.watch.names
            self.watch.names = dict(list(names.items())[:layers])
            self.watch._begin()
        self.run.step(next(self.windows))
        if layers:
            self.watch.step(next(iter(self.run.recent.values()))[-1])
            self.watch.skip()
            self.watch.names = names
        self.run.recent.clear()


def usual_hooks(models: dict[str, nn.Module], seen: list[float]) -> Iterator[Any]:
    def look(value: Any) -> None:
        while isinstance(value, (tuple, list)):
            value = value[0]
        if isinstance(value, Tensor):
            seen.extend((value.min().item(), value.max().item(), value.float().mean().item()))

    def output(_module: nn.Module, _inputs: Any, output: Any) -> None:
        look(output)
        while isinstance(output, (tuple, list)):
            output = output[0]
        if output.requires_grad:
            output.register_hook(look)

    for model in models.values():
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                yield module.register_forward_hook(output)
        for p in model.parameters():
            if p.requires_grad:
                yield p.register_post_accumulate_grad_hook(lambda p: look(p.grad))


def timed(work: Callable[[], None]) -> Times:
    before = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - before[0], time.perf_counter() - before[1]


def paired(ways: dict[str, Callable[[], None]], blocks: int) -> dict[str, list[Times]]:
    """The times of each way, block by block, in alternating order; one more block warms up."""
    times: dict[str, list[Times]] = {name: [] for name in ways}
    for block in range(blocks + 1):
        for name in list(ways)[:: 1 if block % 2 else -1]:
            taken = timed(ways[name])
            if block:
                times[name].append(taken)
    return times


def ratio(times: list[Times], plain: list[Times], clock: int) -> str:
    ratios = [a[clock] / b[clock] for a, b in zip(times, plain, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def milliseconds(times: list[Times], per: int = 1) -> float:
    return statistics.median(process for process, _ in times) / per * 1e3


def ratios(subject: Subject, recipe: str, precision: str, blocks: int) -> list[str]:
    ways = {
        f"watched every {subject.every}": subject.watched,
        f"usual hooks, one step of {subject.every}": lambda: subject.hooked(1),
        "usual hooks, every step": lambda: subject.hooked(subject.every),
    }
    times = paired({"unwatched": subject.plain, **ways}, blocks)
    plain = times["unwatched"]
    step = milliseconds(plain, subject.every)
    return [
        f"| {recipe}, {precision} | {step:.1f} ms | {name} | {ratio(times[name], plain, 0)} | "
        f"{ratio(times[name], plain, 1)} |"
        for name in ways
    ]


def growth(subject: Subject, recipe: str, precision: str, blocks: int) -> list[str]:
    whole = len(subject.watch.names)
    counts = sorted({1, max(1, whole // 4), max(1, whole // 2), whole})
    subject.watch.every = 1
    times = paired({str(n): (lambda n=n: subject.collection(n)) for n in (0, *counts)}, blocks)
    lines = []
    for n in counts:
        more = [a[0] - b[0] for a, b in zip(times[str(n)], times["0"], strict=True)]
        low, middle, high = (v * 1e3 for v in statistics.quantiles(more, n=4, method="inclusive"))
        lines.append(f"| {recipe}, {precision} | {n} | {middle:.1f} ms ({low:.1f} to {high:.1f}) |")
    return lines


def provenance(threads: int, blocks: int) -> str:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return (
        f"`python scripts/benchmark_watch.py {' '.join(sys.argv[1:])}`, {time.strftime('%Y-%m-%d')}, {threads} "
        f"thread(s) of {processor()}, torch {torch.__version__}, seed 0, commit {commit}, {blocks} blocks."
    )


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--recipes", default="resnet,language")
    parser.add_argument("--precisions", default="fp32,fp16")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a Markdown file to write")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    first, second = [], []
    for recipe in options.recipes.split(","):
        for precision in options.precisions.split(","):
            with tempfile.TemporaryDirectory() as folder:
                subject = Subject(recipe, precision, options.every, Path(folder) / "run")
                lines = ratios(subject, recipe, precision, options.blocks)
                print("\n".join(lines), flush=True)
                first += lines
                lines = growth(subject, recipe, precision, options.blocks)
                print("\n".join(lines), flush=True)
                second += lines
                subject.progress.__exit__(None)
    text = f"""# What watching costs

{provenance(options.threads, options.blocks)}
Blocks of {options.every} steps alternate in one process; ratios to the unwatched block beside, medians with quartiles.

| run | unwatched step | | process time | clock |
|---|---:|---|---|---|
{chr(10).join(first)}

What one collection adds to a step (process time), by the number of layers that are watched:

| run | layers | added |
|---|---:|---|
{chr(10).join(second)}
"""
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
