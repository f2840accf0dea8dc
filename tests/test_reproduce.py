"""`mptrain reproduce` on the tests' own recipe: what runs, what is kept, and what is written."""

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from mptrain import files
from mptrain.cli import main
from mptrain.errors import UserError
from mptrain.paper import paper_of
from mptrain.plan import plan
from mptrain.reproduce import BUDGET, reproduce

TINY = Path(__file__).parent / "tiny"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def start(*argv):
    command = [sys.executable, str(TINY), "reproduce", *argv]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)


def summaries(folder):
    return {path.parent.name: path.read_bytes() for path in folder.glob("*/summary.json")}


def lines(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def test_dry_run_says_every_command_and_the_time(tiny, capsys):
    assert reproduce(["tiny", "--dry-run", "task.sleep=0.1"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == (
        "absent: mptrain +recipe=tiny steps=10 precision=fp32 threads=1 task.sleep=0.1 results=results/runs "
        "tensorboard=false progress=false seed=0 (2 s)"
    )
    assert len(out) == 7 and "precision=fp16 scale=8" in out[3] and "seed=1" in out[3]
    assert out[4:] == [
        "4 runs: 0 done, 0 to go on, 4 to run in all",
        f"about {8 // min(len(os.sched_getaffinity(0)), 4)} s left with {len(os.sched_getaffinity(0))} at a time, "
        "from 0 runs timed here and the recipes' recorded seconds",
        "all small recipes are meant to take 2 h 00 min on 2 cores",
    ]
    assert not Path("results").exists()


@pytest.mark.parametrize("named", [[], ["all"], ["tiny"], ["tiny_paper"]])
def test_paper_size_and_seeds(tiny, capsys, named):
    assert reproduce([*named, "--paper-size", "--dry-run", "--seeds", "1", "--jobs", "3"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("absent: mptrain +recipe=tiny_paper precision=fp32 results=")
    assert "2 runs of unknown length left with 3 at a time, from 0 runs timed here" in out


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["tinny"], "recipe tinny is unknown; did you mean tiny"),
        (["tinny", "--paper-size"], "recipe tinny is unknown; did you mean tiny"),
        (["tiny", "task.depht=3"], "tiny, run fp16: task.depht is unknown; did you mean task.depth"),
        (["tiny", "seed=3"], "seed=3: every run has its own seed here; give --seeds N instead"),
        (["tiny", "results=x"], "results=x: every run .* give --results FOLDER"),
        (["tiny", "precision=fp16"], "precision=fp16: every run has its own precision"),
        (["tiny", "steps=0"], "tiny, run fp32: steps=0: give a number of 1 or more"),
    ],
)
def test_mistakes_are_told_before_anything_runs(tiny, argv, complaint):
    with pytest.raises(UserError, match=complaint.replace("?", r"\?")):
        reproduce(argv)
    assert not Path("results").exists()


def test_wrong_options(tiny, capsys):
    assert reproduce(["--seeds", "0"]) == 2 and "give a whole number" in capsys.readouterr().err
    assert main(["reproduce", "--help"]) == 0 and "exit status" in capsys.readouterr().out


def test_runs_once_and_the_verdict_follows_from_the_csv(tiny):
    process = start("tiny", "--jobs", "2")
    out, _ = process.communicate()
    assert process.returncode == 0, out
    assert "[4/4] tiny fp16 seed 1: finished" in out or "[4/4] tiny fp16 seed 0: finished" in out
    runs, tables = Path("results/runs"), Path("results/tables")
    first = summaries(runs)
    assert len(first) == 4 and not list(runs.glob("*/checkpoints"))
    names = {"all", "claims", "reproduced"}
    expected = {f"{name}.{kind}" for name in names for kind in ("csv", "md")} | {"seeds.csv", "first_screen.md"}
    assert {path.name for path in tables.iterdir()} == expected
    seeds = {(line["run"], int(line["seed"])): float(line["value"]) for line in lines(tables / "seeds.csv")}
    shift = np.array([seeds["fp16", seed] - seeds["fp32", seed] for seed in (0, 1)])
    (claim,) = (line for line in lines(tables / "claims.csv") if line["recipe"] == "tiny")
    assert float(claim["number"]) == pytest.approx(shift.mean())
    if shift.std() > 0:
        p = [
            stats.ttest_1samp(shift, edge, alternative=side).pvalue for edge, side in ((-0.5, "greater"), (0.5, "less"))
        ]
        assert claim["verdict"] == ("shows" if max(p) < 0.05 else "undecided")
    else:
        assert claim["verdict"] == "shows"

    assert f"claims: 1 {claim['verdict']}" in out
    written = (tables / "claims.csv").read_text()
    shutil.rmtree(tables)

    again = start("tiny", "--jobs", "2")
    out, _ = again.communicate()
    assert again.returncode == 0 and "finished" not in out
    assert summaries(runs) == first and (tables / "claims.csv").read_text() == written


def test_tables_only_runs_nothing(tiny, capsys):
    Path("results/runs").mkdir(parents=True)
    assert reproduce(["tiny", "--tables-only"]) == 0
    assert "claims: 1 not run" in capsys.readouterr().out
    assert not list(Path("results/runs").iterdir()) and Path("results/tables/first_screen.md").exists()


def test_failed_runs_are_named_and_the_rest_goes_on(tiny):
    process = start("tiny", "--jobs", "2", "--seeds", "1", "task.crash_at=3")
    out, _ = process.communicate()
    assert process.returncode == 1
    assert out.count("failed: tiny fp") == 2 and "mptrain +recipe=tiny steps=10 precision=fp16 scale=8" in out
    (claim,) = (line for line in lines(Path("results/tables/claims.csv")) if line["recipe"] == "tiny")
    assert claim["verdict"] == "not run"
    assert claim["numbers"] == "no result of fp16 of tiny, fp32 of tiny; 2 folders without a result"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_killed_in_the_middle_and_started_again_loses_nothing(tiny, number):
    argv = ["tiny", "--jobs", "2", "--seeds", "3", "task.sleep=0.2", "checkpoint_every=1"]
    runs = Path("results/runs")
    process = start(*argv)
    while not summaries(runs):
        time.sleep(0.05)
        assert process.poll() is None
    time.sleep(0.5)
    process.send_signal(number)
    out, _ = process.communicate()
    assert process.returncode == (-9 if number == signal.SIGKILL else 130), out
    kept = summaries(runs)
    assert 1 <= len(kept) < 6
    again = start(*argv)
    out, _ = again.communicate()
    assert again.returncode == 0, out
    after = summaries(runs)
    assert len(after) == 6 and {name: after[name] for name in kept} == kept
    assert f"[{6 - len(kept)}/{6 - len(kept)}]" in out


def test_every_run_of_every_recipe_is_a_valid_command_and_all_fit_the_budget():
    small = plan(
        [name for name in files.names("recipe") if not name.endswith("_paper")], None, ["threads=1"], quick=True
    )
    large = plan([name for name in files.names("recipe") if name.endswith("_paper")], 1, [], quick=False)
    assert {each.recipe for each in large} >= {"ssd_paper", "resnet50_paper", "speech_mandarin_paper"}
    assert len({each.job.folder for each in small}) == len(small)
    seconds = [paper_of(each.recipe).runs[each.run].seconds for each in small]
    assert sum(known for known in seconds if known) / 2 < BUDGET


def test_a_run_may_ask_for_fewer_seeds(tiny, monkeypatch):
    known = paper_of("tiny")
    fewer = known.model_copy(
        update={"runs": {**known.runs, "fp16": known.runs["fp16"].model_copy(update={"seeds": 1})}}
    )
    monkeypatch.setattr("mptrain.plan.paper_of", lambda recipe: fewer)
    assert [(each.run, each.seed) for each in plan(["tiny"], 3, [], quick=True)] == [
        ("fp32", 0), ("fp32", 1), ("fp32", 2), ("fp16", 0)]  # fmt: skip
