"""A watched run that is killed goes on: the same weights as unwatched, and every row once."""

import json
import os
import signal

import pytest
from tiny.runs import same_bits, settings, started, weights

from mptrain.train import Run, train
from mptrain.watch.store import read_part

pytestmark = pytest.mark.usefixtures("tiny")

WATCHED = {"watch__enabled": True, "watch__every": 5}
OPTIONS = {"steps": 14, "checkpoint_every": 4, "task__norm": True, "task__dropout": 0.2}


def run_and_die(config, before):
    steps = 0
    plain = Run.step

    def step(run, window):
        nonlocal steps
        if (steps := steps + 1) == before:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(run, window)

    Run.step = step
    train(config)


def rows_of(folder):
    return [row for part in sorted((folder / "watch.parquet").glob("*.parquet")) for row in read_part(part)]


def alarms_of(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["alarm"] for line in lines if "alarm" in line]


@pytest.mark.parametrize("before", [7, 12])
def test_killed_between_two_checkpoints(before, tmp_path, capsys):
    # a scale at which everything is flushed raises an alarm in step 5, and from then on every step is looked at
    def config(name, **more):
        return settings("tiny", "fp16", out=str(tmp_path / name), scale=2.0**-20, **OPTIONS, **more)

    train(config("plain"))
    train(config("whole", **WATCHED))
    process = started(run_and_die, config("killed", **WATCHED), before)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    kept = {row["step"] for row in rows_of(tmp_path / "killed")}
    assert max(kept, default=0) <= (before - 1) // 4 * 4  # what a checkpoint vouches for, and no more
    train(config("killed", **WATCHED))

    assert same_bits(weights(tmp_path / "killed"), weights(tmp_path / "plain"))
    whole, killed = rows_of(tmp_path / "whole"), rows_of(tmp_path / "killed")
    assert sorted({row["step"] for row in whole}) == [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    assert killed == whole
    keys = [(row["step"], row["layer"], row["kind"], row["name"]) for row in killed]
    assert len(set(keys)) == len(keys)
    assert alarms_of(tmp_path / "killed") == alarms_of(tmp_path / "whole") != []
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "killed")]
    assert summaries[0]["alarms"] == summaries[1]["alarms"]
    assert summaries[0]["watch"] == summaries[1]["watch"] == "underflow"


def test_a_batch_that_is_run_again_to_explain_it_is_no_step(tmp_path, capsys):
    options = {"steps": 8, "task__bad": [2]}
    summary = train(settings("tiny", "fp16", out=str(tmp_path), watch__enabled=True, watch__every=1, **options))
    assert (tmp_path / "provenance.json").exists() and summary["status"] == "finished"
    rows = rows_of(tmp_path)
    by_step = {}
    for row in rows:
        by_step.setdefault(row["step"], []).append((row["layer"], row["kind"], row["name"], row["calls"], row["count"]))
    steps = sorted(by_step)
    assert steps == list(range(steps[0], 9)) and 4 in steps
    assert all(by_step[step] == by_step[8] for step in steps)
