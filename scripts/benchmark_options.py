"""What channels_last=true and compile=true do to a training step on this CPU, beside the step without them.

    python scripts/benchmark_options.py [--steps 2] [--blocks 7] [--variants NAME ...] [--recipes NAME ...]

Blocks of steps of all variants alternate in one process with one thread; printed are medians of the ratio to the plain
step of the same block, with quartiles. Time is that of the process alone, so that a shared machine disturbs less; the
first step of a compiled run, which compiles, is told apart and not in the ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from mptrain import compose, roofline
from mptrain.config import check
from mptrain.errors import UserError
from mptrain.results.record import Record
from mptrain.train import Run

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "channels_last": {"channels_last": True},
    "compile": {"compile": True},
    "both": {"channels_last": True, "compile": True},
}
RECIPES = ("resnet", "googlenet", "language")


def stepper(recipe: str, precision: str, changes: dict[str, Any]) -> Callable[[int], None]:
    values = compose.baseline(recipe, precision) | {"device": "cpu", "tensorboard": False} | changes
    run = Run(check(values), Record("."))
    windows = run.loader.windows()

    def steps(count: int) -> None:
        for _ in range(count):
            run.step(next(windows))
        run.recent.clear()

    return steps


def measure(recipe: str, names: list[str], precision: str, steps: int, blocks: int, peaks: Any) -> None:
    variants, first, times = {}, {}, {}
    for name in ["plain", *names]:
        try:
            variants[name] = stepper(recipe, precision, VARIANTS[name])
        except UserError as error:
            print(f"| `{recipe}` | {precision} | {name} | refused: {error} | | |")
            continue
        begin = time.perf_counter()
        variants[name](1)
        first[name] = time.perf_counter() - begin
        variants[name](2)
        times[name] = []
    for _ in range(blocks):
        for name, run in variants.items():
            begin = time.process_time()
            run(steps)
            times[name].append((time.process_time() - begin) / steps)
    for name, found in times.items():
        low, middle, high = statistics.quantiles([a / b for a, b in zip(found, times["plain"], strict=True)], n=4)
        ratio = "1" if name == "plain" else f"{middle:.2f} [{low:.2f}, {high:.2f}]"
        took = f"{first[name]:.0f} s" if "compile" in VARIANTS[name] else ""
        milliseconds = statistics.median(found) * 1e3
        print(f"| `{recipe}` | {precision} | {name} | {milliseconds:.0f} | {ratio} | {took} |", flush=True)
    work = roofline.counted(lambda: variants["plain"](1))
    print(f"\n{recipe} {precision}: {roofline.line(work, peaks, statistics.median(times['plain']))}\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--steps", type=int, default=2, help="steps in a block")
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS)[1:], default=list(VARIANTS)[1:])
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    peaks = roofline.this_cpu(clock=time.process_time)
    for recipe in options.recipes:
        print("| recipe | precision | variant | ms a step | ratio to plain [quartiles] | first step, wall |")
        print("|---|---|---|---:|---:|---:|")
        measure(recipe, options.variants, options.precision, options.steps, options.blocks, peaks)


if __name__ == "__main__":
    main()
