"""Estimates of time: measured before recorded, recorded times the machine's pace, unknown said as unknown."""

import json

import pytest

from mptrain import durations
from mptrain.durations import Durations, clock
from mptrain.jobs import Job
from mptrain.paper import Paper
from mptrain.plan import Planned


@pytest.fixture
def planned(monkeypatch, tmp_path):
    """planned(recipe, run, seed, state) of a recipe whose `fp32` was recorded with 100 s and `fp16` with 200 s."""
    runs = {"fp32": {"precision": "fp32", "seconds": 100.0}, "fp16": {"precision": "fp16", "seconds": 200.0},
            "bf16": {"precision": "bf16"}}  # fmt: skip
    paper = Paper.model_validate({"runs": runs})
    monkeypatch.setattr(durations, "paper_of", lambda recipe: paper)

    def make(run, seed=0, state="absent", wall=None, step=None):
        folder = tmp_path / f"{run}-{seed}"
        folder.mkdir()
        if wall is not None:
            (folder / "summary.json").write_text(json.dumps({"wall_s": wall}))
        if step is not None:
            (folder / "metrics.jsonl").write_text(f'{{"step": {step}, "loss": 1.0}}\n{{"st')
        return Planned("small", run, seed, 50, True, Job(f"{run} {seed}", (), folder), state)

    return make


def test_recorded_then_measured(planned):
    first, second, other = planned("fp32"), planned("fp32", 1), planned("fp16")
    known = Durations([first, second, other], recorded=True)
    assert [known.left(each) for each in (first, second, other)] == [100, 100, 200]
    known.measured(first, 150.0)
    assert known.left(second) == 150  # this machine took 150 s for it
    assert known.left(other) == 300  # and half as long again as recorded for anything
    assert known.left(other, elapsed=100) == 200
    assert known.left(other, elapsed=320) == 32  # overdue


def test_finished_runs_are_measurements(planned):
    done = planned("fp32", state="finished", wall=46.0)
    known = Durations([done, planned("fp16")], recorded=True)
    assert known.left(done) == 0
    assert known.left(planned("fp32", 1)) == 46 + durations.START
    assert Durations([done], recorded=False).left(planned("fp16", 1)) is None


def test_a_resumable_run_has_only_its_rest_left(planned):
    half = planned("fp32", state="resumable", step=25)
    assert Durations([half], recorded=True).left(half) == 50


def test_total_fills_the_workers_in_order(planned):
    todo = [planned("fp16"), planned("fp32"), planned("fp32", 1), planned("fp32", 2)]  # 200, 100, 100, 100
    known = Durations(todo, recorded=True)
    assert known.total(todo, 1) == "about 8 min left"
    assert known.total(todo, 2) == "about 5 min left"  # 200 and then 100, beside 100 and 100
    assert known.total(todo, 2, {todo[0]: 190.0}) == "about 3 min left"
    assert known.total([planned("bf16"), *todo[:1]], 2) == "1 run of unknown length left, beside about 3 min left"


def test_clock():
    assert [clock(each) for each in (42, 89.6, 90, 5000, 5400, 7200)] == [
        "42 s", "90 s", "2 min", "83 min", "1 h 30 min", "2 h 00 min"]  # fmt: skip
