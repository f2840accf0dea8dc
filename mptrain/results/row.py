"""One line of the table, and what holds lines together.

`Row` is flat and holds plain values only: it is one line of the csv, and every other output is rendered from the same
rows.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mptrain.results.statistics import Difference, InconsistentStatistics, Spread

RESULT, EXCLUDED = "result", "excluded"
BASELINE = "baseline"  # verdict of the baseline row itself
NO_BASELINE = "no baseline"  # verdict where the group has none


@dataclass(frozen=True)
class Row:
    """One line: a precision and scale in its group (section `result`), or a folder in no group (section `excluded`)."""

    section: str
    status: (
        str  # finished, diverged, "1/3 diverged"; of an excluded folder: failed, unfinished, unreadable, duplicate, ...
    )
    reason: str
    # what was run
    recipe: str
    precision: str  # the label: name and changed settings
    scale: str
    seeds: str  # separated by blanks
    finished: int | None = None  # how many seeds finished
    diverged: int | None = None  # how many diverged
    # how good
    metric: str = ""
    higher_is_better: bool | None = None
    mean: float | None = None
    sd: float | None = None
    minimum: float | None = None
    median: float | None = None
    maximum: float | None = None
    # beside the baseline
    baseline: str = ""  # the precision that was asked for as baseline
    pairs: int | None = None  # seeds shared with the baseline
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    margin: float | None = None
    verdict: str = ""
    # how fast, how large
    throughput: float | None = None
    throughput_unit: str = ""
    throughput_ratio: float | None = None
    beside: int | None = None  # seeds that were made while another run had the same CPUs
    memory_mib: float | None = None
    memory_how: str = ""
    memory_ratio: float | None = None
    # what happened to the steps, summed over seeds
    attempted: int | None = None
    skipped: int | None = None
    final_scale_low: float | None = None
    final_scale_high: float | None = None
    # how it was computed
    backend: str = ""
    matmul: str = ""
    softmax: str = ""
    norm: str = ""
    loss: str = ""
    # the group
    group: str = ""
    data: str = ""
    data_kind: str = ""
    steps: int | None = None
    batch_size: int | None = None
    device: str = ""
    device_name: str = ""
    torch: str = ""
    commits: str = ""
    eval_precision: str = ""
    key: str = ""  # JSON: everything that had to be equal
    folders: str = ""  # separated by " | "

    def __post_init__(self) -> None:
        _self_check(self)


def _self_check(row: Row) -> None:
    """Every statistic that can be printed obeys what holds for every data set; InconsistentStatistics otherwise."""
    if row.mean is not None:
        if row.minimum is None or row.median is None or row.maximum is None:
            raise InconsistentStatistics(f"a mean without its range: {row.mean!r}")
        Spread(row.finished or 0, row.mean, row.sd, row.minimum, row.median, row.maximum)
    if row.difference is not None:
        Difference(row.pairs or 0, row.difference, row.difference_low, row.difference_high, None)
    if row.skipped is not None and row.attempted is not None and not 0 <= row.skipped <= row.attempted:
        raise InconsistentStatistics(f"skipped <= attempted fails: {row.skipped}, {row.attempted}")
    for name in ("throughput", "throughput_ratio", "memory_mib", "memory_ratio"):
        value = getattr(row, name)
        if value is not None and not value > 0:
            raise InconsistentStatistics(f"{name} > 0 fails: {value!r}")


@dataclass(frozen=True)
class Group:
    """Rows that may be compared with each other, FP32 first."""

    rows: list[Row]

    @property
    def key(self) -> dict[str, Any]:
        return dict(json.loads(self.rows[0].key))

    @property
    def baseline(self) -> Row | None:
        return next((row for row in self.rows if row.verdict == BASELINE), None)


@dataclass(frozen=True)
class Table:
    """All groups in order, and the folders that are in none."""

    groups: list[Group]
    excluded: list[Row] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """Every row, in the order of the csv."""
        return [row for group in self.groups for row in group.rows] + self.excluded


def table_of(rows: Iterable[Row]) -> Table:
    """Put rows, for instance those read from a csv, back into their groups."""
    groups: dict[str, list[Row]] = defaultdict(list)
    excluded = []
    for row in rows:
        if row.section == RESULT:
            groups[row.group].append(row)
        else:
            excluded.append(row)
    return Table([Group(members) for members in groups.values()], excluded)
