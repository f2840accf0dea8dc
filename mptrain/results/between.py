"""Two folders of results beside each other: two machines, two commits, two versions.

Here the machine may differ, and nothing else: recipe, data, steps, batch and settings have to be equal, and precision
and scale too. A row of one folder that has no partner in the other is listed.

The second folder is what is judged. A pair is marked as a regression if seeds diverge that did not; if the metric is
worse and the 95 % interval of the difference (Welch) excludes zero, or, where one seed tells no noise, if it is worse
by more than the task's margin; and, on the same device, if it takes a twentieth more memory, or is a fifth slower
where no other run shared its CPUs.
"""

import json
from collections import defaultdict
from dataclasses import dataclass

from mptrain.results.cells import arithmetic, ratio, significant
from mptrain.results.document import Block, Cell, Column
from mptrain.results.row import Group, Row, Table
from mptrain.results.statistics import Spread, between_means, decimals
from mptrain.results.words import subtitle, title

MACHINE = ("device", "device name", "torch")
SLOWER = 0.8  # of the first throughput: on a shared machine ratios wobble by a tenth
LARGER = 1.05  # of the first memory, which hardly varies


@dataclass(frozen=True)
class Pair:
    """The same row in both folders; every difference is second minus first, every ratio second over first."""

    run: str  # recipe, data, steps and batch size
    recipe: str
    precision: str
    scale: str
    metric: str
    margin: float
    first_seeds: int
    second_seeds: int
    first_mean: float | None
    second_mean: float | None
    difference: float | None
    metric_ratio: float | None
    throughput_unit: str
    first_throughput: float | None
    second_throughput: float | None
    throughput_ratio: float | None
    first_memory_mib: float | None
    second_memory_mib: float | None
    memory_ratio: float | None
    first_machine: str
    second_machine: str
    first_arithmetic: str
    second_arithmetic: str
    regressions: str  # separated by "; "


def pair_up(first: Table, second: Table) -> tuple[list[Pair], list[str]]:
    """All pairs, and a line for each row that has no partner."""
    ones, twos = _by_identity(first), _by_identity(second)
    pairs = [_pair(one, two) for identity in ones for one in ones[identity] for two in twos.get(identity, [])]
    alone = []
    for which, own, other in (("first", ones, twos), ("second", twos, ones)):
        for identity in own.keys() - other.keys():
            alone += [
                f"{which} folder: {title(group)}, {row.precision}, scale {row.scale}" for group, row in own[identity]
            ]
    return pairs, sorted(alone)


def _by_identity(table: Table) -> dict[str, list[tuple[Group, Row]]]:
    rows: dict[str, list[tuple[Group, Row]]] = defaultdict(list)
    for group in table.groups:
        for row in group.rows:
            rows[_identity(row)].append((group, row))
    return rows


def _identity(row: Row) -> str:
    key = {name: value for name, value in json.loads(row.key).items() if name not in MACHINE}
    return json.dumps([key, row.precision, row.scale], sort_keys=True)


def _pair(first: tuple[Group, Row], second: tuple[Group, Row]) -> Pair:
    (one_group, one), (two_group, two) = first, second
    same_unit = one.throughput_unit == two.throughput_unit
    same_way = one.memory_how == two.memory_how
    return Pair(
        run=title(one_group),
        recipe=one.recipe,
        precision=one.precision,
        scale=one.scale,
        metric=one.metric,
        margin=one.margin or 0.0,
        first_seeds=one.finished or 0,
        second_seeds=two.finished or 0,
        first_mean=one.mean,
        second_mean=two.mean,
        difference=None if one.mean is None or two.mean is None else two.mean - one.mean,
        metric_ratio=_quotient(two.mean, one.mean),
        throughput_unit=one.throughput_unit or two.throughput_unit,
        first_throughput=one.throughput,
        second_throughput=two.throughput,
        throughput_ratio=_quotient(two.throughput, one.throughput) if same_unit else None,
        first_memory_mib=one.memory_mib,
        second_memory_mib=two.memory_mib,
        memory_ratio=_quotient(two.memory_mib, one.memory_mib) if same_way else None,
        first_machine=_machine(one_group),
        second_machine=_machine(two_group),
        first_arithmetic=_arithmetic(one),
        second_arithmetic=_arithmetic(two),
        regressions="; ".join(_regressions(one, two)),
    )


