"""The tables of a reproduction: paper beside here, the verdicts on the claims, and the seeds they follow from."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mptrain.errors import UserError
from mptrain.paper import Paper, paper_of
from mptrain.results.claims import NOT_AT_THIS_SIZE, SHOWS, UNDECIDED, Verdict, verdicts_of
from mptrain.results.csvfile import write_csv
from mptrain.results.document import Block, Cell, Column, Document, Tone
from mptrain.results.first_screen import first_screen_block
from mptrain.results.markdown import markdown
from mptrain.results.named import Named, Records, named_runs
from mptrain.results.quantities import quantity
from mptrain.results.row import Row
from mptrain.results.runs import Excluded, Run
from mptrain.results.shared import side_by_side
from mptrain.results.statistics import decimals, paired_difference, verdict
from mptrain.results.summary import clean
from mptrain.results.table import build_table
from mptrain.results.words import document_of

BASELINE = "fp32"


@dataclass(frozen=True)
class Seed:
    """One run of a claim or table: what every verdict can be computed from again."""

    recipe: str
    run: str  # its name in the recipe
    precision: str
    scale: str
    seed: int
    status: str
    steps: int
    metric: str
    higher_is_better: bool
    margin: float
    value: float | None
    training_loss: float | None
    throughput: float | None
    memory_mib: float | None
    skipped: int
    attempted: int
    grad_input_zero: float | None
    grad_input_flushed: float | None
    grad_weight_flushed: float | None
    folder: str
    quantities: str  # JSON: every other number that a claim of the recipe is about


@dataclass(frozen=True)
class Printed:
    """A value that the paper prints, beside what came out here with a small network and small data."""

    recipe: str
    where: str
    paper_metric: str
    run: str
    printed: str
    metric: str
    mean: float | None
    sd: float | None
    seeds: int
    diverged: int
    beside_fp32: str  # the table's verdict: equal, better, worse, undecided; empty for FP32 itself
    device: str


def write_tables(folder: Path, runs: list[Run], excluded: list[Excluded], recipes: list[str]) -> list[Path]:
    """Writes all.*, reproduced.*, claims.* (csv and md), first_screen.md and seeds.csv; returns their paths."""
    found = Records(runs, excluded)
    table = build_table(runs, excluded)
    lines, claims = printed(recipes, found), verdicts_of(runs, excluded, recipes)
    texts = {
        "all.csv": write_csv(table.rows, Row),
        "all.md": markdown(document_of(table)),
        "reproduced.csv": write_csv(lines, Printed),
        "reproduced.md": markdown(Document([printed_block(lines, made(runs))])),
        "claims.csv": write_csv(claims, Verdict),
        "claims.md": markdown(Document([claims_block(claims, made(runs))])),
        "first_screen.md": markdown(Document([first_screen_block(claims, made(runs))])),
        "seeds.csv": write_csv(seeds(recipes, found), Seed),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror}); give another folder: --tables FOLDER"
        ) from error
    return [folder / name for name in texts]


def printed(recipes: Iterable[str], found: Records) -> list[Printed]:
    """A line for every run for which the paper prints something, and for the FP32 it is compared with."""
    return [line for recipe in recipes for line in _printed(recipe, paper_of(recipe), found)]


def _printed(recipe: str, paper: Paper, found: Records) -> list[Printed]:
    names = [name for name, run in paper.runs.items() if run.printed is not None]
    if names and BASELINE in paper.runs and BASELINE not in names:
        names.insert(0, BASELINE)
    lines = []
    for name in names:
        both = named_runs(recipe, paper.runs, list(dict.fromkeys([name, BASELINE])), found)
        runs = list(both.runs[name].values())
        values = [run.value for run in runs if run.value is not None]
        text = paper.runs[name].printed
        lines.append(
            Printed(
                recipe=recipe,
                where=paper.where or "",
                paper_metric=paper.metric or "",
                run=name,
                printed="" if text is None else text if isinstance(text, str) else f"{text:g}",
                metric=runs[0].metric if runs else "",
                mean=statistics.mean(values) if values else None,
                sd=statistics.stdev(values) if len(values) > 1 else None,
                seeds=len(values),
                diverged=sum(run.status == "diverged" for run in runs),
                beside_fp32="" if name == BASELINE else _beside(name, both),
                device=runs[0].device_name if runs else "",
            )
        )
    return lines


def _beside(name: str, both: Named) -> str:
    runs = both.runs[name]
    if not runs:
        return ""
    diverged = sum(run.status == "diverged" for run in runs.values())
    if diverged:
        return f"{diverged}/{len(runs)} diverged"
    own, other = (
        {seed: run.value for seed, run in seeds.items() if run.value is not None}
        for seeds in (runs, both.runs[BASELINE])
    )
    first = next(iter(runs.values()))
    difference = paired_difference(own, other, first.margin)
    return verdict(difference, first.margin, first.higher_is_better, decimals(first.margin))


def seeds(recipes: Iterable[str], found: Records) -> list[Seed]:
    """Every run that a recipe names, with the numbers that claims are about."""
    lines = []
    for recipe in recipes:
        known, claims = paper_of(recipe).runs, paper_of(recipe).claims
        for run in sorted(found.of(recipe), key=lambda run: (run.precision, run.scale, run.seed, run.folder)):
            for name in found.names(run, known):
                wanted = {claim.of for claim in claims if name in claim.runs and claim.of != "metric"}
                lines.append(_seed(recipe, name, run, {of: quantity(run, of) for of in sorted(wanted)}))
    return lines


def _seed(recipe: str, name: str, run: Run, quantities: dict[str, float | None]) -> Seed:
    return Seed(
        recipe=recipe,
        run=name,
        precision=run.precision_label,
        scale=run.scale,
        seed=run.seed,
        status=run.status,
        steps=int(run.key["steps"] or 0),
        metric=run.metric,
        higher_is_better=run.higher_is_better,
        margin=run.margin,
        value=run.value,
        training_loss=quantity(run, "training loss"),
        throughput=run.throughput,
        memory_mib=run.memory_mib,
        skipped=run.skipped,
        attempted=run.attempted,
        grad_input_zero=quantity(run, "counts.grad_input.zero"),
        grad_input_flushed=quantity(run, "counts.grad_input.flushed"),
        grad_weight_flushed=quantity(run, "counts.grad_weight.flushed"),
        folder=os.path.basename(run.folder),
        quantities=json.dumps(quantities),
    )


def made(runs: list[Run]) -> str:
    """Where, when and in how many hours the runs were made."""
    if not runs:
        return "no run has a result"
    devices, versions, commits = (
        ", ".join(sorted({value or "unknown" for value in values}))
        for values in zip(*((run.device_name, run.torch, run.commit) for run in runs), strict=True)
    )
    days = sorted({run.finished.date().isoformat() for run in runs})
    hours = sum(quantity(run, "seconds") or 0.0 for run in runs) / 3600
    finished = " to ".join(dict.fromkeys((days[0], days[-1])))
    beside = ", side by side" if side_by_side(runs) else ""
    took = f"{len(runs)} runs that took {hours:.1f} hours in all{beside}, finished {finished}"
    return clean(f"{took}, device {devices}, torch {versions}, commit {commits}.")


TONES: dict[str, Tone] = {SHOWS: "good", NOT_AT_THIS_SIZE: "bad", UNDECIDED: "plain"}


def claims_block(claims: list[Verdict], made: str) -> Block:
    """The verdicts as a table."""
    columns = [
        Column("paper", "recipe", least=13),
        Column("claim", least=30),
        Column("verdict", least=10),
        Column("numbers", "", "fold"),
    ]
    cells = [
        [
            Cell(each.where, each.recipe),
            Cell(each.claim),
            Cell(each.verdict, tone=TONES.get(each.verdict, "quiet")),
            Cell(each.numbers),
        ]
        for each in claims
    ]
    lines = [
        "shows: the interval of the number lies where the claim says; not at this size: it lies outside; undecided: "
        "neither, more seeds are needed. Intervals are over seeds, of 95 %; equality by two one-sided tests at "
        "5 %, which is by the interval of 90 %.",
        "Every test in words, with its numbers and folders, is in claims.csv; the seeds are in seeds.csv.",
        made,
    ]
    return Block("Claims", lines, columns, cells, [])


def printed_block(lines: list[Printed], made: str) -> Block:
    """Paper beside here as a table."""
    columns = [
        Column("paper", "recipe", least=13),
        Column("run"),
        Column("paper", "metric", number=True),
        Column("here", "± sd, seeds", number=True),
        Column("metric here", "", "drop"),
        Column("beside FP32 here", least=13),
    ]
    cells = [
        [
            Cell(each.where, each.recipe),
            Cell(each.run),
            Cell(each.printed, each.paper_metric if _is_number(each.printed) else ""),
            _here(each),
            Cell(each.metric),
            Cell(each.beside_fp32),
        ]
        for each in lines
    ]
    about = "Small networks on small data: what compares with the paper is the difference between runs, not the score."
    return Block("Paper and here", [about, made], columns, cells, [])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _here(line: Printed) -> Cell:
    if line.mean is None:
        return Cell("diverged" if line.diverged else "not run", tone="bad" if line.diverged else "quiet")
    spread = "" if line.sd is None else f"± {line.sd:.2g}, "
    return Cell(f"{line.mean:.4g}", f"{spread}n={line.seeds}")
