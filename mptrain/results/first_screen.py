"""The table that a reader sees first: what the paper says, what came out here, and the verdict.

It is made of the claims that have a `headline`; those that share one share its line. All of it stands in claims.csv.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

from mptrain.results.cells import significant
from mptrain.results.claims import DOES_NOT_SHOW, NOT_AT_THIS_SIZE, NOT_RUN, SHOWS, Verdict
from mptrain.results.document import Block, Cell, Column, Tone

UNITS = {"memory": "MiB", "memory.weights": "MiB of weights", "small": "small updates", "tiny": "below 2^-24"}
TONES: dict[str, Tone] = {SHOWS: "good", NOT_AT_THIS_SIZE: "bad", DOES_NOT_SHOW: "bad"}


def first_screen_block(claims: Sequence[Verdict], made: str) -> Block:
    """One line for each headline: tables, figures, sections, then what is not in the paper."""
    together: dict[str, list[Verdict]] = defaultdict(list)
    for claim in claims:
        if claim.headline:
            together[claim.headline].append(claim)
    cells = [[Cell(headline), *_line(members)] for headline, members in sorted(together.items(), key=_order)]
    columns = [Column("paper", least=30), Column("here", "interval", least=30), Column("verdict", least=10)]
    about = "Small networks on small data: what compares with the paper is the difference between two runs."
    return Block("The paper, and here", [about, made], columns, cells, [])


def _order(line: tuple[str, list[Verdict]]) -> tuple[int, str]:
    places = ("table", "figure", "section")
    first = line[0].split(" ")[0]
    return (places.index(first) if first in places else len(places)), line[0]


def _line(members: list[Verdict]) -> list[Cell]:
    words = [each.verdict for each in members]
    alike = len(set(words)) == 1
    verdict = Cell(words[0], tone=TONES.get(words[0], "plain")) if alike else Cell("; ".join(words))
    several = len({each.recipe for each in members}) > 1
    parts = [f"{each.recipe} {here(each)}" if several else here(each) for each in members]
    return [Cell("; ".join(parts)), verdict]


def here(claim: Verdict) -> str:
    """Both sides and the number that decides: "fp16 0.0671, fp32 0.146 mAP50: ratio 0.458 (0.401 to 0.523)"."""
    if claim.verdict == NOT_RUN:
        return f"{claim.run}: not run"
    if claim.what == "" or claim.number is None:
        return f"{claim.run}: {claim.diverged} of {claim.made} seeds diverged"
    percent = claim.quantity.startswith(("counts.", "watch.", "skipped"))
    name = claim.quantity.rpartition(".")[2] if percent else claim.quantity.removeprefix("metrics.")
    unit = claim.metric or UNITS.get(name, name)
    if claim.what == "share":
        return f"{claim.run}: {_interval(claim, percent)} {unit}"
    decides = f"{claim.what} {_interval(claim, percent and claim.what != 'ratio')}"
    if claim.mean is None or claim.mean_against is None:
        return f"{claim.run} against {claim.against}, {claim.seeds} pairs of several recipes, {unit}: {decides}"
    both = (claim.mean, claim.mean_against)
    own, other = _digits(both, percent) if percent else map(significant, both)
    return f"{claim.run} {own}, {claim.against} {other} {unit}: {decides}"


def _interval(claim: Verdict, percent: bool) -> str:
    assert claim.number is not None
    if claim.low is None or claim.high is None:
        return f"{_digits([claim.number], percent)[0]} (n=1)"
    least = 3 if claim.what == "ratio" else 0
    number, low, high = _digits([claim.number, claim.low, claim.high], percent, least)
    return number if low == high else f"{number} ({low} to {high})"


def _digits(values: Sequence[float], percent: bool, least: int = 0) -> list[str]:
    """All with as many decimals as the largest needs for three digits, and no fewer than `least`."""
    factor, unit = (100, " %") if percent else (1, "")
    largest = max(abs(value) * factor for value in values)
    places = min(8, max(least, 2 - math.floor(math.log10(largest)))) if largest else 0
    return [f"{value * factor:.{places}f}{unit}" for value in values]
