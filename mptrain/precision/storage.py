"""Parameters: how the network holds them, and what the optimizer updates.

With FP32 storage the parameters are their own master copy and nothing has to be done: autocast makes the 16-bit copy
each step. With 16-bit storage the optimizer works on FP32 copies, whose rounded values go back into the network:

    master copy:     copy <- copy - update            network <- round(copy)
    no master copy:  copy <- round(copy - update)     network <- copy             (what the paper's figure 2a ablates)

so the two differ in one rounding, and in nothing else. Normalisation layers keep FP32 parameters and statistics, as
section 3.3 keeps their arithmetic.
"""

from __future__ import annotations

import difflib
import fnmatch
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mptrain.errors import UserError
from mptrain.precision import fp8_layers, policy
from mptrain.precision.formats import DTYPES

if TYPE_CHECKING:
    from mptrain.precision.modes import Precision

NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)


class Weights:
    """The networks' parameters, updated as they are: the master copy of FP32 storage, or pure 16-bit training."""

    def __init__(self, models: dict[str, nn.Module]):
        self.models = models
        self.trained = {n: [p for p in m.parameters() if p.requires_grad] for n, m in models.items()}
        """of each network, the parameters that asked for gradients when it was handed over"""
        self.all = [p for model in models.values() for p in model.parameters()]

    def of(self, name: str) -> list[nn.Parameter]:
        """What the optimizer of this network is to update."""
        return self.trained[name]

    def gather(self, name: str) -> None:
        """Hands the network's gradients to what the optimizer updates; call before unscaling."""

    def publish(self, name: str) -> None:
        """Brings an applied update into the network; call after the optimizer's step."""

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for p in self.all:
            p.grad = None

    @contextmanager
    def evaluating(self, fp32: bool) -> Iterator[None]:
        """The networks as they are evaluated: in FP32 from the master copy, or as they are trained."""
        yield

    @contextmanager
    def averaged(self, average: Any) -> Iterator[None]:
        """The networks with the averaged parameters in place of their own."""
        with average.evaluating(self.models):
            yield

    @contextmanager
    def whole(self, average: Any = None) -> Iterator[None]:
        """The networks with all their parameters on every rank, averaged ones if there is an average."""
        yield

    def kept(self, name: str) -> list[Tensor]:
        """A network's parameters, and the copies that are updated in their place, as this process keeps them."""
        return [*self.models[name].parameters(), *self.of(name)]

    def held(self, name: str) -> Iterator[Tensor]:
        """What this process holds of a network."""
        yield from self.models[name].parameters()
        yield from self.models[name].buffers()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""

    # Into a checkpoint and back: whole tensors, whoever holds which part of them.

    def network_state(self, name: str) -> dict[str, Any]:
        """Parameters and buffers of a network."""
        return self.models[name].state_dict()

    def load_network_state(self, name: str, state: dict[str, Any]) -> None:
        self.models[name].load_state_dict(state)

    def collected(self, name: str, tensors: list[Tensor]) -> list[Tensor]:
        """Tensors like those of `of(name)`, whole."""
        return tensors

    def distributed(self, name: str, tensors: list[Tensor]) -> list[Tensor]:
        """Of whole tensors like those of `of(name)`, what this process holds."""
        return tensors

    def optimizer_state(self, name: str, state: dict[str, Any]) -> dict[str, Any]:
        """The state of the optimizer over `of(name)`, whole."""
        return state

    def optimizer_part(self, name: str, state: dict[str, Any]) -> dict[str, Any]:
        """Of a whole optimizer's state, what this process holds."""
        return state


