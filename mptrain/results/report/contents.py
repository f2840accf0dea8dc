"""What stands on the page, part by part, from the records below some folders."""

from __future__ import annotations

import re
from pathlib import Path

from mptrain import files
from mptrain.results.claims import verdicts_of
from mptrain.results.named import Records
from mptrain.results.report.histogram import histogram_section
from mptrain.results.report.inside import seen
from mptrain.results.report.page import Part, formats_part
from mptrain.results.reproduced import claims_block, made, printed, printed_block
from mptrain.results.runs import some_runs
from mptrain.results.table import build_table
from mptrain.results.webpage import listed, section
from mptrain.results.words import document_of


def contents(folders: list[Path], probed: list[Path]) -> list[Part]:
    """All parts. probed: where else probes may lie. Raises UserError if there is no run in the folders."""
    runs, excluded = some_runs(folders)
    inside = seen(runs, [*folders, *probed])
    tables = document_of(build_table(runs, excluded))
    present = {run.recipe for run in runs}
    recipes = [name for name in files.names("recipe") if name in present]
    claims, lines = verdicts_of(runs, excluded, recipes), printed(recipes, Records(runs, excluded))

    parts = [Part("claims", "Claims", section(claims_block(claims, made(runs)), "claims"))] if claims else []
    parts += [Part("paper", "Paper and here", section(printed_block(lines, made(runs)), "paper"))] if lines else []
    histogram, no_room = histogram_section(inside.gradients)
    parts += [Part("histogram", "Gradients by exponent, under a loss scale", histogram), formats_part()]
    for number, block in enumerate(tables.blocks, start=1):
        anchor = f"table-{number}-{slug(block.title.split(' ')[0])}"
        parts.append(Part(anchor, block.title, section(block, anchor)))
    lists = tables.lists | {"Not on this page": inside.unread + no_room}
    parts += [Part(slug(name), name, listed(name, lines, slug(name))) for name, lines in lists.items() if lines]
    return parts


def slug(text: str) -> str:
    """A text as an anchor or a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60]
