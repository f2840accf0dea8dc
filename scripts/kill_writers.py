"""Kills a process that writes records and checkpoints, at random moments; after each everything has to be readable.

    python scripts/kill_writers.py                # 200 kills
    python scripts/kill_writers.py --kills 50 --seed 1

The process goes on from the last checkpoint, as a run does, and writes without pause: log lines, watched rows, a
checkpoint every third step, now and then a summary. It is killed after some steps and a few milliseconds. Prints the
figures; exits with status 1 if a file could not be read, a checkpoint was passed over, or anything before a checkpoint
was lost.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet  # noqa: F401 - so that no process has to import it
import torch

from mptrain.results import checkpoint
from mptrain.results.record import Record
from mptrain.watch.store import REAL, TEXT, WHOLE, Store, read_part

CONFIG = {"steps": 10**9}
EACH = 20
"""Kills of one run, before another begins."""
ROW = {**dict.fromkeys(TEXT, "a"), **dict.fromkeys(WHOLE, 1), **dict.fromkeys(REAL, 0.5), "exponents": [1, 2]}


def write(folder: Path, steps: Any) -> None:
    """Goes on writing until it is killed, or nobody is there to kill it; counts its steps."""
    parent = os.getppid()
    record, store = Record(folder), Store(folder / "watch.parquet")
    with record.opened(CONFIG, set()):
        state, _ = checkpoint.load_latest(record.checkpoints)
        step = 0 if state is None else state["run"]["step"]
        record.cut_log(0 if state is None else state["log_bytes"])
        store.cut(step)
        while os.getppid() == parent:
            step += 1
            record.log({"step": step})
            store.add([{**ROW, "step": step}])
            if step % 3 == 0:
                store.flush()
                run = {"step": step, "x": torch.full((5000,), float(step))}
                checkpoint.save(record.checkpoints, step, {"run": run, "log_bytes": record.flush()})
            if step % 7 == 0:
                record.finish("failed", "for a moment", {"step": step})
                record.forget_failure()
            steps.value += 1


def complaints(folder: Path, before: int) -> tuple[int, list[str]]:
    """The step of the last checkpoint, and what is wrong with the folder; before: the step after the last kill."""
    record = Record(folder)
    if not record.config.exists():
        return 0, []
    state, found = checkpoint.load_latest(record.checkpoints)
    step = 0 if state is None else state["run"]["step"]
    if step < before:
        found.append(f"the checkpoint of step {before} is gone, the last is of {step}")
    if state is not None and not bool((state["run"]["x"] == step).all()):
        found.append(f"the checkpoint of step {step} holds something else")
    if record.state() not in ("resumable", "failed") or record.held():
        found.append(f"the folder is {record.state()}, held: {record.held()}")
    if state is not None:
        with open(record.metrics, "rb") as log:
            logged = [json.loads(line)["step"] for line in log.read(state["log_bytes"]).splitlines()]
        if logged != list(range(1, step + 1)):
            found.append(f"metrics.jsonl lacks steps up to {step}")
    parts = sorted((folder / "watch.parquet").glob("*.parquet"))
    watched = {row["step"] for part in parts for row in read_part(part)}
    if not watched >= set(range(1, step + 1)):
        found.append(f"watch.parquet lacks steps up to {step}")
    return step, found


def apart(context: Any, function: Any, *args: Any) -> Any:
    """What a function returns, called in a process of its own; its error, if it has one, as a complaint."""
    here, there = context.Pipe()

    def call() -> None:
        try:
            there.send(function(*args))
        except Exception as error:
            there.send((args[-1], [f"{type(error).__name__}: {error}"]))

    process = context.Process(target=call)
    process.start()
    result = here.recv()
    process.join()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    context: Any = multiprocessing.get_context("fork")  # from here, where nothing but imports has happened
    torch.set_num_threads(1)
    rng, bad, idle, total, step = random.Random(options.seed), 0, 0, 0, 0
    with tempfile.TemporaryDirectory() as place:
        for number in range(1, options.kills + 1):
            if number % EACH == 1:
                total, step = total + step, 0
            folder, steps = Path(place) / str((number - 1) // EACH), context.Value("q", 0)
            process = context.Process(target=write, args=(folder, steps))
            process.start()
            enough = rng.randrange(12)
            while steps.value < enough and process.exitcode is None:
                time.sleep(0.0005)
            process.join(rng.uniform(0, 0.03))
            if process.exitcode is not None:
                print(f"it ended by itself with status {process.exitcode}", file=sys.stderr)
                return 1
            process.kill()
            process.join()
            now, found = apart(context, complaints, folder, step)
            bad += bool(found)
            for complaint in found:
                print(f"after kill {number}: {complaint}", file=sys.stderr)
            idle, step = idle + (now == step), max(step, now)
            if number % EACH == 0 or number == options.kills:
                figures = f"kills {number}  steps with a checkpoint {total + step}  kills before the next one {idle}"
                print(f"{figures}  unreadable {bad}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