class CopiedWeights(Weights):
    """A 16-bit network with FP32 copies of its parameters, kept exact (`master`) or rounded after every step."""

    def __init__(self, models: dict[str, nn.Module], full: dict[nn.Parameter, Tensor], master: bool):
        super().__init__(models)
        self.master = master
        copies = {p: nn.Parameter(t) for p, t in full.items()}
        self.copies = {name: [copies[p] for p in parameters] for name, parameters in self.trained.items()}

    def of(self, name: str) -> list[nn.Parameter]:
        return self.copies[name]

    def _pairs(self, name: str) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        return zip(self.trained[name], self.copies[name], strict=True)

    def gather(self, name: str) -> None:
        for p, copy in self._pairs(name):
            copy.grad = None if p.grad is None else p.grad.to(copy.dtype)

    @torch.no_grad()
    def publish(self, name: str) -> None:
        for p, copy in self._pairs(name):
            p.copy_(copy)
            if not self.master:
                copy.copy_(p)

    def zero_grad(self) -> None:
        super().zero_grad()
        for copies in self.copies.values():
            for copy in copies:
                copy.grad = None

    @contextmanager
    def evaluating(self, fp32: bool) -> Iterator[None]:
        if not fp32:
            yield
            return
        full = {p: copy.data for name in self.models for p, copy in self._pairs(name)}
        with _replaced(self.models, lambda p: full.get(p, p.data.float())):
            yield

    def state_dict(self) -> dict[str, Any]:
        return {name: [copy.detach() for copy in copies] for name, copies in self.copies.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, copies in self.copies.items():
            for copy, saved in zip(copies, state[name], strict=True):
                copy.copy_(saved)


class PureWeights(Weights):
    """A 16-bit network without any FP32 copy."""

    @contextmanager
    def evaluating(self, fp32: bool) -> Iterator[None]:
        if not fp32:
            yield
            return
        with _replaced(self.models, lambda p: p.data.float()):
            yield


@contextmanager
def _replaced(models: dict[str, nn.Module], full: Callable[[nn.Parameter], Tensor]) -> Iterator[None]:
    """The networks with other numbers in their floating point parameters, which get their own back afterwards."""
    kept = {p: p.data for model in models.values() for p in model.parameters() if p.is_floating_point()}
    try:
        for p in kept:
            p.data = full(p)
        _gather_recurrent(models.values())
        yield
    finally:
        for p, data in kept.items():
            p.data = data


def prepare(precision: Precision, models: dict[str, nn.Module]) -> Weights:
    """Brings the networks to the precision's storage format; see `Precision.prepare`."""
    _refuse_low_parameters(models)
    _keep_modules_fp32(models, precision.keep_fp32)
    if precision.compute == "float8":
        fp8_layers.keep_out(models, precision.keep_fp32)
    if precision.storage == "float32":
        return Weights(models)
    full = {p: p.detach().clone() for parameters in Weights(models).trained.values() for p in parameters}
    for model in models.values():
        _round_parameters(model, DTYPES[precision.storage], precision.keep_fp32)
    _gather_recurrent(models.values())
    if precision.update == "storage":
        return PureWeights(models)
    weights = CopiedWeights(models, full, precision.master)
    if not precision.master:
        for name in models:
            weights.publish(name)
    return weights


def _refuse_low_parameters(models: dict[str, nn.Module]) -> None:
    low = [
        f"{name} ({str(p.dtype).removeprefix('torch.')})"
        for model in models.values()
        for name, p in model.named_parameters()
        if p.is_floating_point() and p.dtype != torch.float32 and p.requires_grad
    ]
    if low:
        more = f" and {len(low) - 5} more" if len(low) > 5 else ""
        raise UserError(
            f"these parameters are not float32: {', '.join(low[:5])}{more}; hand over the network in float32 "
            "(model.float()), the precision rounds it: fp16_master and fp16_nomaster keep FP16 parameters, "
            "bf16_pure BF16"
        )


def _round_parameters(model: nn.Module, dtype: torch.dtype, keep_fp32: tuple[str, ...]) -> None:
    kept = {id(p) for m in model.modules() if isinstance(m, NORMS) for p in m.parameters(recurse=False)}
    kept |= {id(p) for path in _matching(model, keep_fp32) for p in model.get_submodule(path).parameters()}
    for p in model.parameters():
        if p.is_floating_point() and id(p) not in kept:
            p.data = p.data.to(dtype)


def _gather_recurrent(models: Iterable[nn.Module]) -> None:
    """Lays the weights of each recurrent layer in one piece, as cuDNN wants them; on a CPU nothing changes."""
    for model in models:
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()


def _matching(model: nn.Module, patterns: tuple[str, ...]) -> list[str]:
    paths = [path for path, _ in model.named_modules() if path]
    return [path for path in paths if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)]


def _keep_modules_fp32(models: dict[str, nn.Module], keep_fp32: tuple[str, ...]) -> None:
    """Makes the named modules run outside autocast, on FP32 inputs; function names are for the arithmetic."""
    for pattern in keep_fp32:
        found = [model.get_submodule(path) for model in models.values() for path in _matching(model, (pattern,))]
        if not found and pattern not in policy.FUNCTIONS:
            paths = sorted({path for model in models.values() for path, _ in model.named_modules() if path})
            near = difflib.get_close_matches(pattern, sorted(policy.FUNCTIONS) + paths, n=2)
            raise UserError(
                f"precision.keep_fp32: '{pattern}' is neither a function nor a module of this network; "
                + (
                    f"did you mean {' or '.join(near)}? "
                    if near
                    else f"modules are {', '.join(_outermost(paths)) or 'none'}; "
                )
                + "functions are called as in torch (softmax, conv2d), modules by path or pattern (layer1.*)"
            )
        for module in found:
            if any(module is m.out_proj for n in models.values() for m in n.modules() if _is_attention(m)):
                raise UserError(
                    f"precision.keep_fp32: '{pattern}' names the projection inside a MultiheadAttention, which is "
                    "computed as one; name the attention module itself"
                )
            module.forward = types.MethodType(_fp32_forward, module)  # type: ignore[method-assign]


def _outermost(paths: list[str]) -> list[str]:
    """The first few paths, from the outermost in."""
    return sorted(paths, key=lambda path: (path.count("."), path))[:8]


def _is_attention(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention)


def _fp32_forward(module: nn.Module, *args, **kwargs):
    """The forward of a module kept in FP32. As a bound method it follows its module into copies."""

    def cast(t: Tensor) -> Tensor:
        return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t

    args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        return type(module).forward(module, *args, **kwargs)
