"""`mptrain estimate` in words: its two tables, and what they leave out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mptrain.about import LEFT_OUT
from mptrain.config import Config
from mptrain.gpus import GPUS, Machine
from mptrain.growth import Growth
from mptrain.memory import KINDS
from mptrain.precision.modes import Precision
from mptrain.roofline import this_cpu

CONTEXT = 2**30
"""Bytes of a GPU that are not for tensors."""


def show(config: Config, growths: dict[Precision, Growth]) -> None:
    """Prints what a step takes, and the largest batch that each GPU has room for."""
    console = Console(width=190)
    first = {numbers: growth.first for numbers, growth in growths.items()}
    baseline = next(iter(first.values()))
    here = this_cpu(growths, seconds=0.1)
    about = f"{config.recipe}: {baseline.parameters / 1e6:,.1f} M parameters"
    table = Table(title=f"{about}, batch {config.batch_size}, one step")
    kinds = [*dict.fromkeys(KINDS.values()), "input"]
    machines = [*GPUS, here]
    for column in ("precision", "peak MiB", "ratio", *kinds, "GFLOP", "GB moved", *(f"{m.name} ms" for m in machines)):
        table.add_column(column, justify="left" if column == "precision" else "right")
    for numbers, found in first.items():
        table.add_row(
            escape(numbers.label),
            f"{found.peak / 2**20:,.0f}",
            f"{found.peak / baseline.peak:.2f}x",
            *(f"{found.memory.get(kind, 0) / 2**20:,.0f}" for kind in kinds),
            f"{found.flops / 1e9:,.0f}",
            f"{found.bytes / 1e9:,.1f}",
            *(_milliseconds(growths[numbers], config.batch_size, m, numbers) for m in machines),
        )
    console.print(table)
    table = Table(title=f"{about}: the largest batch that fits, ms a step")
    for column in ("precision", *(f"{gpu.name}, {gpu.memory / 1e9:.0f} GB" for gpu in GPUS)):  # type: ignore[operator]
        table.add_column(column, justify="left" if column == "precision" else "right")
    for numbers, growth in growths.items():
        cells = []
        for gpu in sorted(GPUS, key=lambda gpu: -gpu.memory):  # type: ignore[operator]
            size = growth.largest(gpu.memory - CONTEXT) if gpu.runs(numbers.compute) else 0  # type: ignore[operator]
            cells.append(f"{size:,}: {_milliseconds(growth, size, gpu, numbers)}" if size else "-")
        order = sorted(range(len(GPUS)), key=lambda i: -GPUS[i].memory)  # type: ignore[operator]
        table.add_row(escape(numbers.label), *(cells[order.index(i)] for i in range(len(GPUS))))
    console.print(table)
    console.print(
        f"ms: roofline, a lower bound without fusion; -: no units for this format, or no memory for one sample\n"
        f"this CPU: {here.peaks['float32'] / 1e9:,.0f} GFLOP/s in FP32 and {here.bandwidth / 1e9:.1f} GB/s, measured\n"
        f"{LEFT_OUT}",
        *_asides(config, growths),
        sep="\n",
        highlight=False,
    )


def _asides(config: Config, precisions: Iterable[Precision]) -> Iterator[str]:
    """What was asked for and is not counted, and what may surprise."""
    if config.compile:
        yield "compile: operations are counted as they are written; fused ones move fewer bytes and keep less."
    if config.parallel.shard:
        yield "parallel.shard: counted is one GPU that holds the whole network."
    if rounded := [p.name for p in precisions if not p.master and p.update == "float32"]:
        yield f"{', '.join(rounded)}: no master copy; what is updated are copies in FP32, rounded after every update."


def _milliseconds(growth: Growth, batch_size: int, machine: Machine, numbers: Precision) -> str:
    if not machine.runs(numbers.compute):
        return "-"
    return f"{growth.seconds(batch_size, machine, numbers.compute) * 1e3:,.1f}"
