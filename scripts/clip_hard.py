"""Table and figure of recipe clip_hard, from its records alone: what ten hard batches do to a run, beside BF16.

    python scripts/clip_hard.py results/runs [--table results/tables/clip_hard] [--figure results/figures/clip_hard]

Make the records first, e.g. `mptrain -m +recipe=clip_hard precision=fp32,bf16,fp16 seed=0,1`, and the same with
task.hard=shuffled, task.norm=batch or scaling.interval=50. The figure (PNG and SVG) needs `pip install
'mptrain[report]'`. The verdict is printed, whatever it is.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mptrain import files
from mptrain.results.quantities import logged
from mptrain.results.runs import Run, find_runs

COLUMNS = ("hard batches", "norm", "precision", "growth interval", "seeds", "recall@10 before", "recall@10 at the end")
COLUMNS += ("recall@10 by seed", "skipped steps", "final scale", "status", "commits")


@dataclass(frozen=True)
class Hard:
    """One run of the recipe: its summary, what the command line chose, and the lines of its metrics.jsonl."""

    run: Run
    kind: str
    norm: str
    interval: str
    first: int
    lines: list[dict[str, Any]]

    @property
    def group(self) -> tuple[str, str, str, str]:
        return self.kind, self.norm, self.run.precision_label, self.interval

    def recall_before(self) -> float | None:
        """The last evaluation before the first hard batch."""
        found = [line["eval"]["recall@10"] for line in self.lines if "eval" in line and line["step"] <= self.first]
        return found[-1] if found else None


def read(folders: list[Path]) -> list[Hard]:
    runs, excluded = find_runs(folders)
    for one in excluded:
        print(f"left out: {one.folder}: {one.reason}")
    found = []
    for run in (run for run in runs if run.recipe == "clip_hard"):
        config = files.read_yaml(Path(run.folder) / "config.yaml")
        task = config["task"]
        interval = str(config["scaling"]["interval"]) if run.scale == "dynamic" else ""
        lines = logged(Path(run.folder) / "metrics.jsonl")
        found.append(Hard(run, str(task["hard"]), task["norm"], interval, task["hard_from"], lines))
    return sorted(found, key=lambda hard: (*hard.group, hard.run.seed))


def rows(runs: list[Hard]) -> list[dict[str, str]]:
    groups = defaultdict(list)
    for run in runs:
        groups[run.group].append(run)
    return [row(group, members) for group, members in groups.items()]


def row(group: tuple[str, str, str, str], members: list[Hard]) -> dict[str, str]:
    ends = [hard.run.value for hard in members if hard.run.value is not None]
    before = [value for hard in members if (value := hard.recall_before()) is not None]
    values = (
        *group,
        ", ".join(str(hard.run.seed) for hard in members),
        mean(before),
        mean(ends),
        ", ".join("none" if hard.run.value is None else f"{hard.run.value:.3f}" for hard in members),
        ", ".join(str(hard.run.skipped) for hard in members),
        ", ".join("none" if hard.run.final_scale is None else f"{hard.run.final_scale:g}" for hard in members),
        ", ".join(sorted({hard.run.status for hard in members})),
        ", ".join(sorted({hard.run.commit for hard in members})),
    )
    return dict(zip(COLUMNS, values, strict=True))


def mean(values: list[float]) -> str:
    return f"{statistics.fmean(values):.3f}" if values else "none"


def verdicts(table: list[dict[str, str]]) -> list[str]:
    """FP16 beside BF16, a sentence for each kind of hard batch, norm and growth interval."""
    said = []
    for row in (row for row in table if row["precision"] == "fp16"):
        where = f"{row['hard batches']}, norm {row['norm']}, interval {row['growth interval']}"
        others = [o for o in table if o["precision"] == "bf16" and all(o[c] == row[c] for c in COLUMNS[:2])]
        beside = f"; BF16 ends at {others[0]['recall@10 at the end']} (seeds {others[0]['seeds']})" if others else ""
        said.append(
            f"{where}: FP16 skipped {row['skipped steps']} steps, its scale ended at {row['final scale']}, recall@10 "
            f"went from {row['recall@10 before']} to {row['recall@10 at the end']} (seeds {row['seeds']}){beside}."
        )
    return said


def points(runs: list[Hard]) -> list[dict[str, Any]]:
    """Loss, scale and recall of the first seed of each group, one dict a point; what is not finite is left out."""
    found, seen = [], set()
    for hard in runs:
        if hard.group in seen:
            continue
        seen.add(hard.group)
        interval = f", interval {hard.interval}" if hard.interval not in ("", "2000") else ""
        base = {"run": f"{hard.run.precision_label}{interval}", "panel": f"{hard.kind}, norm {hard.norm}"}
        for line in hard.lines:
            values = {"recall@10": line["eval"]["recall@10"]} if "eval" in line else {}
            values |= {name: line[key] for name, key in (("loss", "loss"), ("loss scale", "scale")) if key in line}
            found += [
                base | {"step": line["step"], "quantity": name, "value": value}
                for name, value in values.items()
                if value is not None
            ]
    return found


def draw(runs: list[Hard], out: Path) -> None:
    import altair as alt

    def panel(quantity: str, kind: str, scale: alt.Scale) -> alt.Chart:
        chosen = [point for point in data if point["quantity"] == quantity and point["panel"] == kind]
        return (
            alt.Chart(alt.Data(values=chosen), title=kind, width=330, height=170)
            .mark_line(point=quantity == "recall@10")
            .encode(
                x=alt.X("step:Q", title="step"),
                y=alt.Y("value:Q", title=quantity, scale=scale),
                color=alt.Color("run:N", title=None),
            )
        )

    data = points(runs)
    kinds = sorted({point["panel"] for point in data}, reverse=True)
    axes = {"loss scale": alt.Scale(type="log", base=2), "loss": alt.Scale(), "recall@10": alt.Scale()}
    chart = alt.vconcat(*(alt.hconcat(*(panel(q, kind, scale) for kind in kinds)) for q, scale in axes.items()))
    out.parent.mkdir(parents=True, exist_ok=True)
    for ending in ("png", "svg"):
        chart.save(out.with_suffix(f".{ending}"), **({"scale_factor": 2} if ending == "png" else {}))


def write(table: list[dict[str, str]], said: list[str], runs: list[Hard], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    some = runs[0].run
    about = f"Recipe clip_hard, {some.attempted} steps, {some.device_name}, torch {some.torch}."
    lines = ["# CLIP through hard batches", "", about, "", "| " + " | ".join(COLUMNS) + " |"]
    lines += ["|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(row[name] for name in COLUMNS) + " |" for row in table]
    lines += ["", *(f"- {sentence}" for sentence in said), ""]
    out.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--table", type=Path, default=Path("results/tables/clip_hard"))
    parser.add_argument("--figure", type=Path, default=Path("results/figures/clip_hard"))
    chosen = parser.parse_args()
    runs = read(chosen.folders)
    if not runs:
        raise SystemExit(
            "no finished run of clip_hard there; make some: mptrain -m +recipe=clip_hard precision=fp16,bf16"
        )
    table = rows(runs)
    said = verdicts(table)
    write(table, said, runs, chosen.table)
    draw(runs, chosen.figure)
    print("\n".join(said))


if __name__ == "__main__":
    main()
