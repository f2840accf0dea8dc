"""Data parallel: the processes that `torchrun` starts share every batch and take the same steps.

    torchrun --nproc-per-node 2 -m mptrain +recipe=resnet

`batch_size` is the whole batch. Each rank computes a contiguous part of it and weighs its loss by its share, so the sum
of the gradients over the ranks is the gradient of the whole batch, whatever the parts' sizes. They are summed in FP32,
after the networks' own 16-bit gradients have been gathered and before they are unscaled: one infinity on one rank is
infinite on all, and every rank skips the same steps and moves its scale alike, without being told.

The loop works with ranks directly rather than through DistributedDataParallel because a step may run a network twice,
or only one of two, and because its wrapper would hide methods that the families call; the gradients are the same.
What is small and belongs to the host (sizes, signals, states) goes over Gloo, so no GPU waits for it.

Rank 0 alone evaluates, each sample once and as one process does, and alone writes. Augmentation, dropout and sampled
words are drawn by each rank for its own part.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mptrain.errors import UserError

Result = TypeVar("Result")

PATIENCE = timedelta(hours=2)
"""How long ranks wait for one another, e.g. for an evaluation. A rank that ends is noticed at once."""

BUCKET = 2**23
"""Gradients in one message: 32 MiB of FP32."""


BROKEN = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe")
"""How torch's communication says that a process is gone."""


class RankLost(UserError):
    """Another process of the job has ended; the record stays as the last checkpoint left it."""


class Alone:
    """A single process: nothing is shared and nothing waits."""

    rank = 0
    size = 1
    signals: Sequence[int] = ()

    @property
    def leads(self) -> bool:
        """Whether this process evaluates, writes and speaks."""
        return self.rank == 0

    @property
    def stopping(self) -> int:
        """The signal that asks all ranks to stop, or 0."""
        return self.signals[0] if self.signals else 0

    def same(self, models: dict[str, nn.Module]) -> None:
        """Gives every rank the parameters and buffers of rank 0."""

    def totals(self, sizes: list[int]) -> list[int]:
        """Of each batch of a window, its size over all ranks. Agrees on signals in passing."""
        return sizes

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gradients of the whole batch, from those of each rank's part."""

    def clip(self, parameters: list[nn.Parameter], limit: float) -> None:
        """Gradients whose norm is above the limit are brought down to it, all by one factor."""
        torch.nn.utils.clip_grad_norm_(parameters, limit)

    def agreed(self, finite: bool | None) -> bool | None:
        """Whether the gradients are finite on all ranks; None if there are none anywhere."""
        return finite

    def first(self, work: Callable[[], Result]) -> Result:
        """What rank 0 made of it, or its error, on all ranks."""
        return work()

    def gathered(self, value: Result) -> list[Result]:
        """Everybody's value, by rank."""
        return [value]

    def total(self, x: Tensor) -> Tensor:
        """The sum over all ranks, through which gradients flow."""
        return x

    def together(self, x: Tensor) -> Tensor:
        """All ranks' rows, one rank after the other, through which gradients flow."""
        return x


