"""Find the runs under a folder and read what each one left in `summary.json`.

Nothing in a run folder is trusted: a summary may be cut short, written by another version, edited by hand or not a
summary at all. A run is therefore either read whole and checked (`Run`), or listed with the reason why not
(`Excluded`). It is never guessed at and never dropped.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from mptrain.errors import UserError
from mptrain.results.summary import LONGEST_FOLDER, BadSummary, Fields, clean, load

SCHEMA = 1
SKIPPED_FOLDERS = {"checkpoints"}


@dataclass(frozen=True)
class Run:
    """A run that ended with a result: `finished` with a finite metric, or `diverged`."""

    folder: str
    source: str  # the folder given by the user under which the run was found
    status: str
    reason: str
    recipe: str
    precision: str
    precision_label: str
    scale: str
    seed: int
    device: str
    backend: str
    dtypes: dict[str, str]  # of matmul, softmax, norm, loss
    metric: str
    value: float | None
    higher_is_better: bool
    margin: float
    throughput: float | None
    throughput_unit: str
    memory_mib: float | None
    memory_how: str
    attempted: int
    skipped: int
    final_scale: float | None
    data: str
    data_kind: str
    device_name: str
    torch: str
    commit: str
    eval_precision: str
    finished: datetime
    key: dict[str, str | int | float | bool | None]
    started: datetime | None = None


@dataclass(frozen=True)
class Excluded:
    """A folder that is not in the table, and why: failed, unfinished, unreadable, duplicate or without a metric."""

    folder: str
    status: str
    reason: str
    recipe: str = ""
    precision: str = ""
    scale: str = ""
    seed: int | None = None


def find_runs(folders: list[Path]) -> tuple[list[Run], list[Excluded]]:
    """Read every run below the folders, each once even if they overlap; UserError if a folder cannot be opened."""
    runs: list[Run] = []
    excluded: list[Excluded] = []
    seen: set[str] = set()
    for source in folders:
        for folder, problem in walk(source):
            identity = os.path.realpath(folder)
            if identity in seen:
                continue
            seen.add(identity)
            if problem:
                excluded.append(Excluded(clean(folder, LONGEST_FOLDER), "unreadable", clean(problem)))
                continue
            outcome = read_run(folder, str(source))
            if isinstance(outcome, Run):
                runs.append(outcome)
            else:
                excluded.append(outcome)
    return runs, excluded


def some_runs(folders: list[Path]) -> tuple[list[Run], list[Excluded]]:
    """The same; UserError if there is neither a run nor anything left out."""
    runs, excluded = find_runs(folders)
    if not runs and not excluded:
        names = clean(", ".join(map(str, folders)))
        raise UserError(f"There is no run in {names}; make one: mptrain +recipe=resnet precision=fp32.")
    return runs, excluded


def walk(top: Path) -> Iterator[tuple[str, str]]:
    """Yield (run folder, "") and, for a folder that cannot be listed, (folder, reason). Links are not followed."""
    waiting = [str(top)]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(folder) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            if folder == str(top):
                raise UserError(_cannot_open(top, error, reason)) from error
            yield folder, f"folder cannot be listed: {reason}"
            continue
        names = {entry.name for entry in entries}
        if "summary.json" in names or "config.yaml" in names:
            yield folder, ""
        inner = [entry.path for entry in entries if _is_folder(entry)]
        waiting.extend(reversed(inner))


def _cannot_open(folder: Path, error: OSError, reason: str) -> str:
    name = clean(str(folder))
    if isinstance(error, FileNotFoundError):
        return f"There is no folder {name}; give the folder that holds the runs."
    if isinstance(error, NotADirectoryError):
        return f"{name} is not a folder; give the folder that holds the runs."
    return f"The folder {name} cannot be opened ({reason}); give one you may read."


def _is_folder(entry: os.DirEntry[str]) -> bool:
    # Hidden folders hold Hydra's own config.yaml, which is not a run.
    return not entry.name.startswith(".") and entry.name not in SKIPPED_FOLDERS and entry.is_dir(follow_symlinks=False)


def read_run(folder: str, source: str) -> Run | Excluded:
    """The run in `folder`, or the reason why it has no place in a table."""
    summary: Any = None
    try:
        summary = load(os.path.join(folder, "summary.json"))
        return _check(summary, folder, source)
    except FileNotFoundError:
        return Excluded(clean(folder, LONGEST_FOLDER), "unfinished", "no summary.json: still running or interrupted")
    except OSError as error:
        return Excluded(
            clean(folder, LONGEST_FOLDER),
            "unreadable",
            f"summary.json cannot be read: {error.strerror or type(error).__name__}",
        )
    except _NotAResult as verdict:
        return _excluded(summary, folder, verdict.status, verdict.reason)
    except BadSummary as error:
        return _excluded(summary, folder, "unreadable", f"summary.json: {error}")


class _NotAResult(Exception):
    def __init__(self, status: str, reason: str) -> None:
        super().__init__(status, reason)
        self.status, self.reason = status, reason


def _excluded(summary: Any, folder: str, status: str, reason: str) -> Excluded:
    """Name recipe, precision, scale and seed beside the folder where the summary has them in readable form."""

    def label(name: str) -> str:
        value = summary.get(name) if isinstance(summary, dict) else None
        return clean(value, 60) if isinstance(value, str) else ""

    seed = summary.get("seed") if isinstance(summary, dict) else None
    seed = seed if type(seed) is int and abs(seed) < 2**64 else None
    precision = label("precision_label") or label("precision")
    return Excluded(
        clean(folder, LONGEST_FOLDER), status, clean(reason), label("recipe"), precision, label("scale"), seed
    )


def _check(summary: Any, folder: str, source: str) -> Run:
    record = Fields(summary, "")
    if record.whole("schema") != SCHEMA:
        raise BadSummary(f"has schema {record.whole('schema')}; this version of mptrain reads schema {SCHEMA}")
    status = record.text("status")
    reason = record.text("reason", optional=True, longest=None)
    if status == "failed":
        raise _NotAResult("failed", reason or "no reason given")
    if status not in ("finished", "diverged"):
        raise BadSummary(f"has status {status!r}; known are finished, diverged, failed")
    metric, throughput, memory = record.inner("metric"), record.inner("throughput"), record.inner("memory")
    steps, data, environment = record.inner("steps"), record.inner("data"), record.inner("environment")
    dtypes = record.inner("dtypes")
    run = Run(
        folder=clean(folder, LONGEST_FOLDER),
        source=source,
        status=status,
        reason=reason,
        recipe=record.text("recipe"),
        precision=record.text("precision"),
        precision_label=record.text("precision_label"),
        scale=record.text("scale"),
        seed=record.whole("seed"),
        device=record.text("device"),
        backend=record.text("backend"),
        dtypes={name: dtypes.text(name, optional=True) or "unknown" for name in ("matmul", "softmax", "norm", "loss")},
        metric=metric.text("name"),
        value=metric.number("value", optional=True),
        higher_is_better=metric.flag("higher_is_better"),
        margin=metric.required_number("margin"),
        throughput=throughput.number("value", optional=True),
        throughput_unit=throughput.text("unit"),
        memory_mib=memory.number("peak_mib", optional=True),
        memory_how=memory.text("how", optional=True),
        attempted=steps.whole("attempted"),
        skipped=steps.whole("skipped"),
        final_scale=record.number("final_scale", optional=True),
        data=data.text("name"),
        data_kind=data.text("kind"),
        device_name=environment.text("device_name", optional=True),
        torch=environment.text("torch"),
        commit=environment.text("commit", optional=True),
        eval_precision=record.text("eval_precision"),
        finished=record.moment("finished"),
        key=record.inner("key").scalars(),
        started=record.moment("started") if record.mapping.get("started") else None,
    )
    _check_sense(run, environment)
    return run


def _check_sense(run: Run, environment: Fields) -> None:
    """Refuse what is well-formed but cannot be true, or cannot be compared."""
    for name, own in (("recipe", run.recipe), ("data", run.data)):
        if run.key.get(name) != own:
            raise BadSummary(f"names {name} {own!r} but key.{name} {run.key.get(name)!r}")
    for name in ("steps", "batch_size"):
        if type(run.key.get(name)) is not int:
            raise BadSummary(f"key.{name} should be a whole number, got {run.key.get(name)!r}")
    if not 0 <= run.skipped <= run.attempted:
        raise BadSummary(f"has {run.skipped} skipped of {run.attempted} attempted steps")
    if run.margin < 0:
        raise BadSummary(f"has a negative metric.margin ({run.margin})")
    if run.status == "finished" and run.value is None:
        raise _NotAResult("no metric", f"finished, but its {run.metric} is not a number")
    flags = environment.mapping.get("tf32")
    if (
        run.precision == "fp32"
        and not run.device.startswith("cpu")
        and isinstance(flags, dict)
        and "tf32" in flags.values()
    ):
        where = ", ".join(clean(str(name), 20) for name, value in flags.items() if value == "tf32")
        raise _NotAResult("not fp32", f"called fp32, but TF32 was on for {where}")
