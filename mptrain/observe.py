"""A run that is watched: what Watch finds goes to the record, to TensorBoard and to the terminal."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from mptrain.config import WatchConfig
from mptrain.progress import Progress
from mptrain.results.record import Record
from mptrain.watch import events
from mptrain.watch.alarms import Alarm
from mptrain.watch.hook import Watch


class Observer:
    """Watch within the runner; a run that is not watched has none."""

    def __init__(self, config: WatchConfig, record: Record, floor: float, rounded_updates: bool, **of: Any):
        self.record = record
        self.watch = Watch(
            every=config.every,
            out=record.folder,
            tensorboard=False,  # the run has a writer
            layers=config.layers,
            sample=config.sample,
            floor=floor,
            rounded_updates=rounded_updates,
            on_alarm=self._tell,
            **of,
        )

    def step(self, loss: Tensor, progress: Progress) -> None:
        """After each step of the loop."""
        before = self.watch.rows
        self.watch.step(loss)
        if self.watch.rows is not before and progress.writer is not None:
            events.show(progress.writer, self.watch.done, self.watch.rows)

    def _tell(self, alarm: Alarm) -> None:
        print(f"mptrain: watch: {alarm}", file=sys.stderr)
        self.record.log({"step": alarm.step, "alarm": alarm.as_dict()})

    def summary(self) -> dict[str, Any]:
        """For summary.json: the first twenty alarms, and the verdict."""
        found = self.watch.alarms
        return {"alarms": [alarm.as_dict() for alarm in found.found[:20]], "watch": found.verdict()}


def rounds_updates(storage: str, master: bool) -> bool:
    """Whether an update is rounded to 16 bits as it is applied."""
    return storage != "float32" and not master
