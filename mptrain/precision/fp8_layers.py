"""Which layers of a network multiply in FP8, and why the others do not.

The first and the last layer stay out: one sees the data as it is, the other decides between classes, and both are
small beside the rest. Layers count in the order in which the network was built, whatever they are; the first is most
often a convolution or an embedding, which FP8 has no product for anyway. Products of two activations (attention,
similarities) stay out as well: no weight is among them, and softmax leaves rows of very different size in one tensor.

A weight that a module of another kind than these hands to `linear` by itself is taken if its sizes allow it.
"""

from __future__ import annotations

import fnmatch
import types
from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from mptrain.precision import dispatch
from mptrain.precision.fp8 import MULTIPLE

CONVOLUTION = (nn.modules.conv._ConvNd,)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
LOOKED_UP = (nn.Embedding, nn.EmbeddingBag)
LAYERS = (nn.Linear, nn.MultiheadAttention, nn.Bilinear, *CONVOLUTION, *RECURRENT, *LOOKED_UP)


def plan(models: Mapping[str, nn.Module], keep_fp32: Iterable[str] = ()) -> tuple[list[str], dict[str, list[str]]]:
    """(paths of the layers in FP8, {why not: paths of the others}), without embeddings, which multiply nothing."""
    inside: list[str] = []
    outside: dict[str, list[str]] = {}
    patterns = tuple(keep_fp32)
    for name, model in models.items():
        layers = list(_layers(model))
        for path, layer in layers:
            full = ".".join(part for part in (name if len(models) > 1 else "", path) if part)
            if isinstance(layer, LOOKED_UP):
                continue
            ends = (layer is layers[0][1], layer is layers[-1][1])
            if (reason := _reason(path, layer, ends, patterns)) is None:
                inside.append(full)
            else:
                outside.setdefault(reason, []).append(full)
    return inside, outside


def keep_out(models: Mapping[str, nn.Module], keep_fp32: Iterable[str]) -> None:
    """Makes the layers that stay out do so; what is kept in FP32 is left as it is."""
    patterns = tuple(keep_fp32)
    for model in models.values():
        layers = list(_layers(model))
        for path, layer in (layers[0], layers[-1]) if layers else ():
            if not _kept(path, patterns):
                layer.forward = types.MethodType(_sixteen_bit_forward, layer)  # type: ignore[method-assign]


def sentences(layers: list[str], out: Mapping[str, list[str]]) -> list[str]:
    """The plan in lines, for the start of a run."""
    if not layers:
        head = "fp8: no layer of this network multiplies in FP8, so everything runs as under precision=bf16"
    else:
        head = f"fp8: E4M3 forward and E5M2 gradients in {_some(layers)}; in BF16:"
    return [head, *(f"  {reason}: {_some(paths)}" for reason, paths in out.items())]


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Everything with weights in the order of construction; attention, which is computed as one, as one."""
    within: set[nn.Module] = set()
    for path, module in model.named_modules():
        if isinstance(module, LAYERS) and module not in within:
            within |= set(module.modules())
            yield path, module


def _reason(path: str, layer: nn.Module, ends: tuple[bool, bool], patterns: tuple[str, ...]) -> str | None:
    """Why a layer is not computed in FP8; None if it is."""
    if _kept(path, patterns):
        return "in FP32, by precision.keep_fp32"
    if isinstance(layer, CONVOLUTION):
        return "convolutions, which have no FP8 kernels"
    if isinstance(layer, RECURRENT):
        return "recurrent layers, which are single kernels without FP8"
    if isinstance(layer, nn.Bilinear):
        return "bilinear layers, which have no FP8 kernels"
    if "linear" in patterns:
        return "in FP32, by precision.keep_fp32"
    if any(ends):
        return "first and last layer"
    if isinstance(layer, nn.MultiheadAttention):
        sizes = [layer.embed_dim, layer.kdim, layer.vdim]
    else:
        assert isinstance(layer, nn.Linear)
        sizes = [layer.in_features, layer.out_features]
    return f"sizes that {MULTIPLE} does not divide" if any(size % MULTIPLE for size in sizes) else None


def _kept(path: str, patterns: tuple[str, ...]) -> bool:
    """Whether keep_fp32 names a module or one around it."""
    parts = path.split(".")
    around = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    return any(fnmatch.fnmatchcase(a, pattern) for a in around for pattern in patterns)


def _some(paths: list[str], shown: int = 4) -> str:
    more = f" and {len(paths) - shown} more" if len(paths) > shown else ""
    return f"{', '.join(paths[:shown])}{more}"


def _sixteen_bit_forward(module: nn.Module, *args, **kwargs):
    """The forward of a layer whose products stay in 16 bits under FP8."""
    before, dispatch.state.sixteen = dispatch.state.sixteen, True
    try:
        return type(module).forward(module, *args, **kwargs)
    finally:
        dispatch.state.sixteen = before