class Ranks(Alone):
    """One of several processes, each with a part of every batch."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self._stopping = 0

    @property
    def stopping(self) -> int:
        return self._stopping

    def totals(self, sizes: list[int]) -> list[int]:
        numbers = self.sum(torch.tensor([*sizes, len(self.signals) > 0], dtype=torch.float64)).tolist()
        if numbers.pop():
            self._stopping = max(self.gathered(self.signals[0] if self.signals else 0))
        return [int(number) for number in numbers]

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        parameters = list(parameters)
        users = self.sum(torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)).tolist()
        bucket: list[nn.Parameter] = []
        held = 0
        for p, number in zip(parameters, users, strict=True):
            if number == 0:
                continue
            if held and held + p.numel() > BUCKET:
                self._sum_bucket(bucket)
                bucket, held = [], 0
            bucket.append(p)
            held += p.numel()
        if bucket:
            self._sum_bucket(bucket)

    def _sum_bucket(self, parameters: list[nn.Parameter]) -> None:
        """In one message; a rank that did not use a parameter adds zero."""
        dense = [_dense(p) for p in parameters]
        flat = self.sum(torch.cat([g.reshape(-1) for g in dense]))
        for p, g in zip(parameters, flat.split([g.numel() for g in dense]), strict=True):
            p.grad = g.view_as(p).to(p.dtype)

    def first(self, work: Callable[[], Result]) -> Result:
        result: Any = None
        error: BaseException | None = None
        if self.leads:
            try:
                result = work()
            except Exception as caught:
                error = caught
        told = self._broadcast((result, f"{error}" if error is not None else None))
        if error is not None:
            raise error
        if told[1] is not None:
            raise RankLost(f"rank {self.rank} ends with rank 0: {told[1]}")
        return told[0]

    def _broadcast(self, value: Any) -> Any:
        box = [value]
        with _naming_the_loss(self.rank):
            torch.distributed.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def gathered(self, value: Result) -> list[Result]:
        found: list[Any] = [None] * self.size
        with _naming_the_loss(self.rank):
            torch.distributed.all_gather_object(found, value)
        return found

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        with _naming_the_loss(self.rank):
            torch.distributed.all_reduce(x)
        return x

    def total(self, x: Tensor) -> Tensor:
        return _Total.apply(x, self)

    def together(self, x: Tensor) -> Tensor:
        rows = torch.zeros(self.size, dtype=torch.int64)
        rows[self.rank] = len(x)
        before = int(self.sum(rows)[: self.rank].sum())
        whole = x.new_zeros((int(rows.sum()), *x.shape[1:]), dtype=torch.float32)
        mine = torch.arange(before, before + len(x), device=x.device)
        return self.total(whole.index_add(0, mine, x.float())).to(x.dtype)

    @torch.no_grad()
    def same(self, models: dict[str, nn.Module]) -> None:
        with _naming_the_loss(self.rank):
            for model in models.values():
                for tensor in (*model.parameters(), *model.buffers()):
                    torch.distributed.broadcast(tensor, src=0)


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:  # type: ignore[override]
        ctx.ranks = ranks
        return ranks.sum(x.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.ranks.sum(grad.contiguous().clone()), None


def _dense(p: nn.Parameter) -> Tensor:
    """A parameter's gradient in FP32, zero where it has none."""
    if p.grad is None:
        return torch.zeros_like(p, dtype=torch.float32)
    return (p.grad.to_dense() if p.grad.is_sparse else p.grad).float()


@contextmanager
def _naming_the_loss(rank: int) -> Iterator[None]:
    """torch says which socket closed; the user wants to know what that means."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(
            f"rank {rank} lost another process of this job, whose own message says why; "
            "the same command goes on from the last checkpoint"
        ) from error


@contextmanager
def minding(ranks: Alone) -> Iterator[None]:
    """A connection that breaks inside of torch's own communication means that another process has ended."""
    try:
        yield
    except RuntimeError as error:
        if ranks.size == 1 or not any(word in str(error).lower() for word in BROKEN):
            raise
        with _naming_the_loss(ranks.rank):
            raise


def place_of() -> tuple[int, int, int]:
    """(processes, this one's rank, its number on this machine), as a launcher said; (1, 0, 0) without one."""
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
    given = [os.environ.get(name) for name in names]
    if given[0] is None:
        return 1, 0, 0
    try:
        size, rank, local = int(given[0]), int(given[1] or 0), int(given[2] or 0)
        if 0 <= rank < size and local >= 0 and (size == 1 or given[1] is not None):
            return size, rank, local
    except ValueError:
        pass
    said = ", ".join(
        f"{name}={'(unset)' if value is None else value[:50]}" for name, value in zip(names, given, strict=True)
    )
    raise UserError(
        f"the environment says {said}, which is no place in a job; start several processes with torchrun, or unset "
        "WORLD_SIZE"
    )


@contextmanager
def joined(device: str, kind: type[Ranks] = Ranks) -> Iterator[Alone]:
    """This process's place among those that torchrun started; a process of its own is alone."""
    size, rank, local = place_of()
    if size == 1:
        yield Alone()
        return
    import torch.distributed as dist

    if ":" in device:
        raise UserError(f"device={device} names one GPU for {size} processes; give device=cuda, each takes its own")
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu and local >= torch.cuda.device_count():
        raise UserError(
            f"process {local} of this machine has no GPU of its own, there are {torch.cuda.device_count()}; "
            "start fewer (torchrun --nproc-per-node N), or give device=cpu"
        )
    if on_gpu:
        torch.cuda.set_device(local)
    try:
        store, rank, size = next(iter(dist.rendezvous("env://", rank, size)))
        # a restarted job finds the addresses of the dead one in torchrun's store
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"the {size} processes of this job could not find one another ({str(error).splitlines()[0]}); "
            "start them with torchrun"
        ) from error
    yield kind(rank, size)
    dist.destroy_process_group()
