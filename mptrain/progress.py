"""What a run shows while it lasts: a progress bar where there is a terminal, and TensorBoard files."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

from mptrain.config import Config
from mptrain.results.record import Record
from mptrain.watch import events


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
            self.writer = events.writer(record.folder, start)

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

    def flush(self) -> None:
        """Brings to the disk what has been shown, before a checkpoint relies on it."""
        if self.writer is not None:
            self.writer.flush()
