"""How much watching costs: whole steps of a recipe, unwatched, watched every N steps, and with the usual hooks.

    python scripts/benchmark_watch.py [--recipes resnet,language] [--precision fp32] [--every 10] [--blocks 7]

Blocks of N steps of the three alternate in one process; printed are medians over blocks and their ratios. The usual
hooks are what people write first: on every module that owns parameters, every step, norm and largest value of the
output and of each weight gradient, each fetched by `.item()`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mptrain import compose
from mptrain.config import check
from mptrain.results.record import Record
from mptrain.train import Run


def run_of(recipe: str, precision: str, folder: Path, watch: dict[str, Any]) -> Run:
    values = compose.baseline(recipe, precision)
    values |= {"tensorboard": False, "out": str(folder), "device": "cpu", "watch": watch}
    return Run(check(values), Record(folder))


def steps_of(run: Run) -> Callable[[int], None]:
    windows = run.loader.windows()

    def steps(count: int) -> None:
        for _ in range(count):
            run.step(next(windows))
            if run.observer is not None:
                run.observer.watch.step(next(iter(run.recent.values()))[-1])
        run.recent.clear()

    return steps


def hooked(run: Run) -> Callable[[int], None]:
    seen: list[float] = []
    for model in run.models.values():
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_hook(lambda _m, _i, output: seen.extend(_looked(output)))
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(lambda p: seen.extend(_looked(p.grad)))
    steps = steps_of(run)

    def emptied(count: int) -> None:
        steps(count)
        seen.clear()

    return emptied


def _looked(value: Any) -> list[float]:
    while isinstance(value, (tuple, list)):
        value = value[0]
    return [value.norm().item(), value.abs().max().item()] if isinstance(value, torch.Tensor) else []


def compare(recipe: str, precision: str, every: int, blocks: int, folder: Path) -> None:
    loops = {
        "unwatched": steps_of(run_of(recipe, precision, folder / "plain", {})),
        "watched": steps_of(run_of(recipe, precision, folder / "watched", {"enabled": True, "every": every})),
        "hooks": hooked(run_of(recipe, precision, folder / "hooks", {})),
    }
    times: dict[str, list[float]] = {name: [] for name in loops}
    for block in range(blocks + 1):
        order = list(loops)
        for name in order[:: 1 if block % 2 else -1]:
            start = time.perf_counter()
            loops[name](every)
            if block:  # the first warms up
                times[name].append((time.perf_counter() - start) / every * 1e3)
    plain = times["unwatched"]
    ratios = {n: statistics.median(a / b for a, b in zip(times[n], plain, strict=True)) for n in ("watched", "hooks")}
    print(
        f"{recipe:<12} {precision:<6} {statistics.median(plain):8.1f} ms  watched every {every}: "
        f"{ratios['watched']:6.3f}  usual hooks: {ratios['hooks']:6.3f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--recipes", default="resnet,language")
    parser.add_argument("--precision", default="fp32", help="one or several, with commas")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for recipe in options.recipes.split(","):
        for precision in options.precision.split(","):
            with tempfile.TemporaryDirectory() as folder:
                compare(recipe, precision, options.every, options.blocks, Path(folder))


if __name__ == "__main__":
    main()
