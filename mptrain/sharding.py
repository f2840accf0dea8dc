"""Sharded data parallel (FSDP2): each process keeps a part of every parameter, of its gradient and of what the
optimizer knows of it, for networks that with all of these do not fit on one device.

    torchrun --nproc-per-node 4 -m mptrain +recipe=language_paper parallel.shard=true

torch's `fully_shard` gathers a block's parameters before it runs and again before its backward pass, and lets go of
them after each; gradients arrive summed over the ranks, in FP32, each rank its part. What the loop updates are those
parts as plain tensors (Zhao et al. 2023, PyTorch FSDP): unscaling, update and averages need no more. What needs all
parts is agreed on: whether a gradient is infinite anywhere, and the norm to clip by.

Evaluation gathers the whole network, without gradients or optimizer, on every rank; rank 0 evaluates it, as one process
does.

Checkpoints hold whole tensors, gathered one at a time: any number of processes, sharded or not, may go on from them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from mptrain.errors import UserError
from mptrain.optim import Average
from mptrain.parallel import Ranks
from mptrain.precision.storage import Weights

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Shards(Ranks):
    """One of several processes, each with a part of every batch and of every parameter."""

    def divide(self, models: dict[str, nn.Module], device: torch.device) -> Weights:
        """Leaves each rank its part of networks that are the same on all; raises UserError for several networks."""
        if len(models) > 1:
            raise UserError(
                f"parallel.shard=true shards one network, and this recipe trains {len(models)} "
                f"({', '.join(models)}); take it out"
            )
        return ShardedWeights(models, self, device)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Those of single numbers, which all ranks hold; the others come summed."""
        super().sum_gradients([p for p in parameters if p.dim() == 0])

    def clip(self, parameters: list[nn.Parameter], limit: float) -> None:
        mine = [p.grad for p in parameters if p.grad is not None and (p.dim() > 0 or self.leads)]
        squared = (
            torch.nn.utils.get_total_norm(mine).double().square() if mine else torch.zeros((), dtype=torch.float64)
        )
        norm = self.sum(squared.to(parameters[0].device)).sqrt().float()
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)

    def agreed(self, finite: bool | None) -> bool | None:
        bad, good = self.sum(torch.tensor([finite is False, finite is True], dtype=torch.int32)).tolist()
        return False if bad else True if good else None


