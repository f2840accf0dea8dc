"""What belongs to the whole process: random generators, threads and signals, which are put back, and its memory."""

from __future__ import annotations

import ctypes
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""of mallopt(3)"""


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM arrived, and the run was left resumable."""


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def seed_of(*numbers: int) -> int:
    """A seed for each combination of numbers, unlike those of its neighbours."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def random_state(device: torch.device) -> dict[str, Any]:
    """The global generators' states, in types that load with weights_only=True."""
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def torch_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The states of torch's generators alone: a microsecond, so that every step may note from where it drew."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_torch_state(state: tuple[torch.Tensor, torch.Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


@contextmanager
def same_random_state(device: torch.device) -> Iterator[None]:
    """Whatever is drawn inside, the generators go on as if it had not been."""
    state = random_state(device)
    try:
        yield
    finally:
        set_random_state(state, device)


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """So many CPU threads inside; None leaves their number."""
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_freed_memory() -> None:
    """From here on this process keeps what a step frees for the next one. glibc only; elsewhere nothing changes.

    By default glibc returns it to the kernel, which clears it page by page when the next step asks: a tenth of the time
    of a ResNet's step on a CPU. The most that is in use at once stays the same.
    """
    try:
        tune = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    tune(M_MMAP_THRESHOLD, 2**25)  # bytes, the most glibc takes; larger blocks still go back
    tune(M_TRIM_THRESHOLD, 2**31 - 1)


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, to be answered between two steps; a second one interrupts at once."""
    received: list[int] = []

    def receive(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, receive)
    except ValueError:  # not in the main thread, where signals are somebody else's
        pass
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
