"""`mptrain report [FOLDER ...]`: what the records below these folders say, as one page."""

import argparse
from pathlib import Path

from mptrain.errors import UserError
from mptrain.results.report.contents import contents
from mptrain.results.report.page import page
from mptrain.results.summary import clean

RUNS, PROBES = Path("results/runs"), Path("results/probes")


def parser() -> argparse.ArgumentParser:
    """The command line of `mptrain report`."""
    result = argparse.ArgumentParser(
        "mptrain report",
        description="Write one HTML file from the records below the folders: the paper's claims, its values beside "
        "ours, every table, what watched runs and probes saw of their gradients, and the number formats to try. It "
        "needs no network. Records that cannot be used are listed in it with the reason.",
    )
    result.add_argument(
        "folders",
        metavar="FOLDER",
        nargs="*",
        help=f"where to look for runs and probes (default: {RUNS}, and {PROBES} for probes)",
    )
    result.add_argument("-o", "--output", metavar="FILE", default="report.html", help="the page (default: %(default)s)")
    return result


def report(argv: list[str]) -> int:
    """Runs the command; returns the exit status: 0, or 2 for a wrong option."""
    try:
        options = parser().parse_args(argv)
    except SystemExit as stop:  # --help, or an option that argparse has explained already
        return int(stop.code or 0)
    folders = [Path(folder) for folder in options.folders]
    output = Path(options.output)
    text = page(contents(folders or [RUNS], [] if folders else [PROBES]))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"Cannot write {clean(str(output))} ({error.strerror}); give a file that may be written: -o FILE."
        ) from error
    print(f"wrote {output} ({len(text.encode()) / 1e6:.1f} MB)")
    return 0