def _regressions(one: Row, two: Row) -> list[str]:
    """What is worse in the second row, beyond noise."""
    found = []
    if _share(two) > _share(one):
        found.append(f"{two.diverged}/{(two.finished or 0) + (two.diverged or 0)} diverged")
    if (loss := _loss(one, two)) is not None:
        found.append(f"worse by {loss:.{decimals(one.margin)}f}")
    if one.device_name == two.device_name:
        timed = one.throughput_unit == two.throughput_unit and not one.beside and not two.beside
        speed = _quotient(two.throughput, one.throughput) if timed else None
        memory = _quotient(two.memory_mib, one.memory_mib) if one.memory_how == two.memory_how else None
        found += [f"slower: {ratio(speed)}"] if speed is not None and speed < SLOWER else []
        found += [f"more memory: {ratio(memory)}"] if memory is not None and memory > LARGER else []
    return found


def _share(row: Row) -> float:
    seeds = (row.finished or 0) + (row.diverged or 0)
    return (row.diverged or 0) / seeds if seeds else 0.0


def _loss(one: Row, two: Row) -> float | None:
    """By how much the second metric is worse, if that is beyond noise."""
    first, second = _spread(one), _spread(two)
    if first is None or second is None:
        return None
    sign = -1 if one.higher_is_better else 1
    loss = sign * (second.mean - first.mean)
    interval = between_means(first, second)
    if interval is None:
        return loss if loss > (one.margin or 0.0) else None
    return loss if min(sign * interval[0], sign * interval[1]) > 0 else None


def _spread(row: Row) -> Spread | None:
    if row.mean is None or row.minimum is None or row.median is None or row.maximum is None:
        return None
    return Spread(row.finished or 0, row.mean, row.sd, row.minimum, row.median, row.maximum)


def _quotient(over: float | None, under: float | None) -> float | None:
    if over is None or not under:
        return None
    quotient = over / under
    return quotient if abs(quotient) < float("inf") else None


def _arithmetic(row: Row) -> str:
    cell = arithmetic(row)
    return f"{cell.main} {cell.detail}"


def _machine(group: Group) -> str:
    return subtitle(group)[0]


def between_blocks(pairs: list[Pair], first: str, second: str) -> list[Block]:
    """The pairs as tables, one for each combination of what was run and the two machines."""
    columns = [
        Column("precision", "scale", least=13),
        Column("first", "seeds", number=True),
        Column("second", "seeds", number=True),
        Column("difference", "ratio", number=True),
        Column("regression", least=10),
        Column("throughput", "first / second", number=True),
        Column("ratio", number=True),
        Column("memory", "first / second", "drop", number=True),
        Column("ratio", "", "drop", number=True),
        Column("arithmetic", "first / second", "fold"),
    ]
    together: dict[tuple[str, str, str, str], list[Pair]] = defaultdict(list)
    for pair in pairs:
        together[(pair.run, pair.metric, pair.first_machine, pair.second_machine)].append(pair)
    blocks = []
    for (run, metric, one, two), members in together.items():
        lines = [f"first {first}: {one}", f"second {second}: {two}"]
        lines.append(f"{metric}; difference is second minus first, ratio is second over first")
        blocks.append(Block(f"Between: {run}", lines, columns, [_cells(pair) for pair in members], []))
    return blocks


def _cells(pair: Pair) -> list[Cell]:
    digits = decimals(pair.margin)

    def mean(value: float | None, seeds: int) -> Cell:
        return Cell("diverged", tone="bad") if value is None else Cell(f"{value:.{digits}f}", f"n={seeds}")

    def two(one: float | None, other: float | None) -> str:
        return " / ".join("n/a" if value is None else significant(value) for value in (one, other))

    return [
        Cell(pair.precision, f"scale {pair.scale}"),
        mean(pair.first_mean, pair.first_seeds),
        mean(pair.second_mean, pair.second_seeds),
        Cell("") if pair.difference is None else Cell(f"{pair.difference:+.{digits}f}", ratio(pair.metric_ratio)),
        Cell(pair.regressions or "none", tone="bad" if pair.regressions else "quiet"),
        Cell(two(pair.first_throughput, pair.second_throughput), pair.throughput_unit),
        Cell(ratio(pair.throughput_ratio)),
        Cell(two(pair.first_memory_mib, pair.second_memory_mib), "MiB" if pair.first_memory_mib else ""),
        Cell(ratio(pair.memory_ratio)),
        Cell(pair.first_arithmetic, pair.second_arithmetic),
    ]
