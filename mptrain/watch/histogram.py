"""Counts of numbers by exponent: what the report, the alarms and the probe read; needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

LOWEST, HIGHEST = -127, 127
"""Exponents of FP32: [2^e, 2^(e+1)) for each e; the lowest holds everything below 2^-126."""
FLUSHED_BELOW, SUBNORMAL_BELOW, INFINITE_FROM = -25, -14, 16
"""Exponents of FP16: what is below them is rounded to zero; keeps fewer bits; from the last on it is infinite."""


@dataclass(frozen=True)
class Histogram:
    """How many finite numbers lie in each binade, with zeros apart; two of them are merged by adding.

    exponents: {e: count of 2^e <= |x| < 2^(e+1)}, no zero counts. zero: exact zeros of either sign.
    """

    exponents: Mapping[int, int] = field(default_factory=dict)
    zero: int = 0

    @classmethod
    def from_bins(cls, first: int, counts: Iterable[int], zero: int) -> Histogram:
        """From counts of consecutive exponents, as watch.parquet stores them."""
        found = enumerate(counts, start=first)
        return cls({exponent: count for exponent, count in found if count}, zero)

    def bins(self) -> tuple[int, list[int]]:
        """(first exponent, counts of consecutive exponents); (0, []) if there are only zeros."""
        if not self.exponents:
            return 0, []
        first, last = min(self.exponents), max(self.exponents)
        return first, [self.exponents.get(e, 0) for e in range(first, last + 1)]

    def __add__(self, other: Histogram) -> Histogram:
        found = dict(self.exponents)
        for e, count in other.exponents.items():
            found[e] = found.get(e, 0) + count
        return Histogram(found, self.zero + other.zero)

    @property
    def nonzero(self) -> int:
        return sum(self.exponents.values())

    def below(self, exponent: float) -> int:
        """How many nonzero numbers are smaller than 2^exponent."""
        return sum(count for e, count in self.exponents.items() if e < exponent)

    def flushed(self, scale: float = 1.0) -> float:
        """Share of the nonzero numbers that FP16 would round to zero after multiplication by a power of two.

        The value 2^-25 itself, a tie that goes to zero, is taken for one that survives.
        """
        return self.below(FLUSHED_BELOW - math.log2(scale)) / max(1, self.nonzero)

    def overflowed(self, scale: float = 1.0) -> float:
        """Share of the nonzero numbers that FP16 would round to infinity after multiplication by a power of two.

        The last 2^-12 below 2^16, which rounds up to infinity, is taken for finite.
        """
        return 1 - self.below(INFINITE_FROM - math.log2(scale)) / self.nonzero if self.exponents else 0.0

    def subnormal(self, scale: float = 1.0) -> float:
        """Share of the nonzero numbers that FP16 would keep with fewer bits."""
        low, high = (self.below(e - math.log2(scale)) for e in (FLUSHED_BELOW, SUBNORMAL_BELOW))
        return (high - low) / max(1, self.nonzero)

    def exponent_of_share(self, share: float) -> int:
        """The exponent below or in which this share of the nonzero numbers lies; raises ValueError without any."""
        wanted, found = share * self.nonzero, 0
        for e in sorted(self.exponents):
            found += self.exponents[e]
            if found >= wanted:
                return e
        raise ValueError("all values are zero")

    def binades(self, apart: float = 0.001) -> int:
        """How many exponents the nonzero numbers span, without the smallest share `apart` of them; 0 without any."""
        return max(self.exponents) - self.exponent_of_share(apart) + 1 if self.exponents else 0

    def best_scale(self, apart: float = 0.001) -> float:
        """The largest power of two that keeps the largest number a factor of 4 below FP16's limit; 1.0 without any."""
        return 2.0 ** (INFINITE_FROM - 3 - max(self.exponents)) if self.exponents else 1.0
