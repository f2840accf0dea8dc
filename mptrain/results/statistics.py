"""The statistics of the table: spread over seeds, difference paired by seed, and what may be claimed from it.

"No significant difference" is never a claim: with few seeds nothing is significant, however bad the precision. Equality
has to be shown like anything else, so the verdict comes from two one-sided tests (TOST; Schuirmann 1987) against a
margin that the recipe's task states beforehand: both must reject, at 5 %, that the difference lies beyond the margin. A
difference is claimed if its 95 % confidence interval excludes zero. What is neither stays undecided.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEVEL = 0.05
ROUNDING = 1e-12  # relative; the invariants hold exactly for real numbers, but for floats only up to rounding


class InconsistentStatistics(RuntimeError):
    """Internal error: a statistic broke a rule that holds for every data set, so the table cannot be trusted."""


@dataclass(frozen=True)
class Spread:
    """Location and spread of n values; `sd` is the sample standard deviation, None for a single value."""

    n: int
    mean: float
    sd: float | None
    minimum: float
    median: float
    maximum: float

    def __post_init__(self) -> None:
        slack = ROUNDING * max(abs(self.minimum), abs(self.maximum))
        if not self.minimum - slack <= self.mean <= self.maximum + slack:
            raise InconsistentStatistics(f"min <= mean <= max fails: {self.minimum!r}, {self.mean!r}, {self.maximum!r}")
        if not self.minimum - slack <= self.median <= self.maximum + slack:
            raise InconsistentStatistics(
                f"min <= median <= max fails: {self.minimum!r}, {self.median!r}, {self.maximum!r}"
            )
        if not abs(self.mean - self.median) <= (self.sd or 0.0) + slack:
            raise InconsistentStatistics(f"|mean - median| <= sd fails: {self.mean!r}, {self.median!r}, {self.sd!r}")


def spread(values: Sequence[float]) -> Spread:
    """Spread of at least one finite value; mean and sd are exact up to one rounding."""
    sd = statistics.stdev(values) if len(values) > 1 else None
    return Spread(len(values), statistics.mean(values), sd, min(values), statistics.median(values), max(values))


@dataclass(frozen=True)
class Difference:
    """Mean over seeds of (value - baseline value), 95 % interval and TOST p-value; None where one pair cannot tell."""

    pairs: int
    mean: float
    low: float | None
    high: float | None
    equivalence_p: float | None

    def __post_init__(self) -> None:
        if self.low is not None and self.high is not None and not self.low <= self.mean <= self.high:
            raise InconsistentStatistics(f"low <= difference <= high fails: {self.low!r}, {self.mean!r}, {self.high!r}")


def paired_difference(values: Mapping[int, float], baseline: Mapping[int, float], margin: float) -> Difference | None:
    """Compare two sets of values, keyed by seed, over the seeds that both have; None if they share none."""
    deltas = [values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())]
    if not deltas:
        return None
    mean = statistics.mean(deltas)
    if len(deltas) == 1:
        return Difference(1, mean, None, None, None)
    error = statistics.stdev(deltas) / math.sqrt(len(deltas))
    if error == 0:  # every seed moved by the same amount: the t statistic is infinite, or 0/0 exactly on the margin
        return Difference(len(deltas), mean, mean, mean, 0.0 if abs(mean) <= margin else 1.0)
    from scipy.special import stdtr, stdtrit  # type: ignore[import-untyped]  # Student's t; scipy.stats would take a second to import

    freedom = len(deltas) - 1
    half = float(stdtrit(freedom, 1 - LEVEL / 2)) * error
    beyond = max(float(stdtr(freedom, (mean - margin) / error)), float(stdtr(freedom, -(mean + margin) / error)))
    return Difference(len(deltas), mean, mean - half, mean + half, beyond)


def verdict(difference: Difference | None, margin: float, higher_is_better: bool, decimals: int) -> str:
    """What the paired difference shows, in words; the amount is rounded to `decimals`."""
    if difference is None:
        return "undecided (no shared seed)"
    if difference.low is None or difference.high is None or difference.equivalence_p is None:
        return "undecided (n=1 seed)"
    if difference.equivalence_p < LEVEL:
        return f"equal (within {margin:g})"
    if difference.low <= 0 <= difference.high:
        return "undecided"
    better = (difference.mean > 0) == higher_is_better
    amount = f"{abs(difference.mean):.{decimals}f}"
    if float(amount) == 0:
        amount = f"{abs(difference.mean):.2g}"
    return f"{'better' if better else 'worse'} by {amount}"


def decimals(margin: float | None) -> int:
    """Digits after the point that show the margin with two more: 4 for 0.01, 2 for 1."""
    if not margin:
        return 4
    return min(8, max(0, 2 - int(f"{margin:e}".split("e")[1])))


@dataclass(frozen=True)
class Estimate:
    """The mean of values that vary with the seed, and its intervals of 95 and 90 %; None where one value cannot tell.

    A one-sided test at 5 % rejects a bound exactly when the 90 % interval does not reach it, so TOST is to find this
    interval between both.
    """

    n: int
    mean: float
    wide: tuple[float, float] | None  # 95 %
    narrow: tuple[float, float] | None  # 90 %


def estimate(values: Sequence[float], exact: bool = False) -> Estimate:
    """Of at least one finite value; `exact` values do not vary, so that one tells all."""
    mean = statistics.mean(values)
    if len(values) == 1:
        only = (mean, mean) if exact else None
        return Estimate(1, mean, only, only)
    from scipy.special import stdtrit

    error = statistics.stdev(values) / math.sqrt(len(values))
    wide, narrow = (float(stdtrit(len(values) - 1, 1 - tail)) * error for tail in (LEVEL / 2, LEVEL))
    return Estimate(len(values), mean, (mean - wide, mean + wide), (mean - narrow, mean + narrow))


def between_means(first: Spread, second: Spread) -> tuple[float, float] | None:
    """95 % interval of the second mean minus the first, of independent seeds (Welch); None with one seed on a side."""
    if first.sd is None or second.sd is None:
        return None
    errors = [spread.sd**2 / spread.n for spread in (first, second) if spread.sd is not None]
    error, difference = sum(errors), second.mean - first.mean
    if error == 0:
        return difference, difference
    from scipy.special import stdtrit

    freedom = error**2 / sum(e**2 / (s.n - 1) for e, s in zip(errors, (first, second), strict=True))
    half = float(stdtrit(freedom, 1 - LEVEL / 2)) * math.sqrt(error)
    return difference - half, difference + half
