"""Layerwise adaptive scaling: a factor for every layer's gradient instead of one for all.

One loss scale moves all gradients by the same number of binades. Where the gradients of different layers lie further
apart than FP16 reaches, no single number fits. But every backward function is linear in the gradient that arrives, so
a gradient may carry a scale of its own; two places need care: where gradients of different scales are added, and where
a parameter's gradient leaves the graph (Zhao, Vogel and Ahmed, "Adaptive loss scaling for mixed precision training").

Here the scale is a number per node of the backward graph. Before each backward pass the graph is walked from the loss
down. A product multiplies the gradient it gets by the factor of its layer (`factors.py`), so that its rounded results
carry that factor as well; a cast from FP32 to FP16 does the same; where branches meet they are brought to one scale;
and everything that reaches a parameter is brought back to the scaler's own `value`. All factors are powers of two, so
in FP32 they change no bit. It follows the graph and not the list of modules, so residual, shared, nested, recurrent
and out-of-order networks need no special treatment.

What differs from the published algorithm: the weight gradient is formed from the multiplied gradient too and is brought
back in FP32, so that it is protected as well; a step that overflows is skipped, and from then on the factors keep twice
the distance from the largest number, until as many good steps as a dynamic scale needs to grow.

What it cannot do: lift a gradient that a 16-bit operation between two products has flushed; help a tensor that spans
more binades than FP16 has (`Layer.fits` tells); and, where the parameters themselves are FP16, keep their stored
gradients from being rounded at the scale `value`.
"""

from __future__ import annotations

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mptrain.precision.factors import Layer, Moments, cast_factor, merged_scale, product_factor
from mptrain.precision.graph import REARRANGING, downwards, leaf
from mptrain.precision.scaling import DynamicScaler, DynamicSettings

PRODUCTS = (
    "Convolution", "Addmm", "Mm", "Linear", "MkldnnRnnLayer", "CudnnRnn", "Bmm", "Baddbmm", "Addbmm", "_Dot",
    "_Correlate", "_TransposeBackward",
)  # fmt: skip
"""How the backward nodes of dot products are called, up to a suffix."""
OPAQUE = ("CheckpointFunction",)
"""Nodes that run a backward pass of their own, into which no factor can be carried."""
MARGIN_FIRST, MARGIN_LAST = 2.0, 2.0**16


