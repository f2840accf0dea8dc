"""What the benchmarks share: alternating blocks, ratios with their spread, the distance to the peak, and the report."""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch

from mptrain import measure, process

Loop = Callable[[int], float]
"""Runs so many steps; returns the seconds they took."""


def as_in_runs(threads: int) -> None:
    """So many threads, and freed memory kept: else it is luck who pays for pages that go back in every step."""
    torch.set_num_threads(threads)
    process.keep_freed_memory()


def clock(device: str = "cpu") -> Callable[[], float]:
    """Seconds of this process's processor where one thread does all the work, else of the wall.

    What else runs on a shared machine then counts less.
    """
    return time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


class Spread(NamedTuple):
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def cells(self, digits: int = 3) -> tuple[str, str]:
        """The median, and "low to high"."""
        return f"{self.median:.{digits}f}", f"{self.low:.{digits}f} to {self.high:.{digits}f}"


def timed(steps: Callable[[int], object]) -> Loop:
    """A loop of this process, timed from outside."""

    now = clock()

    def run(count: int) -> float:
        start = now()
        steps(count)
        return now() - start

    return run


def alternate(loops: dict[str, Loop], steps: int, blocks: int) -> dict[str, list[float]]:
    """Seconds per step of each loop, block by block; every round runs all of them, each round in another order.

    One round more than `blocks` is made; the first warms up.
    """
    found: dict[str, list[float]] = {name: [] for name in loops}
    names = list(loops)
    for block in range(blocks + 1):
        turned = names[block % len(names) :] + names[: block % len(names)]
        for name in turned[:: 1 if block % 2 else -1]:
            seconds = loops[name](steps) / steps
            if block:
                found[name].append(seconds)
    return found


def ratio(times: Sequence[float], base: Sequence[float]) -> Spread:
    """Of two loops that alternated: the spread of the ratio within each round."""
    return Spread.of([a / b for a, b in zip(times, base, strict=True)])


def peak(dtype: torch.dtype, size: int = 1024, tries: int = 12) -> float:
    """FLOP/s of a product of two square matrices: the best of some tries, as this process's threads reach it now."""
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    return 2 * size**3 / min(timed(lambda _: a @ b)(1) for _ in range(tries))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column to the left, the others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def parser(about: str | None, name: str) -> argparse.ArgumentParser:
    """Options that every benchmark takes."""
    result = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    result.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    result.add_argument(
        "--out", type=Path, default=Path(f"results/benchmarks/{name}.md"), help="Markdown file (default: %(default)s)"
    )
    return result


def report(out: Path, title: str, about: str, parts: Sequence[str], packages: Sequence[str] = ()) -> None:
    """Prints the parts under what has to be known to read them, and writes them to a file."""
    from importlib.metadata import version

    versions = ", ".join([f"torch {torch.__version__}", *(f"{name} {version(name)}" for name in packages)])
    device = measure.device_name(torch.device("cpu"))
    seconds = "processor" if clock() is time.process_time else "wall"
    command = shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])
    said = (
        f"`{command}` on {datetime.now(UTC):%Y-%m-%d}, CPU: {device}, {os.cpu_count()} processors, "
        f"{torch.get_num_threads()} thread(s) used ({seconds} seconds), "
        f"{versions}, commit {measure.commit() or 'unknown'}, seed 0."
    )
    text = "\n\n".join([f"# {title}", said, about, *parts]) + "\n"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    print(text, end="", flush=True)
