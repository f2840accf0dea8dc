"""What a run shows while it lasts: a progress bar where there is a terminal, and TensorBoard files."""

from __future__ import annotations

import operator
import sys
from contextlib import AbstractContextManager, suppress
from functools import cache
from typing import Any

from mptrain.config import Config
from mptrain.results.record import Record


class Progress(AbstractContextManager):
    """Shows logged lines; costs nothing between them."""

    def __init__(self, config: Config, record: Record, start: int):
        self.config = config
        self.bar: Any = None
        self.writer: Any = None
        wanted = sys.stderr.isatty() if config.progress == "auto" else config.progress
        if wanted:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            title = f"{config.recipe} {config.numbers.name} scale={config.scale_name} seed={config.seed}"
            columns = [
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[last]}"),
            ]
            self.bar = Bar(*columns, console=Console(stderr=True))
            self.task = self.bar.add_task(title, total=config.steps, completed=start, last="")
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            _errors_are_told_once()

            # what a killed process showed beyond its last checkpoint comes again
            self.writer = SummaryWriter(str(record.folder), purge_step=start + 1)

    def __enter__(self) -> Progress:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.bar is not None:
            self.bar.stop()
        if self.writer is not None:
            self.writer.close()

    def show(self, step: int, line: dict[str, Any]) -> None:
        """One logged line."""
        losses = line["loss"] if isinstance(line["loss"], dict) else {"loss": line["loss"]}
        if self.bar is not None:
            text = " ".join(f"{name} {value:.4g}" for name, value in losses.items() if value is not None)
            self.bar.update(self.task, completed=step, last=text)
        if self.writer is not None:
            for name, value in losses.items():
                if value is not None:
                    self.writer.add_scalar(f"train/{name}", value, step)
            for name in ("lr", "scale"):
                self.writer.add_scalar(f"train/{name}", line[name], step)

    def evaluated(self, step: int, result: dict[str, float]) -> None:
        """The numbers of one evaluation."""
        if self.writer is not None:
            for name, value in result.items():
                self.writer.add_scalar(f"eval/{name}", value, step)

    def watched(self, step: int, rows: list[dict[str, Any]]) -> None:
        """What a watched step looked like inside: norms, lost shares, and histograms over powers of two."""
        if self.writer is None:
            return
        from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

        whole = Summary()  # all of a step is one event: hundreds of them would cost more than what they tell
        for row in rows:
            tag = "/".join(part for part in (f"watch_{row['kind']}", row["layer"], row["name"]) if part)
            if row["norm"] is not None:
                whole.value.add(tag=f"{tag}/norm", simple_value=row["norm"])
            if row["flushed"] is not None:
                share = row["flushed"] / max(1, row["sampled"] - row["zero"])
                whole.value.add(tag=f"{tag}/flushed", simple_value=share)
            if counts := row["exponents"]:
                first, end = row["first_exponent"], row["first_exponent"] + len(counts)
                weighted = list(map(operator.mul, range(first, end), counts))
                histogram = HistogramProto(
                    min=first,
                    max=end,
                    num=sum(counts),
                    sum=sum(weighted),
                    sum_squares=sum(map(operator.mul, range(first, end), weighted)),
                    bucket_limit=range(first + 1, end + 1),
                    bucket=counts,
                )
                whole.value.add(tag=f"{tag}/log2", histo=histogram)
        self.writer._get_file_writer().add_summary(whole, step)

    def flush(self) -> None:
        """Brings to the disk what has been shown, before a checkpoint relies on it."""
        if self.writer is not None:
            self.writer.flush()


@cache
def _errors_are_told_once() -> None:
    """TensorBoard writes from a thread, which keeps an error for the next point or flush and prints it as well."""
    from tensorboard.summary.writer.event_file_writer import _AsyncWriterThread

    plain = _AsyncWriterThread.run

    def run(self: Any) -> None:
        with suppress(OSError):
            plain(self)

    _AsyncWriterThread.run = run
