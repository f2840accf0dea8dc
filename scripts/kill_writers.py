"""Kills a process that writes records and checkpoints, at random moments; after each everything has to be readable.

    python scripts/kill_writers.py                # 200 kills
    python scripts/kill_writers.py --kills 50 --seed 1

The process goes on from the last checkpoint, as a run does, and writes without pause: log lines, watched rows, a
checkpoint every third step, now and then a summary. A kill may land anywhere. Prints the figures; exits with status 1
if a file could not be read, a checkpoint was passed over, or anything before a checkpoint was lost.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from mptrain.results.record import Record
from mptrain.watch.store import REAL, TEXT, WHOLE, Store, read_part

CONFIG = {"steps": 10**9}
EACH = 20
"""Kills of one run, before another begins."""
ROW = {**dict.fromkeys(TEXT, "a"), **dict.fromkeys(WHOLE, 1), **dict.fromkeys(REAL, 0.5), "exponents": [1, 2]}


def write(folder: Path) -> None:
    """Goes on writing until it is killed."""
    import torch

    from mptrain.results import checkpoint

    torch.set_num_threads(1)
    record, store = Record(folder), Store(folder / "watch.parquet")
    with record.opened(CONFIG, set()):
        state, _ = checkpoint.load_latest(record.checkpoints)
        step = 0 if state is None else state["run"]["step"]
        record.cut_log(0 if state is None else state["log_bytes"])
        store.cut(step)
        while True:
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


def complaints(folder: Path, before: int) -> tuple[int, list[str]]:
    """The step of the last checkpoint, and what is wrong with the folder; before: the step after the last kill."""
    from mptrain.results import checkpoint

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "pyarrow.parquet", "yaml", "mptrain.results.checkpoint"])
    rng, longest, bad, idle, steps, step = random.Random(options.seed), 0.3, 0, 0, 0, 0
    with tempfile.TemporaryDirectory() as place:
        for number in range(1, options.kills + 1):
            if number % EACH == 1:
                steps, step = steps + step, 0
            folder = Path(place) / str((number - 1) // EACH)
            process = context.Process(target=write, args=(folder,))
            process.start()
            process.join(rng.uniform(0, longest))
            if process.exitcode is not None:
                print(f"it ended by itself with status {process.exitcode}", file=sys.stderr)
                return 1
            process.kill()
            process.join()
            now, found = complaints(folder, step)
            bad += bool(found)
            for complaint in found:
                print(f"after kill {number}: {complaint}", file=sys.stderr)
            idle, step = idle + (now == step), max(step, now)
            if now == step and idle > number / 2:
                longest *= 1.1  # on a busy machine a kill may come before anything was done
    print(f"kills {options.kills}  steps with a checkpoint {steps + step}  kills before the next one {idle}", end="  ")
    print(f"unreadable {bad}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
