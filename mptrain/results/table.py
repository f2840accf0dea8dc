"""The table: runs beside their FP32 baseline, built from records alone.

Runs are compared only within a group, and a group is everything that has to be equal for a comparison to mean
something: the record's whole `key`, and the metric, its margin, the evaluation precision, the kind of data and the
device's name. In a group there is one row for each precision and scale. Whatever is not comparable is listed beside the
table with its folder and reason, never mixed in and never dropped.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from mptrain.results.row import BASELINE, EXCLUDED, NO_BASELINE, RESULT, Group, Row, Table
from mptrain.results.runs import Excluded, Run
from mptrain.results.shared import side_by_side
from mptrain.results.statistics import Difference, decimals, paired_difference, spread, verdict
from mptrain.results.summary import clean

PRECISION_ORDER = ("fp32", "tf32", "bf16", "fp16")


def build_table(runs: list[Run], excluded: list[Excluded], baseline: str = "fp32") -> Table:
    """Group the runs, set aside duplicates, and compare each row with the baseline precision's row in its group."""
    groups, listed = [], list(excluded)
    shared = side_by_side(runs)
    for identity, members in _groups(runs):
        kept, duplicates = _newest_of_each(members)
        listed.extend(duplicates)
        groups.append(Group(_rows(identity, kept, baseline, shared)))
    groups.sort(key=lambda group: _group_order(group.key))
    return Table(groups, [_excluded_row(each) for each in sorted(listed, key=lambda each: (each.folder, each.reason))])


def _groups(runs: list[Run]) -> Iterable[tuple[dict[str, Any], list[Run]]]:
    """Split by identity, and by commit where folders given separately differ in it: these are being compared."""
    by_identity: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        by_identity[json.dumps(_identity(run), sort_keys=True, ensure_ascii=False)][run.source].append(run)
    for text, by_source in by_identity.items():
        by_commits: dict[str, list[Run]] = defaultdict(list)
        for members in by_source.values():
            by_commits[_commits(members)].extend(members)
        for commits, members in by_commits.items():
            yield {**json.loads(text), **({"commit": commits} if len(by_commits) > 1 else {})}, members


def _identity(run: Run) -> dict[str, Any]:
    extra = {
        "metric": run.metric,
        "higher_is_better": run.higher_is_better,
        "margin": run.margin,
        "evaluated in": run.eval_precision,
        "kind of data": run.data_kind,
        "device name": run.device_name,
    }
    return {**run.key, **extra}


def _commits(runs: list[Run]) -> str:
    return clean(", ".join(sorted({run.commit or "unknown" for run in runs})))


def _how(run: Run) -> tuple[str, ...]:
    """What makes a row. Backend and dtypes are part of it, so that emulated and native seeds are never averaged."""
    return (run.precision_label, run.scale, run.backend, *run.dtypes.values())


def _newest_of_each(runs: list[Run]) -> tuple[list[Run], list[Excluded]]:
    """Keep, of runs that repeat one seed of one row, the one that finished last."""
    newest: dict[tuple[Any, ...], Run] = {}
    duplicates = []
    for run in sorted(runs, key=lambda run: (run.finished, run.folder)):
        older = newest.get((_how(run), run.seed))
        if older:
            reason = clean(f"finished before {run.folder}, the same run again")
            duplicates.append(
                Excluded(
                    older.folder, "duplicate", reason, older.recipe, older.precision_label, older.scale, older.seed
                )
            )
        newest[(_how(run), run.seed)] = run
    return list(newest.values()), duplicates


def _rows(identity: dict[str, Any], runs: list[Run], baseline: str, shared: set[str]) -> list[Row]:
    by_row: dict[tuple[str, ...], list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.seed):
        by_row[_how(run)].append(run)
    ordered = sorted(by_row.values(), key=lambda members: _row_order(members[0]))
    reference = _baseline(ordered, baseline)
    return [_row(identity, members, reference, baseline, shared) for members in ordered]


def _baseline(rows: list[list[Run]], precision: str) -> list[Run] | None:
    """The precision's row, with no setting changed: unscaled, else dynamic, else the only one there is."""
    candidates = [members for members in rows if members[0].precision_label == members[0].precision == precision]
    scales = ("none",) if precision == "fp32" else ("none", "dynamic")
    for scale in scales:
        for members in candidates:
            if members[0].scale == scale:
                return members
    return candidates[0] if len(candidates) == 1 and precision != "fp32" else None


