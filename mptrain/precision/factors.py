"""The factor of one layer in layerwise scaling, from moments of gradients and weights; plain numbers only.

An element of a layer's input gradient is a sum of `fan` products of a gradient and a weight. Taking them as
independent, half of them dead because of a ReLU, it is about normal with

    sigma = sqrt(mean g^2 x mean w^2 x fan / 2).

Of a normal variable the share below t in size is erf(t / (sigma sqrt 2)). The smallest factor that leaves at most the
share `target` below FP16's smallest number is therefore smallest / (quantile x sigma), with quantile =
sqrt(2) erfinv(target). The largest that cannot overflow is largest / (fan x max|g| x max|w|). The factor is the
smallest, but at least 1, and never above the largest, rounded down to a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from statistics import NormalDist
from typing import NamedTuple

from mptrain.precision.formats import FLOAT16

SMALLEST = 2.0**-24
LARGEST = FLOAT16.max
FARTHEST = 2.0**60
"""No gradient's scale moves further than this from 1: FP32 has to hold it and its inverse."""


class Moments(NamedTuple):
    """Of a tensor without its scale. rms: root of the mean square of what is not zero; largest: its largest size."""

    rms: float
    largest: float


class Layer(NamedTuple):
    """The decision for one layer: its factor, the smallest that meets the target, the largest that is safe."""

    factor: float
    wanted: float
    allowed: float

    @property
    def fits(self) -> bool:
        """Whether any factor meets the target without overflow; if not, a wider format is the cure (BF16)."""
        return self.wanted <= max(self.allowed, 1.0)


def product_factor(
    gradient: Moments | None,
    weight: Moments | None,
    weight_gradient: Moments | None,
    fan: int,
    scale: float,
    target: float,
    margin: float,
) -> Layer:
    """For a product whose arriving gradient carries `scale`; 1 as long as nothing was seen.

    The weight gradient, which is formed from the same multiplied gradient, has the same say by what it was seen to be.
    """
    if gradient is None or weight is None:
        return Layer(1.0, 1.0, math.inf)
    sigma = gradient.rms * weight.rms * math.sqrt(fan / 2)
    wanted = _wanted(sigma * scale, target)
    allowed = _allowed(fan * gradient.largest * weight.largest * scale)
    if weight_gradient is not None:
        wanted = max(wanted, _wanted(weight_gradient.rms * scale, target))
        allowed = min(allowed, _allowed(weight_gradient.largest * scale))
    return _decided(wanted, min(allowed, _allowed(gradient.largest * scale)), scale, margin)


def cast_factor(gradient: Moments | None, scale: float, target: float, margin: float) -> float:
    """For a gradient that is rounded from FP32 to FP16 as it is."""
    if gradient is None:
        return 1.0
    wanted, allowed = _wanted(gradient.rms * scale, target), _allowed(gradient.largest * scale)
    return _decided(wanted, allowed, scale, margin).factor


def merged_scale(gradient: Moments | None, scales: Collection[float], margin: float) -> float:
    """The common scale of branches that meet: the largest of theirs that is safe, or the smallest."""
    if gradient is None:
        return min(scales)
    safe = [scale for scale in scales if scale * gradient.largest * margin <= LARGEST]
    return max(safe, default=min(scales))


def _wanted(sigma: float, target: float) -> float:
    quantile = NormalDist().inv_cdf((1 + target) / 2)
    return SMALLEST / (quantile * sigma) if sigma > 0 else 1.0


def _allowed(largest: float) -> float:
    return LARGEST / largest if largest > 0 else math.inf


def _decided(wanted: float, allowed: float, scale: float, margin: float) -> Layer:
    allowed /= margin
    factor = 2.0 ** math.floor(math.log2(min(max(wanted, 1.0), allowed)))
    factor = min(max(factor, 1 / (FARTHEST * scale)), FARTHEST / scale)
    return Layer(factor, wanted, allowed)
