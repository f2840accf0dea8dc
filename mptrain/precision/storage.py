"""Parameters: how the network holds them, and what the optimizer updates.

With FP32 storage the parameters are their own master copy and nothing has to be done: autocast makes the 16-bit copy
each step. With 16-bit storage the optimizer works on FP32 copies, whose rounded values go back into the network:

    master copy:     copy <- copy - update            network <- round(copy)
    no master copy:  copy <- round(copy - update)     network <- copy             (what the paper's figure 2a ablates)

so the two differ in one rounding, and in nothing else. Normalisation layers keep FP32 parameters and statistics, as
section 3.3 keeps their arithmetic.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mptrain.errors import UserError
from mptrain.files import suggest
from mptrain.precision import policy
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

    def of(self, name: str) -> list[nn.Parameter]:
        """What the optimizer of this network is to update."""
        return [p for p in self.models[name].parameters() if p.requires_grad]

    def gather(self, name: str) -> None:
        """Hands the network's gradients to what the optimizer updates; call before unscaling."""

    def publish(self, name: str) -> None:
        """Brings an applied update into the network; call after the optimizer's step."""

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for model in self.models.values():
            for p in model.parameters():
                p.grad = None

    @contextmanager
    def evaluating(self, fp32: bool) -> Iterator[None]:
        """The networks as they are evaluated: in FP32 from the master copy, or as they are trained."""
        yield

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""


class CopiedWeights(Weights):
    """A 16-bit network with FP32 copies of its parameters, kept exact (`master`) or rounded after every step."""

    def __init__(self, models: dict[str, nn.Module], full: dict[str, list[Tensor]], master: bool):
        super().__init__(models)
        self.master = master
        self.copies = {name: [nn.Parameter(t) for t in tensors] for name, tensors in full.items()}

    def of(self, name: str) -> list[nn.Parameter]:
        return self.copies[name]

    def _pairs(self, name: str) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        return zip(super().of(name), self.copies[name], strict=True)

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
        kept = [(p, p.data, copy) for name in self.models for p, copy in self._pairs(name)]
        frozen = [(p, p.data) for m in self.models.values() for p in m.parameters() if not p.requires_grad]
        try:
            for p, _, copy in kept:
                p.data = copy.data
            for p, data in frozen:
                p.data = data.float() if data.is_floating_point() else data
            yield
        finally:
            for p, data, _ in kept:
                p.data = data
            for p, data in frozen:
                p.data = data

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
        kept = [(p, p.data) for m in self.models.values() for p in m.parameters()] if fp32 else []
        try:
            for p, data in kept:
                p.data = data.float() if data.is_floating_point() else data
            yield
        finally:
            for p, data in kept:
                p.data = data


def prepare(precision: Precision, models: dict[str, nn.Module]) -> Weights:
    """Brings the networks to the precision's storage format; see `Precision.prepare`."""
    _refuse_low_parameters(models)
    _keep_modules_fp32(models, precision.keep_fp32)
    if precision.storage == "float32":
        return Weights(models)
    full = {name: [p.detach().clone() for p in Weights(models).of(name)] for name in models}
    for model in models.values():
        _round_parameters(model, DTYPES[precision.storage], precision.keep_fp32)
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
            "(model.float()), the precision rounds it: fp16_master and fp16_nomaster keep FP16 parameters, bf16_pure BF16"
        )


def _round_parameters(model: nn.Module, dtype: torch.dtype, keep_fp32: tuple[str, ...]) -> None:
    kept = {id(p) for m in model.modules() if isinstance(m, NORMS) for p in m.parameters(recurse=False)}
    kept |= {id(p) for path in _matching(model, keep_fp32) for p in model.get_submodule(path).parameters()}
    for p in model.parameters():
        if p.is_floating_point() and id(p) not in kept:
            p.data = p.data.to(dtype)


def _matching(model: nn.Module, patterns: tuple[str, ...]) -> list[str]:
    paths = [path for path, _ in model.named_modules() if path]
    return [path for path in paths if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)]


def _keep_modules_fp32(models: dict[str, nn.Module], keep_fp32: tuple[str, ...]) -> None:
    """Makes the named modules run outside autocast, on FP32 inputs; function names are for the arithmetic."""
    for pattern in keep_fp32:
        found = [model.get_submodule(path) for model in models.values() for path in _matching(model, (pattern,))]
        if not found and pattern not in policy.FUNCTIONS:
            paths = sorted({path for model in models.values() for path, _ in model.named_modules() if path})
            raise UserError(
                f"precision.keep_fp32: '{pattern}' is neither a function nor a module of this network; "
                + suggest(pattern, sorted(policy.FUNCTIONS) + paths).partition(" there are")[0]
                + " modules can be given by pattern, e.g. layer1.*"
            )
        for module in found:
            _run_in_fp32(module)


def _run_in_fp32(module: nn.Module) -> None:
    forward = module.forward
    if getattr(forward, "runs_in_fp32", False):
        return

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
        if isinstance(value, (tuple, list)):
            return type(value)(cast(item) for item in value)
        return {key: cast(item) for key, item in value.items()} if isinstance(value, dict) else value

    @functools.wraps(forward)
    def fp32_forward(*args, **kwargs):
        device_type = next((t.device.type for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), "cpu")
        with torch.autocast(device_type, enabled=False):
            return forward(*cast(args), **cast(kwargs))

    fp32_forward.runs_in_fp32 = True  # type: ignore[attr-defined]
    module.forward = fp32_forward  # type: ignore[method-assign]
