"""`mptrain report [FOLDER ...]`: what the records below these folders say, as one page."""

import argparse
from pathlib import Path

from mptrain.errors import UserError
from mptrain.results.report.charts import files_of
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
    result.add_argument("--figures", metavar="FOLDER", help="write every figure there too, as PNG and as SVG")
    return result


def report(argv: list[str]) -> int:
    """Runs the command; returns the exit status: 0, or 2 for a wrong option."""
    try:
        options = parser().parse_args(argv)
    except SystemExit as stop:  # --help, or an option that argparse has explained already
        return int(stop.code or 0)
    folders = [Path(folder) for folder in options.folders]
    output = Path(options.output)
    found = contents(folders or [RUNS], [] if folders else [PROBES])
    text = page(found.parts)
    _write(output, text.encode(), "give a file that may be written: -o FILE")
    print(f"wrote {output} ({len(text.encode()) / 1e6:.1f} MB)")
    if options.figures:
        for figure in found.figures:
            for ending, content in files_of(figure.chart()).items():
                _write(
                    Path(options.figures) / f"{figure.name}.{ending}", content, "give another folder: --figures FOLDER"
                )
        print(f"wrote {len(found.figures)} figures, PNG and SVG, to {options.figures}")
    return 0


def _write(path: Path, content: bytes, cure: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise UserError(f"Cannot write {clean(str(path))} ({error.strerror}); {cure}.") from error