def _row(
    identity: dict[str, Any], runs: list[Run], reference: list[Run] | None, baseline: str, shared: set[str]
) -> Row:
    first = runs[0]
    values = _values(runs)
    diverged = [run for run in runs if run.status == "diverged"]
    own = spread(list(values.values())) if values else None
    delta = None
    if reference is not None and reference is not runs:
        delta = paired_difference(values, _values(reference), first.margin)
    speed, memory = _throughput(runs), _memory(runs)
    alone = not any(run.folder in shared for run in [*runs, *(reference or [])])
    final_scales = [run.final_scale for run in runs if run.final_scale is not None]
    key = json.dumps(identity, ensure_ascii=False)
    return Row(
        section=RESULT,
        status="finished" if not diverged else "diverged" if not values else f"{len(diverged)}/{len(runs)} diverged",
        reason=_reasons(diverged),
        recipe=first.recipe,
        precision=first.precision_label,
        scale=first.scale,
        seeds=" ".join(str(run.seed) for run in runs),
        finished=len(values),
        diverged=len(diverged),
        metric=first.metric,
        higher_is_better=first.higher_is_better,
        mean=own.mean if own else None,
        sd=own.sd if own else None,
        minimum=own.minimum if own else None,
        median=own.median if own else None,
        maximum=own.maximum if own else None,
        baseline=baseline,
        pairs=delta.pairs if delta else None,
        difference=delta.mean if delta else None,
        difference_low=delta.low if delta else None,
        difference_high=delta.high if delta else None,
        margin=first.margin,
        verdict=_verdict(runs, values, reference, delta),
        throughput=speed[0],
        throughput_unit=speed[1],
        throughput_ratio=_ratio(speed, _throughput(reference or [])) if alone else None,
        beside=sum(run.folder in shared for run in runs),
        memory_mib=memory[0],
        memory_how=memory[1],
        memory_ratio=_ratio(memory, _memory(reference or [])),
        attempted=sum(run.attempted for run in runs),
        skipped=sum(run.skipped for run in runs),
        final_scale_low=min(final_scales, default=None),
        final_scale_high=max(final_scales, default=None),
        backend=first.backend,
        **first.dtypes,
        group=hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12],
        data=first.data,
        data_kind=first.data_kind,
        steps=int(first.key["steps"] or 0),
        batch_size=int(first.key["batch_size"] or 0),
        device=first.device,
        device_name=first.device_name,
        torch=first.torch,
        commits=_commits(runs),
        eval_precision=first.eval_precision,
        key=key,
        folders=" | ".join(run.folder for run in runs),
    )


def _reasons(diverged: list[Run]) -> str:
    """Why the seeds diverged, each reason once with its seeds."""
    seeds: dict[str, list[str]] = defaultdict(list)
    for run in diverged:
        seeds[run.reason or "no reason given"].append(str(run.seed))
    return clean("; ".join(f"seed {', '.join(each)}: {reason}" for reason, each in seeds.items()))


def _values(runs: list[Run]) -> dict[int, float]:
    return {run.seed: run.value for run in runs if run.status == "finished" and run.value is not None}


def _verdict(runs: list[Run], values: dict[int, float], reference: list[Run] | None, delta: Difference | None) -> str:
    if reference is None:
        return NO_BASELINE
    if reference is runs:
        return BASELINE
    if not values:
        return "diverged"
    if not _values(reference):
        return "undecided (the baseline diverged)"
    first = runs[0]
    words = verdict(delta, first.margin, first.higher_is_better, decimals(first.margin))
    # The seeds that survived say nothing about those that did not: their equality is never the row's whole verdict.
    return words if len(values) == len(runs) else f"{len(runs) - len(values)}/{len(runs)} diverged, the others: {words}"


def _throughput(runs: list[Run]) -> tuple[float | None, str]:
    """Mean over the seeds that finished and were timed, with its unit."""
    timed = [run for run in runs if run.status == "finished" and run.throughput is not None and run.throughput > 0]
    units = {run.throughput_unit for run in timed}
    if len(units) != 1:
        return None, ""
    return spread([run.throughput for run in timed if run.throughput is not None]).mean, units.pop()


def _memory(runs: list[Run]) -> tuple[float | None, str]:
    """Largest peak over seeds, with the way it was measured; two ways are not one number."""
    measured = [run for run in runs if run.memory_mib is not None and run.memory_mib > 0]
    ways = {run.memory_how for run in measured}
    if len(ways) != 1:
        return None, ""
    return max(run.memory_mib for run in measured if run.memory_mib is not None), ways.pop()


def _ratio(own: tuple[float | None, str], other: tuple[float | None, str]) -> float | None:
    if own[0] is None or other[0] is None or own[1] != other[1]:
        return None
    ratio = own[0] / other[0]
    return ratio if 0 < ratio < float("inf") else None


def _excluded_row(each: Excluded) -> Row:
    seed = "" if each.seed is None else str(each.seed)
    return Row(EXCLUDED, each.status, each.reason, each.recipe, each.precision, each.scale, seed, folders=each.folder)


def _row_order(run: Run) -> tuple[Any, ...]:
    """fp32, tf32, bf16, fp16 with their variants, then the rest; unchanged settings first; scales none, 8, dynamic."""
    family = run.precision.split("_")[0]
    rank = PRECISION_ORDER.index(family) if family in PRECISION_ORDER else len(PRECISION_ORDER)
    changed = run.precision_label != run.precision
    return (
        rank,
        run.precision,
        changed,
        run.precision_label,
        _scale_order(run.scale),
        run.backend,
        *run.dtypes.values(),
    )


def _scale_order(scale: str) -> tuple[int, float, str]:
    word = scale.split(" ")[0]
    if word == "none":
        return (0, 0.0, scale)
    if word == "dynamic":
        return (3, 0.0, scale)
    try:
        number = float(word)
    except ValueError:
        return (2, 0.0, scale)
    return (1, number, scale) if number == number else (2, 0.0, scale)


def _group_order(key: dict[str, Any]) -> tuple[Any, ...]:
    """By recipe and data, then by the other fields; numbers before texts, so that mixed types sort too."""
    fields = [key.get("recipe"), key.get("data"), *(value for _, value in sorted(key.items()))]
    return tuple((0, value, "") if isinstance(value, int | float) else (1, 0, str(value)) for value in fields)
