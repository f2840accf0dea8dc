"""`mptrain report [FOLDER ...]`: claims and tables of these folders, and the number formats, as one page."""

import argparse
from pathlib import Path

from mptrain import files
from mptrain.errors import UserError
from mptrain.results.claims import verdicts_of
from mptrain.results.document import Document
from mptrain.results.named import Records
from mptrain.results.report.page import page
from mptrain.results.reproduced import claims_block, made, printed, printed_block
from mptrain.results.runs import some_runs
from mptrain.results.summary import clean
from mptrain.results.table import build_table
from mptrain.results.words import document_of


def parser() -> argparse.ArgumentParser:
    """The command line of `mptrain report`."""
    result = argparse.ArgumentParser(
        "mptrain report",
        description="Write one HTML file from the records below the folders: the paper's claims, its values beside "
        "ours, every table, and the number formats to try. It needs no network. Records that cannot be used are "
        "listed in it with the reason.",
    )
    result.add_argument("folders", metavar="FOLDER", nargs="*", help="where to look for runs (default: results/runs)")
    result.add_argument("-o", "--output", metavar="FILE", default="report.html", help="the page (default: %(default)s)")
    return result


def report(argv: list[str]) -> int:
    """Runs the command; returns the exit status: 0, or 2 for a wrong option."""
    try:
        options = parser().parse_args(argv)
    except SystemExit as stop:  # --help, or an option that argparse has explained already
        return int(stop.code or 0)
    output = Path(options.output)
    text = page(document([Path(folder) for folder in options.folders or ["results/runs"]]))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"Cannot write {clean(str(output))} ({error.strerror}); give a file that may be written: -o FILE."
        ) from error
    print(f"wrote {output} ({len(text.encode()) / 1e6:.1f} MB)")
    return 0


def document(folders: list[Path]) -> Document:
    """Claims and printed values of the recipes that have runs here, then the tables, then what was left out."""
    runs, excluded = some_runs(folders)
    tables = document_of(build_table(runs, excluded))
    present = {run.recipe for run in runs}
    recipes = [name for name in files.names("recipe") if name in present]
    claims, lines = verdicts_of(runs, excluded, recipes), printed(recipes, Records(runs, excluded))
    blocks = [claims_block(claims, made(runs))] if claims else []
    blocks += [printed_block(lines, made(runs))] if lines else []
    return Document(blocks + tables.blocks, tables.lists)
