"""Batches in a reproducible order, from any position: what a run trains on, in windows of one optimizer step."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from mptrain.data.dataset import Batch, BatchKey, Dataset
from mptrain.errors import UserError


class Loader:
    """Endless windows of `accumulate` batches; the last window of an epoch takes what is left.

    The order is shuffled from (seed, epoch) alone, so `epoch` and `position` are all there is to save.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        accumulate: int,
        seed: int,
        workers: int = 0,
        pin: bool = False,
        rank: int = 0,
        ranks: int = 1,
    ):
        self.dataset = dataset
        self.batch_size = batch_size
        self.accumulate = accumulate
        self.seed = seed
        self.workers = workers
        self.pin = pin
        self.rank = rank
        self.ranks = ranks
        self.epoch = 0
        self.position = 0

    def windows(self) -> Iterator[list[Batch]]:
        """From the current position on; `epoch` and `position` count what was handed out."""
        ends: deque[bool] = deque()
        batches = self._fetch(self._keys(ends))
        while True:
            window = [next(batches)]
            while not (epoch_ends := ends.popleft()) and len(window) < self.accumulate:
                window.append(next(batches))
            self.position += len(window)
            if epoch_ends:
                self.epoch, self.position = self.epoch + 1, 0
            yield window

    def _keys(self, ends: deque[bool]) -> Iterator[BatchKey]:
        """Endless keys, which workers fetch ahead; `ends` takes for each whether its epoch ends with it."""
        epoch, start = self.epoch, self.position
        told = self.rank != 0
        while True:
            order = self.dataset.epoch(self.batch_size, np.random.default_rng((self.seed, epoch)))
            if not order:
                raise UserError(f"the training set {self.dataset.name} holds no batch; give more data (data_dir=...)")
            if not told:
                told = True
                self._tell_of_short_windows(order)
            for i in range(start, len(order)):
                ends.append(i + 1 == len(order))
                yield self._key(order[i], epoch, i, epoch * len(order) + i)
            epoch, start = epoch + 1, 0

    def _tell_of_short_windows(self, order: list[np.ndarray]) -> None:
        """A window never reaches beyond an epoch, which may be less than was asked for."""
        found = []
        if len(order) == 1 and len(order[0]) < self.batch_size:
            found.append(f"batch_size={self.batch_size} is more than the {len(order[0])} samples")
        if len(order) < self.accumulate:
            found.append(f"accumulate={self.accumulate} is more than the {len(order)} batches")
        for text in found:
            where = f"that data={self.dataset.name} trains on; a step takes all of them and no more"
            print(f"mptrain: {text} {where}", file=sys.stderr)

    def _key(self, indices: np.ndarray, epoch: int, i: int, number: int) -> BatchKey:
        """Of a batch that several ranks share, this one's part; one with fewer samples than ranks goes to all of them
        whole."""
        if self.ranks == 1:
            return BatchKey(indices, (self.seed, epoch, i), first=i == 0, train=True, number=number)
        if len(indices) >= self.ranks:
            indices = np.array_split(indices, self.ranks)[self.rank]
        return BatchKey(indices, (self.seed, epoch, i, self.rank), first=i == 0, train=True, number=number)

    def _fetch(self, keys: Iterator[BatchKey]) -> Iterator[Batch]:
        if self.workers == 0:
            return (self.dataset.__getitems__(key) for key in keys)
        return self._fetch_by_workers(keys)

    def _fetch_by_workers(self, keys: Iterator[BatchKey]) -> Iterator[Batch]:
        fetched = iter(
            DataLoader(
                _Telling(self.dataset),  # type: ignore[arg-type]
                batch_sampler=keys,  # type: ignore[arg-type]
                collate_fn=_as_is,
                num_workers=self.workers,
                multiprocessing_context="fork",  # the data is shared, and Ctrl-C is answered as it is here
                pin_memory=self.pin,
                generator=torch.Generator(),  # else it would draw from the generator that training draws from
            )
        )
        for batch in fetched:
            if isinstance(batch, UserError):
                raise batch
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


def explained(error: Exception) -> Exception:
    """The error itself, or what it means if torch reports that a loader process was killed, which it does anywhere."""
    if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
        return UserError(
            f"a loader process was killed ({str(error).strip().rstrip('.')}), perhaps for want of memory; "
            "give fewer workers=; the same command goes on from the last checkpoint"
        )
    return error


class _Telling:
    """Brings home what a loader process has to say to the user; torch would hide it in a traceback."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __getitems__(self, key: BatchKey) -> Batch | UserError:
        try:
            return self.dataset.__getitems__(key)
        except UserError as error:
            return error


def _as_is(batch: Batch) -> Batch:
    return batch


def mover(device: torch.device) -> Callable[[Batch], Batch]:
    """A function that brings a batch to the device, whatever it is made of."""

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device, non_blocking=True)
        if isinstance(value, dict):
            return {key: move(item) for key, item in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(move(item) for item in value))
        if isinstance(value, (tuple, list)):
            return type(value)(move(item) for item in value)
        return value

    return _as_is if device.type == "cpu" else move
