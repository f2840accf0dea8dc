"""What stands on the page, part by part, from the records below some folders."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from mptrain import files
from mptrain.results.claims import verdicts_of
from mptrain.results.document import Block
from mptrain.results.named import Records
from mptrain.results.report.curves import curves, logs
from mptrain.results.report.figure import Figure, beside
from mptrain.results.report.heatmap import heatmap
from mptrain.results.report.histogram import histogram_section
from mptrain.results.report.inside import Seen, label, seen
from mptrain.results.report.memory import estimated, memory_part, recorded
from mptrain.results.report.operations import policy_block, ran_block
from mptrain.results.report.page import Part, formats_part, step_part
from mptrain.results.reproduced import claims_block, made, printed, printed_block
from mptrain.results.row import Group
from mptrain.results.runs import Run, some_runs
from mptrain.results.table import build_table
from mptrain.results.webpage import listed, section
from mptrain.results.words import document_of


@dataclass(frozen=True)
class Contents:
    """The page's parts, and the figures that stand in them."""

    parts: list[Part]
    figures: list[Figure]


def contents(folders: list[Path], probed: list[Path]) -> Contents:
    """All of it. probed: where else probes may lie. Raises UserError if there is no run in the folders."""
    runs, excluded = some_runs(folders)
    inside = seen(runs, [*folders, *probed])
    table = build_table(runs, excluded)
    tables = document_of(table)
    present = {run.recipe for run in runs}
    recipes = [name for name in files.names("recipe") if name in present]
    claims, lines = verdicts_of(runs, excluded, recipes), printed(recipes, Records(runs, excluded))

    parts = [_part("claims", claims_block(claims, made(runs)))] if claims else []
    parts += [_part("paper", printed_block(lines, made(runs)))] if lines else []
    histogram, no_room = histogram_section(inside.gradients)
    parts += [Part("histogram", "Gradients by exponent, under a loss scale", histogram), step_part(), formats_part()]
    parts += [_part("ran", ran_block(runs)), _part("policy", policy_block())] if runs else []
    memory, drawn = memory_part(estimated())
    parts.append(memory)
    numbers: Counter[str] = Counter()
    for block, group in zip(tables.blocks, table.groups, strict=True):
        recipe = f"recipe-{slug(group.rows[0].recipe)}"
        numbers[recipe] += 1
        anchor = recipe if numbers[recipe] == 1 else f"{recipe}-{numbers[recipe]}"
        figures = curves(anchor, group, logs(group)) + recorded(anchor, group)
        figures += heatmaps(anchor, group, runs, inside)
        parts.append(Part(anchor, block.title, section(block, anchor, beside(figures))))
        drawn += figures
    lists = tables.lists | {"Not on this page": inside.unread + no_room}
    parts += [Part(slug(name), name, listed(name, lines, slug(name))) for name, lines in lists.items() if lines]
    return Contents(parts, drawn)


def _part(anchor: str, block: Block) -> Part:
    return Part(anchor, block.title, section(block, anchor))


def heatmaps(anchor: str, group: Group, runs: list[Run], inside: Seen) -> list[Figure]:
    """Of every watched run of a group."""
    of_group = {folder for row in group.rows for folder in row.folders.split(" | ")}
    watched = [run for run in runs if run.folder in of_group and run.folder in inside.losses]
    return [
        figure
        for number, run in enumerate(watched, start=1)
        for figure in heatmap(f"{anchor}-underflow-{number}", label(run), inside.losses[run.folder])
    ]


def slug(text: str) -> str:
    """A text as an anchor or a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60]
