"""How much watching costs: whole steps of a recipe, unwatched, watched every N steps, and with the usual hooks.

    python scripts/benchmark_watch.py [--recipes resnet,language] [--precisions fp32,fp16] [--every 10] [--blocks 5]

One network is trained, each step of a block of N in every way, with TensorBoard's files written. Printed are the
medians over blocks of the ratios within a block, in processor and in wall seconds. The usual hooks are
what people write first: least, largest and mean value of every output, gradient of an output and weight gradient of
every module that owns parameters, each fetched by `.item()`; they count and bin nothing. Then more and more layers are
watched: what one collection adds to a step.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import benchmarking
import torch
from benchmarking import Spread
from torch import Tensor, nn

from mptrain import compose, roofline
from mptrain.config import check
from mptrain.precision.modes import Precision
from mptrain.progress import Progress
from mptrain.results.record import Record
from mptrain.train import Run

LOOKS = 5
"""Single steps for each block of them."""


class Subject:
    """A run, of which steps are taken in several ways."""

    def __init__(self, recipe: str, precision: str, every: int, folder: Path):
        values = compose.baseline(recipe, precision)
        values |= {"out": str(folder), "device": "cpu", "progress": False, "threads": torch.get_num_threads()}
        config = check(values | {"watch": {"enabled": True, "every": every}})
        folder.mkdir(parents=True)
        self.run = Run(config, Record(folder))
        assert self.run.observer is not None
        self.observer = self.run.observer
        self.watch = self.observer.watch
        self.watch.on_alarm = lambda alarm: None
        self.watch.skip()
        self.progress = Progress(config, self.run.record, 0)
        self.windows = self.run.loader.windows()
        self.seen: list[float] = []
        self.milliseconds = 0.0
        """of an unwatched step, once that was measured"""

    def step(self) -> None:
        self.run.step(next(self.windows))

    def loss(self) -> Tensor:
        return next(iter(self.run.recent.values()))[-1]

    def plain(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.run.recent.clear()

    def look(self, layers: int) -> None:
        """One step in which so many layers are looked at."""
        names = self.watch.names
        self.watch.names = dict(list(names.items())[:layers])
        self.watch.done, self.watch.dense_until = self.watch.every - 1, 0
        self.watch._begin()
        self.step()
        self.observer.step(self.loss(), self.progress)
        self.watch.skip()
        self.watch.names = names
        if self.watch.store is not None:
            self.watch.store.waiting.clear()

    def hooked(self) -> None:
        """One step with the usual hooks."""
        handles = list(usual_hooks(self.run.models, self.seen))
        self.step()
        remove(handles)
        self.seen.clear()


def remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


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


def ratios(subject: Subject, every: int, blocks: int) -> Iterator[list[str]]:
    """All ways side by side, step by step: what else the machine does meets all of them alike."""
    last, whole = every - 1, len(subject.watch.names)
    ways: dict[str, Callable[[int], None]] = {
        "unwatched": lambda at: subject.step(),
        f"watched every {every}": lambda at: subject.look(whole) if at == last else subject.step(),
        f"usual hooks every {every}": lambda at: subject.hooked() if at == last else subject.step(),
        "usual hooks every step": lambda at: subject.hooked(),
    }
    clocks = benchmarking.clock(), time.perf_counter
    blocks_of: dict[str, list[list[float]]] = {name: [] for name in ways}
    for block in range(blocks + 1):
        spent = {name: [0.0 for _ in clocks] for name in ways}
        for at in range(every):
            for name in list(ways)[:: 1 if at % 2 else -1]:
                begun = [now() for now in clocks]
                ways[name](at)
                spent[name] = [s + now() - b for s, now, b in zip(spent[name], clocks, begun, strict=True)]
        subject.run.recent.clear()
        if block:  # the first warms up
            for name, seconds in spent.items():
                blocks_of[name].append(seconds)
    times = {name: list(zip(*found, strict=True)) for name, found in blocks_of.items()}
    plain = times.pop("unwatched")
    subject.milliseconds = Spread.of(plain[0]).median / every * 1e3
    for name, found in times.items():
        cells = (benchmarking.ratio(mine, base).cells() for mine, base in zip(found, plain, strict=True))
        yield [f"{subject.milliseconds:.1f} ms", name, *next(cells), *next(cells)]


def growth(subject: Subject, every: int, rounds: int) -> Iterator[list[str]]:
    whole = len(subject.watch.names)
    counts = sorted({1, max(1, whole // 4), max(1, whole // 2), whole})
    rows: dict[int, int] = {}

    def looking(layers: int) -> Callable[[int], None]:
        def run(_steps: int) -> None:
            subject.look(layers)
            rows[layers] = len(subject.watch.rows)

        return run

    loops = {"0": benchmarking.timed(subject.plain)}
    loops |= {str(n): benchmarking.timed(looking(n)) for n in counts}
    times = benchmarking.alternate(loops, 1, rounds)
    plain = Spread.of(times["0"]).median
    for n in counts:
        more = Spread.of([(a - b) * 1e3 for a, b in zip(times[str(n)], times["0"], strict=True)])
        yield [f"{n} of {whole}", str(rows[n]), *more.cells(1), f"{more.median / (every * plain * 1e3):.1%}"]


def main() -> None:
    parser = benchmarking.parser(__doc__, "watch")
    parser.add_argument("--recipes", default="resnet,language")
    parser.add_argument("--precisions", default="fp32,fp16")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--blocks", type=int, default=5)
    options = parser.parse_args()
    benchmarking.as_in_runs(options.threads)
    first, second, third = [], [], []
    computed = [Precision.load(name) for name in options.precisions.split(",")]
    machine = roofline.this_cpu(computed, benchmarking.clock())
    for recipe in options.recipes.split(","):
        for precision in options.precisions.split(","):
            with tempfile.TemporaryDirectory() as folder:
                subject = Subject(recipe, precision, options.every, Path(folder) / "run")
                first += [[f"{recipe}, {precision}", *row] for row in ratios(subject, options.every, options.blocks)]
                second += [
                    [f"{recipe}, {precision}", *row] for row in growth(subject, options.every, LOOKS * options.blocks)
                ]
                work = roofline.counted(lambda subject=subject: subject.plain(1))
                limit = roofline.line(work, machine, subject.milliseconds / 1e3)
                third.append(f"{recipe}, {precision}, unwatched: {limit}.")
                subject.progress.__exit__(None)
    about = (
        f"Ratios to an unwatched block of {options.every} steps, each of which was taken in every way in turn; medians "
        f"of {options.blocks} blocks, with quartiles. Ends and norms are of every element, counts of about 8,192 of a "
        "larger tensor (`watch.sample`; null: of all). The usual hooks fetch three numbers of each tensor."
    )
    header = ["run", "unwatched step", "", "ratio", "quartiles", "ratio (wall)", "quartiles"]
    parts = [
        benchmarking.table(header, first),
        "\n".join(f"- {line}" for line in third),
        "What one collection adds to a step, by the number of layers that are watched; medians of "
        f"{LOOKS * options.blocks} single steps of each kind, and what that makes of {options.every} unwatched ones:",
        benchmarking.table(["run", "layers", "rows", "added, ms", "quartiles", f"of {options.every} steps"], second),
    ]
    benchmarking.report(options.out, "What watching costs", about, parts)


if __name__ == "__main__":
    main()
