"""Verdicts on the recipes' claims, from records and recipes alone.

Each test says in which region a number has to lie for the claim to be true; the number is estimated from the seeds.
A claim *shows* if the interval of the number lies inside the region, does *not* show at this size if the 95 % interval
lies outside of it, and is *undecided* in between or with too few seeds. Inside is asked of the 90 % interval where
equality is claimed (two one-sided tests at 5 %; Schuirmann 1987), of the 95 % interval elsewhere. A loss that is shown
to be smaller than the margin of the task (one-sided at 5 %, as the table calls it equal) does not show, even if it may
not be zero.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mptrain import files
from mptrain.paper import Claim, Paper, paper_of
from mptrain.results.claim_words import in_words, level, missing, notes, numbers, what
from mptrain.results.named import Named, Records, named_runs
from mptrain.results.quantities import EXACT, quantity
from mptrain.results.runs import Excluded, Run, find_runs
from mptrain.results.statistics import Estimate, estimate

SHARES = ("counts.", "watch.", "skipped", "alarms.")  # quantities between 0 and 1
SHOWS, UNDECIDED, NOT_RUN = "shows", "undecided", "not run"
NOT_AT_THIS_SIZE = "not at this size"  # of a small recipe
DOES_NOT_SHOW = "does not show"  # of a recipe at the paper's size


@dataclass(frozen=True)
class Verdict:
    """What became of one claim; flat, so that it is a line of a csv."""

    recipe: str
    where: str  # the paper's table or figure
    claim: str
    verdict: str  # shows | not at this size | does not show | undecided | not run
    numbers: str  # what it follows from, in a sentence
    test: str  # in words
    run: str  # the names in the recipe
    against: str
    quantity: str
    number: float | None  # what is tested: a difference, a loss, a share or a ratio
    low: float | None  # the interval that has to lie in the region
    high: float | None
    level: int  # of this interval, in percent
    region_low: float | None  # where the number has to lie; None: no bound
    region_high: float | None
    seeds: int  # values or pairs that the number is the mean of
    diverged: int  # seeds of `run` that diverged
    steps: int | None
    device: str
    folders: str  # separated by " | "
    headline: str  # what the paper says, in short
    what: str  # what the number is: difference | loss | ratio | share
    metric: str  # of the recipe, where the quantity is its metric
    mean: float | None  # of the quantity over the seeds that both sides have; None of several recipes
    mean_against: float | None
    made: int  # seeds of `run` that have a result, diverged ones included


def verdicts(folders: Iterable[Path | str]) -> list[Verdict]:
    """One verdict for every claim of every recipe, by recipe; UserError if a folder cannot be read."""
    return verdicts_of(*find_runs([Path(folder) for folder in folders]))


def verdicts_of(runs: list[Run], excluded: list[Excluded], recipes: Iterable[str] | None = None) -> list[Verdict]:
    """The same from runs that have been read, of all recipes or some."""
    found = Records(runs, excluded)
    chosen = list(recipes) if recipes is not None else files.names("recipe")
    return [_verdict(recipe, claim, found) for recipe in chosen for claim in paper_of(recipe).claims]


def _verdict(recipe: str, claim: Claim, found: Records) -> Verdict:
    members = {name: _members(name, claim, found) for name in [recipe, *claim.recipes]}
    present = {name: named for name, named in members.items() if all(named.runs[run] for run in claim.runs)}
    paper = paper_of(recipe)
    if not present:
        region = _region(claim, _margin(claim, members[recipe], None))
        return _line(recipe, paper, claim, NOT_RUN, missing(claim, members), None, region, members)
    values = [value for named in present.values() for value in _values(claim, named)]
    first = next(iter(present.values())).all[0]
    region = _region(claim, _margin(claim, next(iter(present.values())), first))
    told = estimate(values, exact=claim.of in EXACT) if values else None
    if claim.test == "ratio" and told is not None:
        told = _exponential(told)
    if claim.test == "share" and claim.of.startswith(SHARES) and told is not None:
        told = _within_one(told)
    verdict = _decided(claim, present, told, region, first.margin)
    if verdict == SHOWS and len(present) < len(members):
        verdict = UNDECIDED  # of six networks that were claimed to be equal, some were not run
    if verdict == NOT_AT_THIS_SIZE and recipe.endswith("_paper"):
        verdict = DOES_NOT_SHOW
    text = "; ".join([*numbers(claim, present, told, first), *notes(claim, members)])
    return _line(recipe, paper, claim, verdict, text, told, region, present)


def _members(recipe: str, claim: Claim, found: Records) -> Named:
    known = paper_of(recipe).runs
    names = [name for name in claim.runs if name in known]
    named = named_runs(recipe, known, names, found)
    return Named({name: named.runs.get(name, {}) for name in claim.runs}, named.apart, named.without_result)


# The number, and the region it has to lie in.


def _values(claim: Claim, named: Named) -> list[float]:
    """One number a seed, or a pair of seeds: a difference, a loss, a share or the logarithm of a ratio."""
    own = {seed: quantity(run, claim.of) for seed, run in named.runs[claim.run].items()}
    if claim.test == "share":
        return [value for _, value in sorted(own.items()) if value is not None]
    pairs = []
    for seed, run in sorted(named.runs.get(claim.against, {}).items()):
        ours, theirs = own.get(seed), quantity(run, claim.of)
        if ours is None or theirs is None:
            continue
        if claim.test == "ratio":
            pairs += [math.log(ours / theirs)] if ours > 0 and theirs > 0 else []
        else:
            pairs.append((ours - theirs) * (_sign(claim, run) if claim.test in ("worse", "not_worse") else 1))
    return pairs


def _sign(claim: Claim, run: Run) -> int:
    """Makes a loss of a difference: positive is worse."""
    return -1 if claim.of == "metric" and run.higher_is_better else 1


def _margin(claim: Claim, named: Named, run: Run | None) -> float | None:
    """How far apart two runs may be that are called equal; None if that cannot be told."""
    if claim.within == "spread":
        values = [quantity(each, claim.of) for each in named.runs.get(claim.against, {}).values()]
        known = [value for value in values if value is not None]
        return statistics.stdev(known) if len(known) > 1 else None
    return claim.within if claim.within is not None else run.margin if run else None


def _region(claim: Claim, margin: float | None) -> tuple[float | None, float | None]:
    return {
        "equal": (None if margin is None else -margin, margin),
        "not_worse": (None, margin),
        "worse": (claim.by, None),
        "diverges": (None, None),
    }.get(claim.test, (claim.above, claim.below))


def _exponential(told: Estimate) -> Estimate:
    """From the mean of logarithms to the geometric mean of ratios."""
    wide, narrow = (
        None if each is None else (math.exp(each[0]), math.exp(each[1])) for each in (told.wide, told.narrow)
    )
    return Estimate(told.n, math.exp(told.mean), wide, narrow)


def _within_one(told: Estimate) -> Estimate:
    """Intervals of a share, cut at none and all."""
    wide, narrow = (
        None if each is None else (max(0.0, each[0]), min(1.0, each[1])) for each in (told.wide, told.narrow)
    )
    return Estimate(told.n, told.mean, wide, narrow)


# The verdict.


def _decided(
    claim: Claim,
    present: dict[str, Named],
    told: Estimate | None,
    region: tuple[float | None, float | None],
    margin: float,
) -> str:
    own = [run for named in present.values() for run in named.runs[claim.run].values()]
    other = [run for named in present.values() for run in named.runs.get(claim.against, {}).values()]
    diverged = sum(run.status == "diverged" for run in own)
    if claim.test != "share" and any(run.status == "diverged" for run in other):
        return UNDECIDED
    if claim.test == "diverges" or (claim.test == "worse" and diverged == len(own)):
        if not diverged:
            return NOT_AT_THIS_SIZE
        return SHOWS if diverged == len(own) > 1 else UNDECIDED
    if diverged and claim.test in ("equal", "not_worse"):
        return NOT_AT_THIS_SIZE
    unbounded = claim.test != "diverges" and region == (None, None)
    if told is None or told.wide is None or told.narrow is None or unbounded:
        return UNDECIDED
    low, high = (-math.inf if region[0] is None else region[0]), (math.inf if region[1] is None else region[1])
    inner = told.narrow if level(claim) == 90 else told.wide
    if low < inner[0] and inner[1] < high:
        return SHOWS
    if claim.test == "worse" and claim.of == "metric" and told.narrow[1] < margin:
        return NOT_AT_THIS_SIZE
    return NOT_AT_THIS_SIZE if told.wide[1] <= low or told.wide[0] >= high else UNDECIDED


def _line(
    recipe: str,
    paper: Paper,
    claim: Claim,
    verdict: str,
    numbers: str,
    told: Estimate | None,
    region: tuple[float | None, float | None],
    members: dict[str, Named],
) -> Verdict:
    runs = [run for named in members.values() for run in named.all]
    interval = None if told is None else told.narrow if level(claim) == 90 else told.wide
    own = [run for named in members.values() for run in named.runs[claim.run].values()]
    means = _means(claim, members)
    return Verdict(
        recipe=recipe,
        where=paper.where or "",
        claim=claim.claim,
        verdict=verdict,
        numbers=numbers,
        test=in_words(claim),
        run=claim.run,
        against="" if claim.test == "share" else claim.against,
        quantity="" if claim.test == "diverges" else claim.of,
        number=told.mean if told else None,
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
        level=level(claim),
        region_low=region[0],
        region_high=region[1],
        seeds=told.n if told else 0,
        diverged=sum(run.status == "diverged" for run in own),
        steps=int(runs[0].key["steps"] or 0) if runs else None,
        device=runs[0].device_name if runs else "",
        folders=" | ".join(run.folder for run in runs),
        headline=claim.headline or "",
        what="" if claim.test == "diverges" else what(claim),
        metric=own[0].metric if own and claim.of == "metric" else "",
        mean=means[0],
        mean_against=means[1],
        made=len(own),
    )


def _means(claim: Claim, members: dict[str, Named]) -> tuple[float, float] | tuple[None, None]:
    """Of both sides, over the pairs that the number is made of."""
    if len(members) != 1 or claim.test == "share":
        return None, None
    (named,) = members.values()
    sides = [named.runs[name] for name in (claim.run, claim.against)]
    both = [[quantity(side[seed], claim.of) for side in sides] for seed in sides[0].keys() & sides[1].keys()]
    pairs = [(one, other) for one, other in both if one is not None and other is not None]
    return (statistics.mean(p[0] for p in pairs), statistics.mean(p[1] for p in pairs)) if pairs else (None, None)