class LayerwiseScaler(DynamicScaler):
    """A dynamic loss scale with a factor per layer on top; see the head of this file.

        scaler = LayerwiseScaler({"model": model})
        scaler.scale(loss).backward()       # one loss at a time; then as with every scaler

    models: the networks whose parameters name the layers. target: the share of a layer's gradients that may be
    flushed. every: iterations between two looks at the gradients, which cost one wait for the device.
    """

    label = "layerwise"

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        settings: DynamicSettings | None = None,
        target: float = 1e-3,
        every: int = 10,
    ):
        super().__init__(settings)
        self.target, self.every = target, every
        self.margin = MARGIN_FIRST
        self.iteration = 0
        self.looking = True
        self.moments: dict[str, Moments] = {}
        self.layers: dict[str, Layer] = {}
        """what was decided for the last backward pass"""
        several = len(models) > 1
        self._names: dict[int, str] = {}
        self._fans: dict[str, int] = {}
        for model_name, model in models.items():
            for path, module in model.named_modules():
                for name, p in module.named_parameters(recurse=False):
                    full = ".".join(part for part in (model_name if several else "", path, name) if part)
                    key = self._names.setdefault(id(p), full)
                    self._fans[key] = _fan(module, p)
        self._parameters = [p for model in models.values() for p in model.parameters()]  # ids stay theirs
        self._seen: list[tuple[str, Tensor]] = []
        self._handles: list[Any] = []
        self._pending = False

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times `value`, with its backward graph prepared; RuntimeError if the loss before was not used."""
        if self._pending:
            raise RuntimeError("scale=layerwise takes one loss at a time: call backward() before scaling the next one")
        for handle in self._handles:  # of a graph that is kept for another backward pass
            handle.remove()
        scaled = super().scale(loss)
        if scaled.grad_fn is not None:
            self._prepare(scaled.grad_fn)
        return scaled

    def aside(self) -> LayerwiseScaler:
        other = copy.copy(self)
        other._seen, other._handles, other.looking, other._pending = [], [], False, False
        return other

    def update(self) -> bool:
        self._pending = False
        skipped = super().update()
        if self._seen:
            self._read()
        self.iteration += 1
        self.looking = skipped or self.iteration % self.every == 0
        return skipped

    def _move(self, skipped: bool) -> None:
        super()._move(skipped)
        if skipped:
            self.margin = min(2 * self.margin, MARGIN_LAST)
        elif self.good == 0:
            self.margin = max(self.margin / 2, MARGIN_FIRST)

    def state_dict(self) -> dict[str, Any]:
        moments = {key: list(value) for key, value in self.moments.items()}
        return super().state_dict() | {
            "target": self.target,
            "every": self.every,
            "margin": self.margin,
            "iteration": self.iteration,
            "looking": self.looking,
            "moments": moments,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.target, self.every, self.margin = state["target"], state["every"], state["margin"]
        self.iteration, self.looking = state["iteration"], state["looking"]
        self.moments = {key: Moments(*value) for key, value in state["moments"].items()}

    # The graph.

    def _prepare(self, root: Any) -> None:
        """Decides the scale at every node and puts the hooks that bring it about."""
        nodes = downwards(root)
        arriving: dict[Any, list[float]] = defaultdict(list, {root: [self.value]})
        after_product: dict[Any, list[bool]] = defaultdict(list)
        at: dict[Any, float] = {}
        leaving: dict[Any, float] = {}
        self._handles, self.layers = [], {}
        place, numbers = "loss", Counter[tuple[str, str]]()
        for node in nodes:
            name = node.name()
            if hasattr(node, "variable") or name.startswith(OPAQUE):
                at[node] = leaving[node] = self.value
                for child, _ in node.next_functions:
                    arriving[child].append(self.value)
                    after_product[child].append(False)
                continue
            scales = set(arriving[node])
            scale, key = scales.pop() if len(scales) == 1 else 0.0, ""
            if not scale:
                key = f"{place} sum {numbers[place, 'sum']}"
                numbers[place, "sum"] += 1
                scale = merged_scale(self.moments.get(key), scales, self.margin)
                self._look(node, key, scale)
            factor, is_product = 1.0, name.startswith(PRODUCTS)
            if is_product and (weight := self._weight(node)) is not None:
                place = key = self._names[id(weight)]
                factor = self._product(node, key, weight, scale)
            elif _casts_down(node) and not (after_product[node] and all(after_product[node])):
                key = f"{place} cast {numbers[place, 'cast']}"
                numbers[place, "cast"] += 1
                factor = cast_factor(self.moments.get(key), scale, self.target, self.margin)
                self._look(node, key, scale)
            at[node], leaving[node] = scale, scale * factor
            if factor != 1:
                self._handles.append(node.register_prehook(_multiplying(factor)))
            fresh = is_product or (
                name.startswith(REARRANGING) and bool(after_product[node]) and all(after_product[node])
            )
            for child, _ in node.next_functions:
                if child is not None:
                    arriving[child].append(leaving[node])
                    after_product[child].append(fresh)
        for node in nodes:
            factors = [1.0 if child is None else at[child] / leaving[node] for child, _ in node.next_functions]
            if any(f != 1 for f in factors):
                self._handles.append(node.register_hook(_bringing(factors)))
        self._pending = True
        self._handles.append(root.register_prehook(self._started))

    def _started(self, gradients: Any) -> None:
        self._pending = False

    def _product(self, node: Any, key: str, weight: Tensor, scale: float) -> float:
        fan = self._fans[key]
        layer = product_factor(
            self.moments.get(key),
            self.moments.get(f"{key} values"),
            self.moments.get(f"{key} gradient"),
            fan,
            scale,
            self.target,
            self.margin,
        )
        self.layers.setdefault(key, layer)
        self._look(node, key, scale)
        if self.looking:
            self._seen.append((f"{key} values", _moments(weight.detach(), 1.0)))
            carried = scale * layer.factor

            def look(inputs: Any, outputs: Any) -> None:
                for gradient, (child, _) in zip(inputs, node_edges, strict=True):
                    if gradient is not None and leaf(child) is weight:
                        self._seen.append((f"{key} gradient", _moments(gradient, carried)))

            node_edges = node.next_functions
            self._handles.append(node.register_hook(look))
        return layer.factor

    def _look(self, node: Any, key: str, scale: float) -> None:
        """Notes the moments of the gradient that arrives at a node, without its scale."""
        if self.looking:

            def look(gradients: Any) -> None:
                for g in gradients:
                    if g is not None:
                        self._seen.append((key, _moments(g, scale)))

            self._handles.append(node.register_prehook(look))

    def _weight(self, node: Any) -> Tensor | None:
        for child, _ in node.next_functions:
            found = leaf(child)
            if found is not None and found.dim() >= 2 and id(found) in self._names:
                return found
        return None

    def _read(self) -> None:
        """Takes over what was seen; a place seen several times counts with its largest moments."""
        rows = torch.stack([row.to(self._seen[0][1].device) for _, row in self._seen]).tolist()
        fresh: dict[str, Moments] = {}
        for (key, _), (rms, largest) in zip(self._seen, rows, strict=True):
            if math.isfinite(rms) and math.isfinite(largest) and largest > 0:
                before = fresh.get(key, Moments(0.0, 0.0))
                fresh[key] = Moments(max(rms, before.rms), max(largest, before.largest))
        self._seen.clear()
        self.moments |= fresh


def _casts_down(node: Any) -> bool:
    """Whether FP32 gradients arrive here and FP16 gradients leave."""
    if len(node.next_functions) != 1 or not node.name().startswith(("ToCopy", "_Image")):
        return False
    child, number = node.next_functions[0]
    if child is None:
        return False
    return node._input_metadata[0].dtype == torch.float32 and child._input_metadata[number].dtype == torch.float16


def _multiplying(factor: float) -> Callable[[Any], Any]:
    return lambda gradients: tuple(None if g is None else g * factor for g in gradients)


def _bringing(factors: Iterable[float]) -> Callable[[Any, Any], Any]:
    factors = tuple(factors)
    return lambda inputs, outputs: tuple(
        g if g is None or f == 1 else g * f for g, f in zip(inputs, factors, strict=True)
    )


@torch.no_grad()
def _moments(t: Tensor, scale: float) -> Tensor:
    """(root of the mean square, largest size) of a tensor that carries a scale, without it, left on the device.

    Means are taken in units of the largest, so that their squares neither vanish nor overflow; dead values (zeros)
    have no say in how wide the others are spread.
    """
    values = (t._values() if t.is_sparse else t).detach().float()
    if not values.numel():
        return torch.zeros(2, device=values.device)
    largest = values.abs().amax()
    unit = torch.where(largest > 0, largest, 1.0)
    alive = torch.count_nonzero(values).clamp(min=1)
    root = torch.linalg.vector_norm(values / unit) / alive.sqrt() * (unit / scale)
    return torch.stack([root, largest / scale])


def _fan(module: nn.Module, weight: Tensor) -> int:
    """How many products are summed for one element of the gradient of a layer's input."""
    if weight.dim() < 2:
        return 1
    across = weight.shape[0] if getattr(module, "transposed", False) else weight.shape[1]
    return max(1, weight.numel() // max(1, across))
