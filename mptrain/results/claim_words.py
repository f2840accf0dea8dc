"""The words of a verdict: the numbers it follows from, what is missing, and the test as a sentence."""

import statistics

from mptrain.paper import Claim
from mptrain.results.cells import significant
from mptrain.results.named import Named
from mptrain.results.quantities import EXACT, quantity
from mptrain.results.runs import Run
from mptrain.results.statistics import Estimate, decimals


def level(claim: Claim) -> int:
    """Percent of the interval that decides: 90 where it has to lie between bounds that were stated as equal."""
    between = claim.above is not None and claim.below is not None
    return 90 if claim.test in ("equal", "not_worse") or between else 95


def numbers(claim: Claim, present: dict[str, Named], told: Estimate | None, first: Run) -> list[str]:
    """What a verdict follows from: each side with its spread, and the number with its interval."""
    digits = decimals(first.margin) if claim.of == "metric" else None
    parts = []
    if len(present) == 1:
        (named,) = present.values()
        parts += [_side(name, claim, named, digits) for name in dict.fromkeys(claim.runs)]
    if told is None or claim.test == "diverges":
        return parts
    over = ("seed" if claim.test == "share" else "pair") + ("s" if told.n > 1 else "")
    pooled = f" of {len(present)} recipes ({', '.join(present)})" if len(present) > 1 else ""
    name = "mean" if claim.test == "share" else what(claim)
    digits = None if claim.test == "ratio" else digits
    text = f"{name} over {told.n} {over}{pooled}: {_digits(told.mean, digits)}"
    interval = told.narrow if level(claim) == 90 else told.wide
    if interval is not None and claim.of not in EXACT:
        text += f", {level(claim)} % interval {_digits(interval[0], digits)} to {_digits(interval[1], digits)}"
    return [*parts, text]


def what(claim: Claim) -> str:
    """What the number of a claim is."""
    return {"ratio": "ratio", "share": "share", "equal": "difference"}.get(claim.test, "loss")


def _side(name: str, claim: Claim, named: Named, digits: int | None) -> str:
    runs = list(named.runs[name].values())
    diverged = sum(run.status == "diverged" for run in runs)
    values = [value for run in runs if (value := quantity(run, claim.of)) is not None]
    spread = f" ± {_digits(statistics.stdev(values), digits)}" if len(values) > 1 and claim.of not in EXACT else ""
    unit = " MiB" if claim.of in EXACT else ""
    mean = f"{_digits(statistics.mean(values), digits)}{unit}{spread} (n={len(values)})" if values else ""
    return f"{name} " + ", ".join(filter(None, [mean, f"{diverged}/{len(runs)} diverged" if diverged else ""]))


def _digits(value: float, digits: int | None) -> str:
    if digits is not None:
        return f"{value:.{digits}f}"
    return f"-{significant(-value)}" if value < 0 else "0" if value == 0 else significant(value)


def missing(claim: Claim, members: dict[str, Named]) -> str:
    """Why a claim could not be tested."""
    absent = [f"{name} of {recipe}" for recipe, named in members.items() for name in claim.runs if not named.runs[name]]
    text = f"no result of {', '.join(dict.fromkeys(absent))}"
    if apart := sum(named.apart.get(name, 0) for named in members.values() for name in dict.fromkeys(claim.runs)):
        text += f" that may be compared ({apart} differ{'s' if apart == 1 else ''} in settings, length or device)"
    return "; ".join([text, *notes(claim, members)])


def notes(claim: Claim, members: dict[str, Named]) -> list[str]:
    """What was left out of a verdict."""
    found = []
    if claim.recipes:
        absent = [name for name, named in members.items() if not all(named.runs[run] for run in claim.runs)]
        found += [f"not run: {', '.join(absent)}"] if 0 < len(absent) < len(members) else []
    lost = sum(named.without_result.get(name, 0) for named in members.values() for name in dict.fromkeys(claim.runs))
    return found + ([f"{lost} folder{'s' if lost > 1 else ''} without a result"] if lost else [])


def _by(claim: Claim) -> str:
    if claim.within is None:
        return "the task's margin"
    if claim.within == "spread":
        return f"one standard deviation over the seeds of {claim.against}"
    return f"{claim.within:g}"


def in_words(claim: Claim) -> str:
    """The test as a sentence."""
    of = "" if claim.of == "metric" else f" {claim.of}"
    by = _by(claim)
    bounds = [f"{word} {x:g}" for word, x in (("above", claim.above), ("below", claim.below)) if x is not None]
    return {
        "equal": f"{claim.run} equals {claim.against} in{of or ' the metric'} within {by} (TOST, paired by seed)",
        "not_worse": f"{claim.run} is worse than {claim.against} by less than {by} (one-sided, paired by seed)",
        "worse": f"{claim.run} is worse than {claim.against} by more than {claim.by:g} (95 % interval, paired by seed)",
        "diverges": f"{claim.run} diverges in every seed, {claim.against} in none",
        "share": f"{claim.of} of {claim.run} is {' and '.join(bounds)} (over seeds)",
        "ratio": f"{claim.of} of {claim.run} over that of {claim.against} is {' and '.join(bounds)} (paired by seed)",
    }[claim.test]
