"""How much watching costs: whole steps of a recipe, unwatched, watched every N steps, and with the usual hooks.

    python scripts/benchmark_watch.py [--recipes resnet,language] [--precisions fp32,fp16] [--every 10] [--blocks 5]

One network is trained; blocks of N steps of each way alternate in one process, with TensorBoard's files written.
Printed are the medians over blocks of the ratios within a round, in processor and in wall seconds. The usual hooks are
what people write first: least, largest and mean value of every output, gradient of an output and weight gradient of
every module that owns parameters, each fetched by `.item()`; they count and bin nothing. Then more and more layers are
watched: what one collection adds to a step. A collection is a fiftieth of a block, less than blocks differ by on a busy
machine; single steps, many of them, tell more of it.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
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

    def watched(self, steps: int) -> None:
        """The last step is looked at, whatever number it has."""
        for _ in range(steps - 1):
            self.step()
        self.look(len(self.watch.names))
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

    def hooked(self, steps: int, looks: int) -> None:
        """With the usual hooks in so many of the steps."""
        handles = list(usual_hooks(self.run.models, self.seen))
        for number in range(steps):
            if number == looks:
                remove(handles)
            self.step()
        remove(handles)
        self.seen.clear()
        self.run.recent.clear()


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
    ways: dict[str, Callable[[int], None]] = {
        "unwatched": subject.plain,
        f"watched every {every}": subject.watched,
        f"usual hooks every {every}": lambda steps: subject.hooked(steps, 1),
        "usual hooks every step": lambda steps: subject.hooked(steps, steps),
    }
    walls: dict[str, list[float]] = defaultdict(list)

    def on_the_wall(name: str) -> Callable[[int], None]:
        def run(steps: int) -> None:
            start = time.perf_counter()
            ways[name](steps)
            walls[name].append(time.perf_counter() - start)

        return run

    loops = {name: benchmarking.timed(on_the_wall(name)) for name in ways}
    times = benchmarking.alternate(loops, every, blocks)
    plain = times["unwatched"]
    subject.milliseconds = Spread.of(plain).median * 1e3
    for name in list(ways)[1:]:
        processor = benchmarking.ratio(times[name], plain).cells()
        wall = benchmarking.ratio(walls[name][1:], walls["unwatched"][1:]).cells()
        yield [f"{Spread.of(plain).median * 1e3:.1f} ms", name, *processor, *wall]


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
        f"Ratios to an unwatched block of {options.every} steps in the same round; medians of {options.blocks} rounds, "
        "with quartiles. Ends and norms are of every element, counts of about 8,192 of a larger tensor "
        "(`watch.sample`; null: of all). The usual hooks fetch three numbers of each tensor."
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
