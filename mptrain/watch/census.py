"""A census of gradients by exponent: what every loss scale would flush or overflow, before any is tried.

Taken in FP32, so that a zero is a true zero and every other number is seen (Mixed Precision Training, figures 2b, 3).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mptrain.watch.histogram import Histogram
from mptrain.watch.modules import named, tensors
from mptrain.watch.statistics import describe

SCALES = tuple(2.0**k for k in range(25))
CUSTOMARY = 2.0**16  # where dynamic scaling starts
LOST = 2048.0
"""A weight this many times its update or more keeps its value in FP16 (figure 2b)."""


class Census:
    """Histograms per layer and kind ("activation gradient", "weight gradient"), added up over steps.

    largest: of each layer, the largest output of the forward pass. outputs: of each output of a whole network, the
    largest size of the gradient that the loss gives to one of its numbers. lost: weights that are over 2048 times
    their update, and all of them; without those that have no gradient, and zeros.
    """

    def __init__(self) -> None:
        self.histograms: dict[tuple[str, str], Histogram] = defaultdict(Histogram)
        self.largest: dict[str, float] = defaultdict(float)
        self.outputs: dict[str, float] = defaultdict(float)
        self.lost = [0, 0]

    def whole(self, kind: str) -> Histogram:
        """All layers as one."""
        return sum((h for (_, k), h in self.histograms.items() if k == kind), Histogram())

    def layers(self, kind: str) -> dict[str, Histogram]:
        return {layer: h for (layer, k), h in self.histograms.items() if k == kind}

    @contextmanager
    def taking(self, models: Mapping[str, nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
        """Everything that happens inside is counted."""
        handles: list[Any] = []
        names: dict[Tensor, str] = {}
        several = len(models) > 1
        for path, module in named(models):
            if not any(True for _ in module.children()):
                handles.append(module.register_forward_hook(self._layer(path or next(iter(models)))))
        for prefix, model in models.items():
            handles.append(model.register_forward_hook(self._outputs(prefix)))
            for name, p in model.named_parameters():
                names[p] = f"{prefix}.{name}" if several else name
        for optimizer in optimizers:
            handles += self._updates(optimizer, names)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _layer(self, path: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            for t in tensors(output):
                seen = describe(t)
                self.largest[path] = max(self.largest[path], seen.max or 0.0, -(seen.min or 0.0))
                if t.requires_grad:
                    t.register_hook(lambda g: self._add(path, "activation gradient", g))

        return hook

    def _outputs(self, prefix: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            for number, t in enumerate(tensors(output)):
                if t.requires_grad and t.numel() > 1:
                    key = f"{prefix} output {number + 1}"
                    t.register_hook(lambda g, key=key: self._note_output(key, g))

        return hook

    def _note_output(self, key: str, gradient: Tensor) -> None:
        self.outputs[key] = max(self.outputs[key], float(gradient.abs().max()))

    def _add(self, layer: str, kind: str, t: Tensor) -> None:
        self.histograms[layer, kind] += describe(t).histogram

    def _updates(self, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> list[Any]:
        before: dict[Tensor, Tensor] = {}

        def look(*_: Any) -> None:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
                        before[p] = torch.where(gradient != 0, p.detach(), 0.0)
                        self._add(names[p], "weight gradient", p.grad)

        def compare(*_: Any) -> None:
            for p, old in before.items():
                self.lost[0] += int((old.abs() > LOST * (p.detach() - old).abs()).sum())
                self.lost[1] += int(torch.count_nonzero(old))
            before.clear()

        return [optimizer.register_step_pre_hook(look), optimizer.register_step_post_hook(compare)]


class Advice(NamedTuple):
    precision: str
    scale: str
    reason: str


def recommend(census: Census) -> Advice:
    """A precision and scale, and why: BF16 where no scale helps, no scale where none is needed.

    A good scale flushes under 1 % of all gradients and 5 % of every layer's, and keeps the largest a factor of 4 from
    overflow. Gradients move as training goes on, so that of the good ones the middle is taken, at most 2^16.
    """
    if (peak := max(census.largest.values(), default=0.0)) > 65504 / 4:
        layer = max(census.largest, key=census.largest.__getitem__)
        return Advice(
            "bf16", "none", f"the output of {layer} reaches {peak:.3g}, near FP16's 65,504; a scale cannot help"
        )
    layers = census.layers("activation gradient") | {
        f"{name} (weights)": h for name, h in census.layers("weight gradient").items()
    }
    whole = sum(layers.values(), Histogram())
    safe = [s for s in SCALES if not any(h.overflowed(4 * s) for h in layers.values())]

    def flushed(scale: float) -> tuple[float, float, str]:
        worst = max(layers, key=lambda name: layers[name].flushed(scale), default="")
        return whole.flushed(scale), layers[worst].flushed(scale) if worst else 0.0, worst

    good = [scale for scale in safe if flushed(scale)[0] < 0.01 and flushed(scale)[1] < 0.05]
    _, worst, name = flushed(1)
    where = f" ({100 * worst:.1f} % in {name})" if worst > 0 else ""
    unscaled = f"{100 * whole.flushed(1):.2f} % of the nonzero gradients{where}"
    if good and good[0] == 1:
        kept = f"without a scale {unscaled} are flushed and none overflows"
        return Advice("fp16", "none", f"{kept}; scales up to {good[-1]:,.0f} do as well")
    if good:
        scale = max(good[0], min(good[len(good) // 2], CUSTOMARY))
        reason = (
            f"without a scale {unscaled} would be flushed; every scale from {good[0]:,.0f} to {good[-1]:,.0f} keeps "
            f"that under 1 % (5 % in every layer) and the largest a factor of 4 from overflow, and {scale:,.0f} leaves "
            "room on both sides"
        )
        return Advice("fp16", f"{scale:.0f}", reason)
    best = safe[-1] if safe else 1.0
    overall, worst, name = flushed(best)
    wide = [layer for layer, h in layers.items() if h.binades() > 40]
    if wide:
        return Advice(
            "bf16", "none", f"{wide[0]} alone spans {layers[wide[0]].binades()} binades, more than FP16 has (40)"
        )
    return Advice(
        "fp16",
        "layerwise",
        f"the largest safe scale for all layers, {best:g}, still flushes {100 * overall:.1f} % over all and "
        f"{100 * worst:.1f} % in {name}, while each layer alone fits; bf16 is the simpler cure",
    )


def rows(census: Census) -> Iterator[dict[str, Any]]:
    """One row per layer and kind, and one over all of each kind: shares and counts by exponent."""
    for kind in ("activation gradient", "weight gradient"):
        for layer, h in {"(all)": census.whole(kind), **census.layers(kind)}.items():
            total = max(1, h.nonzero + h.zero)
            yield {
                "layer": layer,
                "kind": kind,
                "values": h.nonzero + h.zero,
                "zero": h.zero / total,
                "flushed": {f"2^{int(math.log2(s))}": h.flushed(s) for s in SCALES},
                "overflowed": {f"2^{int(math.log2(s))}": h.overflowed(s) for s in SCALES},
                "exponents": {str(e): count for e, count in sorted(h.exponents.items())},
            }
