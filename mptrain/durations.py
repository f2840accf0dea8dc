"""How long runs will take: from what was measured here, else from what recipes recorded, else unknown."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from mptrain.paper import paper_of
from mptrain.plan import Planned
from mptrain.results.quantities import last_step
from mptrain.results.summary import BadSummary, load

OVERDUE = 0.1  # a run that takes longer than expected is taken to need a tenth of its time so far
START = 4.0  # seconds until a run takes its first step; a summary's own time begins after them


class Durations:
    """Seconds of each planned run; learns from every run that ends.

    recorded: whether the recipes' seconds, of small runs on one CPU thread, say anything about these.
    """

    def __init__(self, planned: Sequence[Planned], recorded: bool):
        self.recorded = recorded
        self._measured: dict[tuple[str, str], list[float]] = defaultdict(list)
        for each in planned:
            if each.state in ("finished", "diverged") and (seconds := _wall(each)) is not None:
                self.measured(each, seconds)

    def measured(self, each: Planned, seconds: float) -> None:
        """One run of this recipe and name took so long."""
        self._measured[each.recipe, each.run].append(seconds)

    def left(self, each: Planned, elapsed: float = 0.0) -> float | None:
        """Seconds that a run still takes, after so many of this process; None if nothing is known."""
        if each.state in ("finished", "diverged"):
            return 0.0
        whole = self._whole(each)
        if whole is None:
            return None
        share = last_step(each.job.folder) / each.steps if each.state == "resumable" else 0.0
        return max(whole * (1 - min(share, 1.0)) - elapsed, OVERDUE * elapsed)

    def _whole(self, each: Planned) -> float | None:
        if own := self._measured.get((each.recipe, each.run)):
            return median(own)
        seconds = self._recorded(each.recipe, each.run)
        if seconds is not None:
            return seconds * self._pace()
        return None

    def _recorded(self, recipe: str, run: str) -> float | None:
        # a recipe at the paper's size has inherited the seconds of the small one
        return paper_of(recipe).runs[run].seconds if self.recorded and not recipe.endswith("_paper") else None

    def _pace(self) -> float:
        """This machine's time over the recorded one, where both are known."""
        both = [
            median(own) / seconds
            for (recipe, run), own in self._measured.items()
            if (seconds := self._recorded(recipe, run)) is not None
        ]
        return median(both) if both else 1.0

    def total(self, planned: Sequence[Planned], workers: int, running: Mapping[Planned, float] | None = None) -> str:
        """The time until the last of these ends, in words, with so many at a time, in order."""
        running = running or {}
        ends: list[float] = []
        unknown = 0
        for each in sorted(planned, key=lambda each: each not in running):  # a stable sort: the running ones first
            seconds = self.left(each, running.get(each, 0.0))
            if seconds is None:
                unknown += 1
                continue
            start = heapq.heappop(ends) if len(ends) >= workers else 0.0
            heapq.heappush(ends, start + seconds)
        known = f"about {clock(max(ends, default=0.0))} left"
        if not unknown:
            return known
        return f"{unknown} run{'s' if unknown > 1 else ''} of unknown length left" + (
            f", beside {known}" if ends else ""
        )

    def source(self) -> str:
        """Where the estimate comes from."""
        timed = sum(map(len, self._measured.values()))
        here = f"{timed} run{'s' if timed != 1 else ''} timed here"
        return f"{here} and the recipes' recorded seconds" if self.recorded else here


def _wall(each: Planned) -> float | None:
    try:
        summary = load(str(each.job.folder / "summary.json"))
        wall = summary.get("wall_s")
    except (OSError, BadSummary, AttributeError):
        return None
    return float(wall) + START if type(wall) in (int, float) and 0 <= wall < 1e9 else None


def clock(seconds: float) -> str:
    """42 s, 12 min, 1 h 05 min"""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"
