"""`mptrain reproduce [RECIPE ...|all]`: the runs that recipes name, those that are missing, and the tables of all."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import time
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path

from mptrain import files, jobs
from mptrain.durations import Durations, clock
from mptrain.errors import UserError
from mptrain.paper import lineage
from mptrain.plan import Planned, plan
from mptrain.results.claims import Verdict
from mptrain.results.csvfile import read_csv
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
    result.add_argument("--tables-only", action="store_true", help="write the tables of what is there; run nothing")
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
    _refuse_ours(overrides)
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
    todo = [each for each in planned if each.state not in ("finished", "diverged")]
    failed = [] if options.tables_only else _run(todo, durations, workers)
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


def _refuse_ours(overrides: list[str]) -> None:
    """Raises UserError for what `reproduce` gives to each run itself."""
    cures = {"seed": "give --seeds N", "results": "give --results FOLDER", "out": "give --results FOLDER",
             "precision": "train with mptrain +recipe=NAME", "recipe": "give the recipe's bare name"}  # fmt: skip
    for text in overrides:
        if (key := text.partition("=")[0].lstrip("+")) in cures:
            raise UserError(f"{text}: every run has its own {key} here; {cures[key]} instead")


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
    """Runs what is missing; returns the failed ones."""
    with _Shown(todo, durations, workers) as shown:
        try:
            jobs.run_all([each.job for each in todo], workers, PROGRAM, shown.ended, shown.waiting)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("interrupted; finished runs are kept, and the same command goes on") from None
    return shown.failed


class _Shown(AbstractContextManager["_Shown"]):
    """A line for each run that ends, and a bar with the time left where there is a terminal."""

    def __init__(self, todo: list[Planned], durations: Durations, workers: int):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self.left = {each.job: each for each in todo}
        self.elapsed: dict[jobs.Job, float] = {}
        self.failed: list[jobs.Ended] = []
        self.durations, self.workers = durations, workers
        self.console = Console(highlight=False, markup=False, soft_wrap=True)
        columns = [BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[time]} | {task.description}")]
        # no thread of its own refreshes it: processes are forked here
        hidden = not self.console.is_terminal
        self.bar = Progress(*columns, console=self.console, auto_refresh=False, disable=hidden)
        self.task = self.bar.add_task("", total=len(todo), time="")
        self.refreshed = 0.0

    def __enter__(self) -> _Shown:
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def time_left(self) -> str:
        running = {self.left[job]: seconds for job, seconds in self.elapsed.items()}
        return self.durations.total(list(self.left.values()), self.workers, running)

    def ended(self, outcome: jobs.Ended) -> None:
        each = self.left.pop(outcome.job)
        self.elapsed.pop(outcome.job, None)
        if outcome.status == "failed":
            self.failed.append(outcome)
        else:
            self.durations.measured(each, outcome.seconds)
            _forget_checkpoints(each)
        self.bar.advance(self.task)
        count = self.bar.tasks[0].completed
        said = f"{clean(outcome.message)}, {clock(outcome.seconds)}"
        self.console.print(
            f"[{count:.0f}/{self.bar.tasks[0].total:.0f}] {outcome.job.name}: {said}; {self.time_left()}"
        )

    def waiting(self, running: dict[jobs.Job, float]) -> None:
        self.elapsed = dict(running)
        if time.monotonic() - self.refreshed > 1:
            self.refreshed = time.monotonic()
            names = " | ".join(job.name for job in running)
            self.bar.update(self.task, time=self.time_left(), description=names)
            self.bar.refresh()


def _forget_checkpoints(each: Planned) -> None:
    """A finished run needs none; those of all small runs together would fill gigabytes."""
    if each.quick:
        shutil.rmtree(each.job.folder / "checkpoints", ignore_errors=True)


def _tables(planned: list[Planned], results: Path, tables: Path) -> None:
    runs, excluded = find_runs([results])
    chosen = {each.recipe for each in planned} | {run.recipe for run in runs}
    for path in write_tables(tables, runs, excluded, [name for name in files.names("recipe") if name in chosen]):
        print(f"wrote {path}")
    verdicts = Counter(line.verdict for line in read_csv((tables / "claims.csv").read_text(encoding="utf-8"), Verdict))
    print(f"claims: {', '.join(f'{count} {verdict}' for verdict, count in verdicts.most_common())}")