class ShardedWeights(Weights):
    """FP32 parameters of which each rank keeps, and its optimizer updates, a part."""

    def __init__(self, models: dict[str, nn.Module], ranks: Shards, device: torch.device):
        self.ranks = ranks
        self.mesh = init_device_mesh(device.type, (ranks.size,))
        for model in models.values():
            _divide(model, self.mesh, device)
        super().__init__(models)
        self.units = [unit for model in models.values() for unit in model.modules() if isinstance(unit, FSDPModule)]
        self.parts = {
            name: [nn.Parameter(p.to_local().detach()) if isinstance(p, DTensor) else p for p in parameters]
            for name, parameters in self.trained.items()
        }

    def of(self, name: str) -> list[nn.Parameter]:
        return self.parts[name]

    def kept(self, name: str) -> list[Tensor]:
        return [*self.parts[name], *(p.to_local() for p in self.all if isinstance(p, DTensor) and not p.requires_grad)]

    def held(self, name: str) -> Iterator[Tensor]:
        for p in self.models[name].parameters():
            yield p.to_local() if isinstance(p, DTensor) else p
        yield from self.models[name].buffers()

    def gather(self, name: str) -> None:
        for p, part in zip(self.trained[name], self.parts[name], strict=True):
            if isinstance(p, DTensor):
                part.grad = p.grad.to_local() if isinstance(p.grad, DTensor) else None

    def zero_grad(self) -> None:
        super().zero_grad()
        for part in chain(*self.parts.values()):
            part.grad = None

    @contextmanager
    def whole(self, average: Average | None = None) -> Iterator[None]:
        kept = [part.detach().clone() for part in chain(*self.parts.values())] if average is not None else []
        if average is not None:
            self._put(chain(*average.shadow.values()))
        for unit in self.units:
            unit.unshard()
        try:
            with _unhooked(self.units):
                yield
        finally:
            for model in self.models.values():
                model.zero_grad(set_to_none=True)
            for unit in self.units:
                unit.reshard()
            if average is not None:
                self._put(kept)

    @torch.no_grad()
    def _put(self, values: Iterable[Tensor]) -> None:
        for part, value in zip(chain(*self.parts.values()), values, strict=True):
            part.copy_(value)

    @contextmanager
    def averaged(self, average: Average) -> Iterator[None]:
        """Nothing is left to do: `whole` has gathered the averages."""
        yield

    # Checkpoints: whole tensors on rank 0's CPU, nothing on the others, which take part in gathering all the same.

    def network_state(self, name: str) -> dict[str, Any]:
        return {key: self._whole(value) for key, value in self.models[name].state_dict().items()}

    def load_network_state(self, name: str, state: dict[str, Any]) -> None:
        now = self.models[name].state_dict()
        if now.keys() != state.keys():
            raise ValueError(f"it holds other tensors: {', '.join(sorted(now.keys() ^ state.keys())[:5])}")
        for key, value in now.items():
            place = value.to_local() if isinstance(value, DTensor) else value
            place.copy_(self._part(state[key]) if isinstance(value, DTensor) else state[key])

    def collected(self, name: str, tensors: list[Tensor]) -> list[Tensor]:
        return [self._whole(self._as_sharded(p, t)) for p, t in zip(self.trained[name], tensors, strict=True)]

    def distributed(self, name: str, tensors: list[Tensor]) -> list[Tensor]:
        return [
            self._part(t) if isinstance(p, DTensor) else t for p, t in zip(self.trained[name], tensors, strict=True)
        ]

    def optimizer_state(self, name: str, state: dict[str, Any]) -> dict[str, Any]:
        parts = self.parts[name]
        found = {
            i: {
                key: self._whole(self._as_sharded(self.trained[name][i], value))
                if isinstance(value, Tensor) and value.dim() > 0 and value.shape == parts[i].shape
                else value
                for key, value in values.items()
            }
            for i, values in state["state"].items()
        }
        return {**state, "state": found}

    def optimizer_part(self, name: str, state: dict[str, Any]) -> dict[str, Any]:
        trained = self.trained[name]
        found = {
            i: {
                key: self._part(value)
                if isinstance(value, Tensor) and isinstance(trained[i], DTensor) and value.shape == trained[i].shape
                else value
                for key, value in values.items()
            }
            for i, values in state["state"].items()
        }
        return {**state, "state": found}

    def _as_sharded(self, p: nn.Parameter, part: Tensor) -> Tensor:
        if not isinstance(p, DTensor):
            return part
        return DTensor.from_local(
            part.detach(), self.mesh, [Shard(0)], run_check=False, shape=p.shape, stride=p.stride()
        )

    def _whole(self, value: Tensor) -> Tensor:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return whole.detach().cpu() if self.ranks.leads else whole.new_empty(0, device="cpu")

    def _part(self, value: Tensor) -> Tensor:
        chunks = value.chunk(self.ranks.size)
        return chunks[self.ranks.rank] if self.ranks.rank < len(chunks) else value[:0]


def _divide(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Shards a network: block by block what is run as a block, and the rest with the network itself.

    `reads` of a network names the blocks whose parameters it takes without running them; those, and blocks that share
    parameters, stay with the network. So do single numbers, on every rank.
    """
    single = {p for p in model.parameters() if p.dim() == 0}
    for p in single:
        p.data = p.data.to(device)
    everywhere = _uses(model)
    for block in (*_blocks(model, set(getattr(model, "reads", ()))), model):
        mine = _uses(block)
        if block is not model and (not mine.keys() - single or any(n < everywhere[p] for p, n in mine.items())):
            continue
        block.register_forward_hook(_no_views)
        unit: Any = fully_shard(block, mesh=mesh, reshard_after_forward=True, ignored_params=single)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """How many places inside hold each parameter."""
    return Counter(p for _, p in module.named_parameters(remove_duplicate=False))


def _blocks(module: nn.Module, reads: set[str]) -> Iterator[nn.Module]:
    for name, child in module.named_children():
        if name in reads:
            continue
        if isinstance(child, CONTAINERS):
            yield from _blocks(child, set())
        else:
            yield child


def _no_views(module: nn.Module, inputs: Any, output: Any) -> Any:
    """FSDP's hook on a view would be lost if it were changed in place."""
    return tree_map_only(Tensor, lambda t: t.clone() if t.requires_grad and t._base is not None else t, output)


@contextmanager
def _unhooked(units: Iterable[Any]) -> Iterator[None]:
    """Units that are whole as ordinary modules, which one rank may run without the others.

    FSDP notes in its hooks in which order units ran, and gathers parameters ahead by that: what one rank alone has run
    would make it wait for the others later on.
    """
    kept = [(unit, unit._forward_pre_hooks, unit._forward_hooks) for unit in units]
    try:
        for unit, *_ in kept:
            unit._forward_pre_hooks, unit._forward_hooks = OrderedDict(), OrderedDict()
        yield
    finally:
        for unit, before, after in kept:
            unit._forward_pre_hooks, unit._forward_hooks = before, after
