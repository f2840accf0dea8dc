"""Table and figure of recipe clip_hard, from records alone: what ten hard batches do to a run, beside BF16 and YOLO.

    python scripts/clip_hard.py results/runs [--table results/tables/clip_hard] [--figure results/figures/clip_hard]

Make the records first, e.g. `mptrain -m +recipe=clip_hard precision=fp32,bf16,fp16 seed=0,1 watch=true`, and the same
with task.hard=shuffled, task.norm=batch, scaling.interval=50 or scale=layerwise; beside them `mptrain +recipe=yolo
precision=fp16 watch=true`. What gradients rounding made zero is counted where FP16 is emulated. The figure (PNG and
SVG) needs `pip install 'mptrain[report]'`. The verdict is printed, whatever it is; so is what was left out, and why.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mptrain import files
from mptrain.errors import UserError
from mptrain.results import watched
from mptrain.results.quantities import logged
from mptrain.results.runs import Run, find_runs
from mptrain.results.summary import BadSummary, load, number_or_none
from mptrain.watch.underflow import UNDERFLOW

RECIPES = ("clip_hard", "yolo")
COLUMNS = ("hard batches", "norm", "precision", "scale", "seeds", "recall@10 before", "recall@10 at the end")
COLUMNS += ("recall@10 by seed", "skipped steps", "final scale", "gradients flushed before", "gradients flushed after")
COLUMNS += ("layers underflowing at most", "first alarm", "status", "commits")
NOT_COUNTED = "not counted"
COLOURS = {"fp32": "#7f7f7f", "bf16": "#1f77b4", "fp16": "#ff7f0e", "fp16, interval=50": "#d62728"}
COLOURS |= {"fp16, layerwise": "#2ca02c", "CLIP fp16": "#ff7f0e", "YOLO fp16": "#9467bd"}
DASHES = [[1, 0], [1, 0], [1, 0], [6, 3], [2, 3]]
"""so that a curve that lies on another one shows"""


@dataclass(frozen=True)
class Hard:
    """One run: its summary, what the command line chose, the lines of its metrics.jsonl, and what was watched.

    flushed: for each step that was looked at, the share of all gradients' nonzero products that rounding made zero,
    and the share of layers that lost 5 % or more of theirs.
    """

    run: Run
    kind: str
    norm: str
    first: int
    count: int
    lines: list[dict[str, Any]]
    flushed: dict[int, tuple[float, float]] = field(default_factory=dict)
    alarm: str = ""

    @property
    def group(self) -> tuple[str, str, str, str]:
        return self.kind, self.norm, self.run.precision_label, self.run.scale

    @property
    def name(self) -> str:
        """Of its line in the figure."""
        scale = "" if self.run.scale in ("none", "dynamic") else f", {self.run.scale.removeprefix('dynamic ')}"
        return f"{self.run.precision_label}{scale}"

    def recalls(self) -> dict[int, float]:
        found = {}
        for line in self.lines:
            step, scores = line.get("step"), line.get("eval")
            value = number_or_none(scores.get("recall@10")) if isinstance(scores, dict) else None
            if isinstance(step, int) and value is not None:
                found[step] = value
        return found

    def recall_before(self) -> float | None:
        """The last evaluation before the first hard batch."""
        found = [value for step, value in self.recalls().items() if step <= self.first]
        return found[-1] if found else None


# From the folders.


def read(folders: list[Path]) -> tuple[list[Hard], list[str]]:
    """The runs of both recipes, in the order of the table, and a sentence on everything that is left out."""
    runs, excluded = find_runs(folders)
    said = [f"left out: {one.folder}: {one.reason}" for one in excluded if one.recipe in (*RECIPES, "")]
    found = []
    for run in (run for run in runs if run.recipe in RECIPES):
        try:
            found.append(hard(run))
        except (UserError, KeyError, TypeError, ValueError) as error:
            said.append(f"left out: {run.folder}: config.yaml does not say what recipe {run.recipe} says ({error!r})")
            continue
        if not found[-1].lines:
            said.append(f"{run.folder}: metrics.jsonl is missing or unreadable; the figure lacks its curves")
        rounds = run.precision != "fp32"
        if rounds and (Path(run.folder) / "watch.parquet").exists() and not found[-1].flushed:
            said.append(f"{run.folder}: watch.parquet holds no count that can be read; its underflow is not shown")
    return sorted(found, key=lambda one: (*one.group, one.run.seed)), said


def hard(run: Run) -> Hard:
    task = files.read_yaml(Path(run.folder) / "config.yaml")["task"]
    kind, norm, first, count = ("none", "batch", 0, 0)
    if run.recipe == "clip_hard":
        kind = "none" if task["hard"] is None else str(task["hard"])
        norm, first, count = str(task["norm"]), int(task["hard_from"]), int(task["hard_count"])
    folder = Path(run.folder)
    return Hard(run, kind, norm, first, count, logged(folder / "metrics.jsonl"), flushed(folder), first_alarm(folder))


def flushed(folder: Path) -> dict[int, tuple[float, float]]:
    """What `Hard.flushed` is, from watch.parquet; a part that cannot be read is one gap."""
    of: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for part in watched.parts(folder / "watch.parquet"):
        try:
            rows = watched.read(part, ("step", "layer", "kind", "name", "count", "sampled", "zero", "flushed"))
        except (OSError, BadSummary):
            continue
        for row in rows:
            if (
                row["name"] == "products"
                and row["kind"] in ("grad_input", "grad_weight")
                and row["flushed"] is not None
            ):
                counts = of[row["step"]][row["layer"]]
                whole = row["count"] / max(1, row["sampled"])  # a sample stands for a large tensor
                counts[0] += row["flushed"] * whole
                counts[1] += (row["sampled"] - row["zero"]) * whole
    found = {}
    for step, layers in sorted(of.items()):
        shares = [lost / whole for lost, whole in layers.values() if whole]
        if shares:
            lost, whole = (sum(column) for column in zip(*layers.values(), strict=True))
            found[step] = lost / whole, sum(share >= UNDERFLOW for share in shares) / len(shares)
    return found


def first_alarm(folder: Path) -> str:
    """The rule that Watch found broken first in a watched run, and the step; "" if it was not watched."""
    try:
        summary = load(str(folder / "summary.json"))
        alarms = summary["alarms"]
        return f"{alarms[0]['rule']} ({alarms[0]['step']})" if alarms else str(summary["watch"])
    except Exception:  # whatever a stranger's file can hold: the run is shown without it
        return ""


# The table.


def rows(runs: Iterable[Hard]) -> list[dict[str, str]]:
    groups = defaultdict(list)
    for run in runs:
        if run.run.recipe == "clip_hard":
            groups[run.group].append(run)
    return [row(group, members) for group, members in groups.items()]


def row(group: tuple[str, str, str, str], members: list[Hard]) -> dict[str, str]:
    ends = [one.run.value for one in members if one.run.value is not None]
    before = [value for one in members if (value := one.recall_before()) is not None]
    watched = [one for one in members if one.flushed]
    early = [share for one in watched for step, (share, _) in one.flushed.items() if step <= one.first]
    late = [share for one in watched for step, (share, _) in one.flushed.items() if step > one.first + one.count]
    layers = [share for one in watched for _, share in one.flushed.values()]
    values = (
        *group,
        ", ".join(str(one.run.seed) for one in members),
        mean(before),
        mean(ends),
        ", ".join("none" if one.run.value is None else f"{one.run.value:.3f}" for one in members),
        ", ".join(str(one.run.skipped) for one in members),
        ", ".join("none" if one.run.final_scale is None else f"{one.run.final_scale:g}" for one in members),
        f"{statistics.fmean(early):.2g}" if early else NOT_COUNTED,
        f"{statistics.fmean(late):.2g}" if late else NOT_COUNTED,
        f"{max(layers):.0%}" if layers else NOT_COUNTED,
        ", ".join(dict.fromkeys(one.alarm for one in members if one.alarm)) or "not watched",
        ", ".join(sorted({one.run.status for one in members})),
        ", ".join(sorted({one.run.commit for one in members})),
    )
    return dict(zip(COLUMNS, values, strict=True))


def mean(values: list[float]) -> str:
    return f"{statistics.fmean(values):.3f}" if values else "none"


def verdicts(table: list[dict[str, str]]) -> list[str]:
    """FP16 beside BF16 and FP32, a sentence for each kind of hard batch, norm and way of scaling."""
    said = []
    for one in (row for row in table if row["precision"] == "fp16"):
        where = f"{one['hard batches']}, norm {one['norm']}, scale {one['scale']}"
        others = [
            f"{name.upper()} ends at {other['recall@10 at the end']} (seeds {other['seeds']})"
            for name in ("bf16", "fp32")
            for other in table
            if other["precision"] == name and all(other[c] == one[c] for c in COLUMNS[:2])
        ]
        said.append(
            f"{where}: FP16 skipped {one['skipped steps']} steps, its scale ended at {one['final scale']}, recall@10 "
            f"went from {one['recall@10 before']} to {one['recall@10 at the end']} (seeds {one['seeds']}); of its "
            f"gradients, {one['gradients flushed before']} were rounded to zero before and "
            f"{one['gradients flushed after']} after{''.join(f'; {other}' for other in others)}."
        )
    return said


def write(table: list[dict[str, str]], said: list[str], runs: list[Hard], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    some = runs[0].run
    about = (
        f"Recipe clip_hard, {some.attempted} steps, {some.device_name}, torch {some.torch}. Flushed: of all gradients"
    )
    about += f" that were not zero, the share that rounding made zero. A layer underflows from {UNDERFLOW:.0%} on."
    lines = ["# CLIP through hard batches", "", about, "", "| " + " | ".join(COLUMNS) + " |"]
    lines += ["|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(row[name] for name in COLUMNS) + " |" for row in table]
    lines += ["", *(f"- {sentence}" for sentence in said), ""]
    out.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")


# The figure.


def points(runs: list[Hard]) -> list[dict[str, Any]]:
    """The curves of the first seed of each group, of those the watched one, one dict a point; only finite values."""
    chosen: dict[tuple[str, ...], Hard] = {}
    for one in runs:
        if one.group not in chosen or (one.flushed and not chosen[one.group].flushed):
            chosen[one.group] = one
    found = []
    for one in (one for one in chosen.values() if one.run.recipe == "clip_hard"):
        base = {"run": one.name, "panel": f"{one.kind}, norm {one.norm}"}
        series = {"recall@10": one.recalls(), "loss": {}, "loss scale": {}}
        series["layers underflowing"] = {step: share for step, (_, share) in one.flushed.items()}
        for line in one.lines:
            for name, key in (("loss", "loss"), ("loss scale", "scale")):
                value = number_or_none(line.get(key))
                meant = name == "loss" or one.run.scale != "none"
                if meant and isinstance(line.get("step"), int) and value is not None:
                    series[name][line["step"]] = value
        found += [
            base | {"step": step, "quantity": name, "value": value}
            for name, values in series.items()
            for step, value in values.items()
        ]
    return found


def beside(runs: list[Hard]) -> list[dict[str, Any]]:
    """CLIP and YOLO in FP16: of all gradients the share that was flushed, at every step that was looked at."""
    names = {"clip_hard": "CLIP fp16", "yolo": "YOLO fp16"}
    chosen: dict[str, Hard] = {}
    for one in runs:
        meant = one.run.recipe == "yolo" or (one.kind, one.norm) == ("undivided", "layer")
        if meant and one.flushed and one.run.precision_label == "fp16" and one.run.scale == "dynamic":
            chosen.setdefault(names[one.run.recipe], one)
    return [
        {"run": name, "step": step, "value": share}
        for name, one in chosen.items()
        for step, (share, _) in one.flushed.items()
    ]


def draw(runs: list[Hard], out: Path) -> None:
    import altair as alt

    data = points(runs)
    kinds = sorted({point["panel"] for point in data}, key=lambda kind: (kind.split(",")[0] != "undivided", kind))
    spans = {f"{one.kind}, norm {one.norm}": (one.first, one.first + one.count) for one in runs}
    names = [name for name in COLOURS if name in {point["run"] for point in data}]
    colour = alt.Color("run:N", title=None, scale=alt.Scale(domain=names, range=[COLOURS[name] for name in names]))

    def panel(quantity: str, kind: str, scale: alt.Scale) -> alt.LayerChart:
        chosen = [point for point in data if point["quantity"] == quantity and point["panel"] == kind]
        first, last = spans[kind]
        hard = alt.Chart(alt.Data(values=[{"a": first, "b": last}])).mark_rect(color="#dddddd")
        axis = alt.Axis(format="%", minExtent=40) if quantity == "layers underflowing" else alt.Axis(minExtent=40)
        y = alt.Y("value:Q", title=quantity, scale=scale, axis=axis)
        lines = alt.Chart(alt.Data(values=chosen)).mark_line(point=quantity == "recall@10")
        dash = alt.StrokeDash("run:N", legend=None, scale=alt.Scale(domain=names, range=DASHES[: len(names)]))
        lines = lines.encode(x=alt.X("step:Q", title="step"), y=y, color=colour, strokeDash=dash)
        return alt.layer(hard.encode(x="a:Q", x2="b:Q"), lines).properties(title=kind, width=260, height=150)

    scales = {"loss scale": alt.Scale(type="log", base=2), "loss": alt.Scale(zero=False), "recall@10": alt.Scale()}
    scales["layers underflowing"] = alt.Scale(domain=[0, 1])
    grid = alt.vconcat(*(alt.hconcat(*(panel(q, kind, scale) for kind in kinds)) for q, scale in scales.items()))
    if both := beside(runs):
        names = [name for name in COLOURS if name in {point["run"] for point in both}]
        tone = alt.Scale(domain=names, range=[COLOURS[name] for name in names])
        axis = alt.Axis(format=".0e", values=[0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1])
        share = alt.Y("value:Q", title="gradients flushed", scale=alt.Scale(type="symlog", constant=1e-6), axis=axis)
        lines = alt.Chart(alt.Data(values=both), title="CLIP beside YOLO", width=560, height=170).mark_line(point=True)
        lines = lines.encode(x=alt.X("step:Q", title="step"), y=share, color=alt.Color("run:N", title=None, scale=tone))
        grid = alt.vconcat(grid, lines).resolve_scale(color="independent")
    out.parent.mkdir(parents=True, exist_ok=True)
    for ending in ("png", "svg"):
        grid.save(out.with_suffix(f".{ending}"), **({"scale_factor": 2} if ending == "png" else {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--table", type=Path, default=Path("results/tables/clip_hard"))
    parser.add_argument("--figure", type=Path, default=Path("results/figures/clip_hard"))
    chosen = parser.parse_args()
    try:
        runs, left_out = read(chosen.folders)
    except UserError as error:
        raise SystemExit(str(error)) from None
    print(*left_out, sep="\n", end="\n" if left_out else "")
    table = rows(runs)
    if not table:
        raise SystemExit(
            "no finished run of clip_hard there; make some: mptrain -m +recipe=clip_hard precision=fp16,bf16"
        )
    said = verdicts(table)
    write(table, said, [one for one in runs if one.run.recipe == "clip_hard"], chosen.table)
    try:
        draw(runs, chosen.figure)
    except ImportError as error:
        raise SystemExit(f"the table is written; the figure needs pip install 'mptrain[report]' ({error})") from None
    print("\n".join(said))


if __name__ == "__main__":
    main()
