"""What the loop needs to know of a family, and nothing more.

A task holds its networks and its data, turns a batch into losses and a test set into a metric. It never sees a
number format: whether a matmul ran in FP16 or FP32 is decided around it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mptrain.data.dataset import Batch, Dataset
from mptrain.errors import UserError


class Task:
    """One family: networks, data, losses, metric."""

    metric: str
    higher_is_better: bool
    margin: float
    """difference from FP32 that counts as equal, in the metric's own unit"""
    unit: str
    """what throughput counts, e.g. "images" """
    models: dict[str, nn.Module]
    """one entry per optimizer"""
    train_set: Dataset
    test_set: Dataset
    together: Callable[[Tensor], Tensor] = staticmethod(lambda x: x)
    """all rows of a batch that several processes share, for a loss that looks across it"""

    def losses(self, batch: Batch) -> Iterator[tuple[str, Tensor]]:
        """Yields (key of `models`, FP32 scalar mean loss); the loop steps before it asks for the next one.

        No more losses than networks; what a task does after the last of them runs in FP32.
        """
        raise NotImplementedError

    def size(self, batch: Batch) -> int:
        """Number of units in the batch: its weight in accumulation, and what throughput counts."""
        raise NotImplementedError

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """The metric under its name, and side numbers, over all of the batches; the same for every batch size."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Whatever else must survive a resume, in plain tensors and containers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""

    def merged(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """One process's state from those of the processes that shared each batch, in its order."""
        return states[0]

    def part(self, state: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
        """The state for one of `size` processes; undoes `merged`."""
        return state

    def finish(self, folder: Path) -> None:
        """Writes artefacts of the trained networks, e.g. a picture, into the run's folder."""


def at_least(lowest: int, **options: int) -> None:
    """Raises UserError for an option of the task that is smaller."""
    for name, value in options.items():
        if value < lowest:
            raise UserError(f"task.{name}={value} must be at least {lowest}; type task.{name}={lowest} or more")
