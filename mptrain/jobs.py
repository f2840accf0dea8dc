"""Commands side by side, each a process of its own: `mptrain reproduce` fills the cores with runs.

A run that fails is reported and the rest goes on. A signal is passed on to the runs, which write a checkpoint and stop;
a second one ends them at once. Runs also stop when this process is killed, so that none is left behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from mptrain.results.record import Record

POLL = 0.1  # seconds
PATIENCE = 30.0  # seconds that a stopped run gets for its checkpoint
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}  # spinning threads slow each other down where cores are shared


@dataclass(frozen=True)
class Job:
    """One run: what it is called, its command line after `mptrain`, and its folder."""

    name: str
    argv: tuple[str, ...]
    folder: Path


@dataclass(frozen=True)
class Ended:
    """How a job ended: a record's status or "failed", in how many seconds, and what it said last."""

    job: Job
    status: str
    seconds: float
    message: str


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    since: float = field(default_factory=time.monotonic)

    def ended(self) -> Ended:
        self.output.seek(0)
        lines = self.output.read().decode("utf-8", "replace").strip().splitlines()
        self.output.close()
        status = Record(self.job.folder).state() if self.process.returncode == 0 else "failed"
        return Ended(self.job, status, time.monotonic() - self.since, lines[-1] if lines else "")


def run_all(
    jobs: Sequence[Job],
    workers: int,
    program: Sequence[str],
    ended: Callable[[Ended], None],
    waiting: Callable[[dict[Job, float]], None],
) -> list[Ended]:
    """Runs all jobs, so many at a time, in order.

    Calls `ended` after each, and in between `waiting` with the seconds that the running ones have taken. A job whose
    folder another process holds waits for it. Raises KeyboardInterrupt once every run has stopped.
    """
    todo = list(jobs)
    running: list[_Running] = []
    outcomes: list[Ended] = []
    with _signals() as received:
        while todo or running:
            for job in todo if not received else []:
                if len(running) < workers and not Record(job.folder).held():
                    running.append(_start(job, program))
                    todo.remove(job)
                    break
            for each in [each for each in running if each.process.poll() is not None]:
                running.remove(each)
                outcome = each.ended()
                if not received:
                    outcomes.append(outcome)
                    ended(outcome)
            if received:
                _stop(running)
                raise KeyboardInterrupt
            waiting({each.job: time.monotonic() - each.since for each in running})
            time.sleep(POLL)
    return outcomes


def _start(job: Job, program: Sequence[str]) -> _Running:
    output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the run has ended
    process = subprocess.Popen(
        [*program, *job.argv],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **ENVIRONMENT},
        start_new_session=True,  # the terminal's Ctrl-C comes to us alone, and we pass it on once
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )
    return _Running(job, process, output)


def _end_with_parent() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _stop(running: list[_Running]) -> None:
    """Asks every run to stop after its step; kills what takes too long."""
    for each in running:
        each.process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + PATIENCE
    try:
        for each in running:
            each.process.wait(max(0.0, deadline - time.monotonic()))
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        for each in running:
            each.process.kill()
    for each in running:
        each.process.wait()
        each.output.close()


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM; a second one interrupts at once."""
    received: list[int] = []

    def receive(number: int, frame: object) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
