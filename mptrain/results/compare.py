"""`mptrain compare [FOLDER ...]`: put the runs in these folders beside their FP32 baseline."""

import argparse
import os
import sys
from pathlib import Path

from mptrain.errors import UserError
from mptrain.results.between import Pair, between_blocks, pair_up
from mptrain.results.csvfile import write_csv
from mptrain.results.document import Document
from mptrain.results.markdown import markdown
from mptrain.results.row import Row
from mptrain.results.runs import find_runs, some_runs
from mptrain.results.summary import clean
from mptrain.results.table import build_table
from mptrain.results.terminal import print_document
from mptrain.results.webpage import webpage
from mptrain.results.words import document_of

REGRESSION = 3  # exit status

DESCRIPTION = """\
Print the runs found below the folders as tables: one table for each set of runs that may be compared (same recipe,
data, steps, batch size, settings, device and torch version), one line for each precision and loss scale, each beside
the FP32 runs of the same table. Runs that are in no table are listed with the reason."""

READING = """\
how to read it:
  metric      mean over seeds +- standard deviation; the range for two seeds
  minus fp32  mean difference paired by seed, with its 95 % confidence interval (paired t)
  verdict     equal: shown to lie within the margin (two one-sided tests, 5 %); better or worse: the interval
              excludes zero; undecided: neither is shown, and more seeds are needed
  ratio       throughput or peak memory over that of FP32; n/a where one of the two was not measured; shared where
              another run had the same CPUs meanwhile, so that its throughput says little
  arithmetic  native or emulated, and the dtypes of matrix products, softmax, norms and loss

  regression  with --between: what is worse in the second folder, beyond noise: more seeds diverged; a worse metric
              whose 95 % interval excludes zero (with one seed: by more than the task's margin); on the same device
              a twentieth more memory, or, of runs that shared no CPUs, a fifth slower

exit status: 0 with a table; 1 if there is nothing to compare or a folder cannot be read; 2 for a wrong option;
3 if --between marks a regression"""


def parser() -> argparse.ArgumentParser:
    """The command line of `mptrain compare`."""
    result = argparse.ArgumentParser(
        "mptrain compare", description=DESCRIPTION, epilog=READING, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("folders", metavar="FOLDER", nargs="*", help="where to look for runs (default: results/runs)")
    result.add_argument("--baseline", metavar="PRECISION", default="fp32", help="compare with it (default: fp32)")
    result.add_argument("--between", action="store_true", help="also put the second of two FOLDERs beside the first")
    result.add_argument("--csv", metavar="FILE", help="write every line with all its digits, and the runs left out")
    result.add_argument("--md", metavar="FILE", help="write the tables as Markdown")
    result.add_argument("--html", metavar="FILE", help="write the tables as a web page of one file")
    return result


def compare(argv: list[str]) -> int:
    """Run the command; the exit status is 0, 1 with nothing to compare, 2 for a wrong option, 3 for a regression."""
    try:
        options = parser().parse_args(argv)
    except SystemExit as stop:  # --help, or an option that argparse has explained already
        return int(stop.code or 0)
    try:
        return _compare(options)
    except UserError as error:
        print(f"mptrain: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader, `head` for instance, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _compare(options: argparse.Namespace) -> int:
    folders = [Path(folder) for folder in options.folders or ["results/runs"]]
    if options.between and len(folders) != 2:
        raise UserError(
            f"--between takes two folders, got {len(folders)}; type: mptrain compare FIRST SECOND --between."
        )
    runs, excluded = some_runs(folders)
    names = clean(", ".join(map(str, folders)))
    precisions = sorted({run.precision for run in runs})
    if runs and options.baseline not in ["fp32", *precisions]:
        raise UserError(
            f"No run has precision {clean(options.baseline)}; there are {', '.join(precisions)}. "
            f"Type: mptrain compare --baseline {precisions[0]}."
        )
    table = build_table(runs, excluded, options.baseline)
    document = document_of(table)
    regressed = False
    if options.between:
        first, second = (build_table(*find_runs([folder]), options.baseline) for folder in folders)
        pairs, alone = pair_up(first, second)
        regressed = any(pair.regressions for pair in pairs)
        blocks = between_blocks(pairs, *(clean(str(folder)) for folder in folders))
        lists = {**document.lists, **({"In one of the two folders only": alone} if alone else {})}
        document = Document(document.blocks + blocks, lists)
        if options.csv:
            _write(str(Path(options.csv).with_suffix("")) + "-between.csv", write_csv(pairs, Pair))
    if options.csv:
        _write(options.csv, write_csv(table.rows, Row))
    if options.md:
        _write(options.md, markdown(document))
    if options.html:
        _write(options.html, webpage(document, "mptrain: runs compared"))
    print_document(document)
    if not table.groups:
        raise UserError(f"No run in {names} has a result to compare; the list above says why.")
    return REGRESSION if regressed else 0


def _write(file: str, text: str) -> None:
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot write {clean(file)} ({error.strerror}); give a file that may be written.") from error
