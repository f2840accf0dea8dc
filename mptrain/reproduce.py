"""`mptrain reproduce [RECIPE ...|all]`: the runs that recipes name, those that are missing, and the tables of all."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

from mptrain import files, jobs
from mptrain.durations import Durations, clock
from mptrain.errors import UserError
from mptrain.paper import lineage
from mptrain.plan import Planned, plan
from mptrain.results.reproduced import write_tables
from mptrain.results.runs import find_runs
from mptrain.results.summary import clean

PROGRAM = [sys.executable, "-m", "mptrain"]
BUDGET = 120 * 60  # seconds that all small recipes may take on two cores

DESCRIPTION = """\
Train every run that the recipes name in their `paper:` block, with several seeds, and write the tables: the paper's
values beside ours, and a verdict on each claim. Finished runs are kept, interrupted ones go on, failed ones are named
and tried again the next time. Small recipes run at the lengths of `paper.quick`, on one CPU thread each, one run for
every core."""

READING = """\
KEY=VALUE (data_dir=FOLDER, device=cuda:1, threads=2, ...) is given to every run.

exit status: 0 if every run has a result, or diverged; 1 if some failed; 2 for a wrong option; 130 if interrupted"""


def parser() -> argparse.ArgumentParser:
    """The command line of `mptrain reproduce`."""
    result = argparse.ArgumentParser(
        "mptrain reproduce",
        description=DESCRIPTION,
        epilog=READING,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("recipes", metavar="RECIPE", nargs="*", help="names of recipes, or all (default: all)")
    result.add_argument("--paper-size", action="store_true", help="the recipes at the paper's size instead")
    result.add_argument(
        "--seeds", type=_natural, metavar="N", help="seeds 0 to N-1 of every run (default: the recipe's)"
    )
    result.add_argument(
        "--jobs", type=_natural, metavar="N", help="runs at a time (default: one for every core; 1 on a GPU)"
    )
    result.add_argument("--dry-run", action="store_true", help="say what would run and for how long; run nothing")
    result.add_argument("--results", metavar="FOLDER", default="results/runs", help="where runs go (%(default)s)")
    result.add_argument("--tables", metavar="FOLDER", default="results/tables", help="where tables go (%(default)s)")
    return result


def _natural(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text}: give a whole number from 1 to 1000")
    return int(text)


def reproduce(argv: list[str]) -> int:
    """Runs the command; returns the exit status."""
    try:
        options = parser().parse_intermixed_args(argv)
    except SystemExit as stop:  # --help, or an option that argparse has explained already
        return int(stop.code or 0)
    words: list[str] = options.recipes
    overrides = [word for word in words if "=" in word]
    recipes = _recipes([word for word in words if "=" not in word], options.paper_size)
    gpu = _gpu(overrides)
    planned = plan(recipes, options.seeds, _common(overrides, options, gpu), quick=not options.paper_size)
    if not planned:
        raise UserError(f"{', '.join(recipes)}: no runs are named in paper.runs; see recipes/README.md")
    workers = options.jobs or (1 if gpu or options.paper_size else _cores())
    durations = Durations(planned, recorded=not options.paper_size and not gpu)
    if options.dry_run:
        _say(planned, durations, workers)
        return 0
    failed = _run([each for each in planned if each.state not in ("finished", "diverged")], durations, workers)
    _tables(planned, Path(options.results), Path(options.tables))
    for outcome in failed:
        print(f"failed: {outcome.job.name}: {clean(outcome.message)}\n  mptrain {shlex.join(outcome.job.argv)}")
    return 1 if failed else 0


def _recipes(named: list[str], paper_size: bool) -> list[str]:
    known = files.names("recipe")
    if not named or named == ["all"]:
        return [name for name in known if name.endswith("_paper") == paper_size]
    chosen = []
    for name in named:
        if name not in known:
            raise UserError(f"recipe {name} is unknown; {files.suggest(name, known)}")
        large = [other for other in known if other.endswith("_paper") and name in lineage(other)]
        if paper_size and not large:
            raise UserError(f"recipe {name} has none at the paper's size; leave --paper-size out")
        chosen += large if paper_size else [name]
    return list(dict.fromkeys(chosen))


def _gpu(overrides: list[str]) -> bool:
    """Whether the runs take a GPU."""
    device = next((text.partition("=")[2] for text in overrides if text.startswith("device=")), "auto")
    if device != "auto":
        return device.startswith("cuda")
    import torch

    return torch.cuda.is_available()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _common(overrides: list[str], options: argparse.Namespace, gpu: bool) -> list[str]:
    """What every run is told beside its own overrides."""
    one_thread = not (gpu or options.paper_size or any(text.startswith("threads=") for text in overrides))
    quiet = [f"results={options.results}", "tensorboard=false", "progress=false"]
    return [*(["threads=1"] if one_thread else []), *overrides, *quiet]


def _say(planned: list[Planned], durations: Durations, workers: int) -> None:
    for each in planned:
        seconds = durations.left(each)
        cost = "" if each.state in ("finished", "diverged") else f" ({'?' if seconds is None else clock(seconds)})"
        print(f"{each.state}: mptrain {shlex.join(each.job.argv)}{cost}")
    states = [each.state for each in planned]
    done = states.count("finished") + states.count("diverged")
    print(
        f"{len(planned)} runs: {done} done, {states.count('resumable')} to go on, {len(planned) - done} to run in all"
    )
    print(f"{durations.total(planned, workers)} with {workers} at a time, from {durations.source()}")
    if durations.recorded:
        print(f"all small recipes are meant to take {clock(BUDGET)} on 2 cores")


def _run(todo: list[Planned], durations: Durations, workers: int) -> list[jobs.Ended]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    by_job = {each.job: each for each in todo}
    console = Console(highlight=False, markup=False, soft_wrap=True)
    columns = [BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"), TextColumn("{task.description}")]
    failed: list[jobs.Ended] = []
    ended_at = 0

    def ended(outcome: jobs.Ended) -> None:
        nonlocal ended_at
        ended_at += 1
        each = by_job.pop(outcome.job)
        if outcome.status == "failed":
            failed.append(outcome)
        else:
            durations.measured(each, outcome.seconds)
            _forget_checkpoints(each)
        left = durations.total(list(by_job.values()), workers)
        text = (
            f"[{ended_at}/{len(todo)}] {outcome.job.name}: {clean(outcome.message)}, {clock(outcome.seconds)}; {left}"
        )
        console.print(text)
        bar.advance(task)

    shown = 0.0

    def waiting(running: dict[jobs.Job, float]) -> None:
        nonlocal shown
        if time.monotonic() - shown > 1 and console.is_terminal:
            shown = time.monotonic()
            left = durations.total(list(by_job.values()), workers, {by_job[job]: s for job, s in running.items()})
            bar.update(task, left=left, description=" | ".join(job.name for job in running))
            bar.refresh()

    with Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(todo), left="")
        try:
            jobs.run_all([each.job for each in todo], workers, PROGRAM, ended, waiting)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt("interrupted; finished runs are kept, and the same command goes on") from None
    return failed


def _forget_checkpoints(each: Planned) -> None:
    """A finished run needs none; those of all small runs together would fill gigabytes."""
    if each.quick:
        shutil.rmtree(each.job.folder / "checkpoints", ignore_errors=True)


def _tables(planned: list[Planned], results: Path, tables: Path) -> None:
    runs, excluded = find_runs([results])
    chosen = {each.recipe for each in planned} | {run.recipe for run in runs}
    for path in write_tables(tables, runs, excluded, [name for name in files.names("recipe") if name in chosen]):
        print(f"wrote {path}")
