"""Clocks that jump, disks that may not be written, file systems that fail for a moment, bits that flip, older versions:
one message or none, and nothing lost."""

import builtins
import errno
import json
import os
import random
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny.runs import last_state, lasting, same_bits, settings, started, weights

import mptrain.outcome
import mptrain.train
from mptrain import cli
from mptrain.errors import UserError
from mptrain.results import checkpoint
from mptrain.results.quantities import last_step
from mptrain.results.record import Record
from mptrain.results.runs import Excluded, Run, find_runs, read_run
from mptrain.train import train
from mptrain.watch.store import REAL, TEXT, WHOLE, Store, read_part

pytestmark = pytest.mark.usefixtures("tiny")
KILLS = Path(__file__).parent.parent / "scripts" / "kill_writers.py"
OVERRIDES = ["+recipe=tiny", "steps=6", "checkpoint_every=2", "log_every=1", "tensorboard=false", "out=run"]
MADE: list[Path] = []
WHOLE_RUN = {"steps": 6, "checkpoint_every": 2, "log_every": 1}


@pytest.fixture
def whole(tiny, tmp_path_factory):
    """A run to which nothing happened."""
    if not MADE:
        MADE.append(tmp_path_factory.mktemp("whole"))
        train(settings(out=str(MADE[0]), **WHOLE_RUN))
    return MADE[0]


def assert_same(found, expected):
    assert same_bits(weights(found), weights(expected)) and lasting(found) == lasting(expected)
    assert (found / "metrics.jsonl").read_bytes() == (expected / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("jump", [timedelta(days=-4000), timedelta(days=4000)])
def test_a_clock_that_jumps(whole, tmp_path, monkeypatch, jump, capsys):

    class Clock(datetime):
        asked = 0

        @classmethod
        def now(cls, tz=None):
            cls.asked += 1
            return datetime(2026, 1, 1, tzinfo=UTC) + jump * (cls.asked - 1)

    monkeypatch.setattr(mptrain.train, "datetime", Clock)
    monkeypatch.setattr(mptrain.outcome, "datetime", Clock)
    monkeypatch.setattr("time.time", lambda: 1.8e9 + random.uniform(-1e9, 1e9))
    train(settings(out=str(tmp_path / "run"), tensorboard=True, **WHOLE_RUN))
    assert Clock.asked == 2
    assert_same(tmp_path / "run", whole)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 0 < summary["wall_s"] < 60 and summary["throughput"]["value"] > 0
    runs, excluded = find_runs([str(tmp_path / "run")])
    assert len(runs) == 1 and not excluded
    capsys.readouterr()
    assert cli.main(["compare", "run"]) == 0 and "fp32" in capsys.readouterr().out


FILES = ["lock", ".config.yaml", "metrics.jsonl", ".step-00000002.pt.", ".step-00000004.pt.sha256", ".summary.json"]


@pytest.mark.parametrize(
    ("file", "number"), [(f, errno.EROFS) for f in FILES] + [("lock", errno.EACCES), ("metrics.jsonl", errno.EIO)]
)
def test_a_file_that_may_not_be_written(whole, tmp_path, monkeypatch, capsys, file, number):
    """A file system that turns read-only while a run lasts; mended, the same command ends as if nothing had been."""
    real = builtins.open

    def refusing(path, mode="r", *args, **kwargs):
        if Path(str(path)).name.startswith(file) and set(mode) & set("wa+"):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, mode, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", refusing)
        assert cli.main(OVERRIDES) == 1
    said = capsys.readouterr().err
    assert os.strerror(number) in said and "Traceback" not in said and said.count("\n") == 1, said
    assert str(tmp_path / "run") in said
    assert cli.main(OVERRIDES) == 0
    assert_same(tmp_path / "run", whole)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EBUSY])
@pytest.mark.parametrize("times", [1, 3])
def test_a_rename_that_fails_for_a_moment(whole, tmp_path, monkeypatch, number, times):
    real, pauses, failures = os.replace, [], dict.fromkeys(("config.yaml", "step-00000002.pt", "summary.json"), times)

    def replace(source, target):
        if failures.get(Path(target).name, 0):
            failures[Path(target).name] -= 1
            raise OSError(number, os.strerror(number))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr("mptrain.results.record.time", SimpleNamespace(sleep=pauses.append))
    train(settings(out=str(tmp_path / "run"), **WHOLE_RUN))
    assert len(pauses) == 3 * times and sum(pauses) <= 2.5
    assert_same(tmp_path / "run", whole)


@pytest.mark.parametrize("file", ["config.yaml", "step-00000004.pt", "summary.json"])
def test_a_rename_that_always_fails(whole, tmp_path, monkeypatch, capsys, file):
    real = os.replace

    def replace(source, target):
        if Path(target).name == file:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        patch.setattr("mptrain.results.record.time", SimpleNamespace(sleep=lambda seconds: None))
        assert cli.main(OVERRIDES) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"mptrain: {tmp_path / 'run'}") and f"{file}: Stale file handle" in said, said
    assert not list((tmp_path / "run").rglob("*.tmp"))
    assert cli.main(OVERRIDES) == 0
    assert_same(tmp_path / "run", whole)


def slow_run(said):
    with open(said, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(cli.main([*OVERRIDES, "task.sleep=0.05"]))


def test_two_processes_on_one_run(whole, tmp_path, capsys):
    first = started(slow_run, "said")
    while not list(tmp_path.glob("run/checkpoints/*.pt")):
        assert first.is_alive()
    os.kill(first.pid, signal.SIGSTOP)
    assert cli.main([*OVERRIDES, "task.sleep=0.05"]) == 1
    assert "run is in use by another run; wait for it, or give another folder" in capsys.readouterr().err
    assert cli.main(["eval", *OVERRIDES, "task.sleep=0.05"]) == 1  # it would read what is being written
    os.kill(first.pid, signal.SIGCONT)
    first.join(60)
    assert first.exitcode == 0 and same_bits(weights(tmp_path / "run"), weights(whole))


def test_a_file_system_without_locks(tmp_path, monkeypatch, capsys):
    def lockf(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.lockf", lockf)
    assert cli.main(OVERRIDES) == 1
    said = capsys.readouterr().err
    assert "run cannot be locked (No locks available), so two runs might write there at once; give a folder on" in said
    assert not Record(tmp_path / "run").held()


def test_a_checkpoint_of_an_older_version(tmp_path):
    """Lacking any one of its parts it is resumed, or refused in words; it never ends in a traceback."""
    config = settings("tiny", "fp16", out=str(tmp_path / "run"), ema=0.9, **WHOLE_RUN)
    train(config)
    folder = Record(tmp_path / "run")
    kept, resumed = last_state(tmp_path / "run"), []
    length = folder.metrics.stat().st_size
    for key in kept:
        folder.summary.unlink()
        state = {k: v for k, v in kept.items() if k != key}
        for old in checkpoint.listed(folder.checkpoints):
            old.unlink()
        checkpoint.save(folder.checkpoints, 6, {"run": state, "log_bytes": length})
        try:
            train(config)
            resumed.append(key)
        except UserError as error:
            assert f"the checkpoint in {folder.folder} does not fit this version's networks ('{key}')" in str(error)
            checkpoint.save(folder.checkpoints, 6, {"run": kept, "log_bytes": length})
            train(config)
    assert resumed == ["counter", "random_of_others"]  # it counted nothing, and was alone


def flipped(content, rng):
    damaged = bytearray(content)
    damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def test_a_bit_flipped_anywhere_in_a_checkpoint(tmp_path):
    rng = random.Random(0)
    for step in (1, 2):
        path = checkpoint.save(tmp_path, step, {"run": {"x": torch.arange(100.0), "step": step}})
    for target in (path, Path(f"{path}.sha256")):
        whole = target.read_bytes()
        for _ in range(100):
            target.write_bytes(flipped(whole, rng))
            state, notices = checkpoint.load_latest(tmp_path)
            assert state["run"]["step"] == 1 and len(notices) == 1 and path.name in notices[0]
        target.write_bytes(whole)
    assert checkpoint.load_latest(tmp_path)[0]["run"]["step"] == 2


def test_a_bit_flipped_anywhere_in_a_record(tmp_path):
    rng = random.Random(0)
    train(settings("tiny", "fp16", out=str(tmp_path / "run"), count=True, **WHOLE_RUN))
    record = Record(tmp_path / "run")
    steps = len(record.metrics.read_bytes().splitlines())
    for name, tries in (("summary.json", 300), ("metrics.jsonl", 200), ("config.yaml", 20)):
        path = record.folder / name
        whole = path.read_bytes()
        for _ in range(tries):
            path.write_bytes(flipped(whole, rng))
            assert isinstance(read_run(str(record.folder), str(tmp_path)), Run | Excluded)
            assert last_step(record.folder) >= 0 or name == "metrics.jsonl"
            try:
                assert record.state() in ("finished", "diverged", "failed")
                with record.opened(settings("tiny", "fp16", count=True, **WHOLE_RUN).model_dump(), {"out"}):
                    pass
            except UserError as error:
                assert name in str(error) or "holds a run with another configuration" in str(error)
        path.write_bytes(whole)
    assert steps == 7 and last_step(record.folder) == 6


def row(step, **changes):
    return {**dict.fromkeys(TEXT, "a"), **dict.fromkeys(WHOLE, 1), **dict.fromkeys(REAL, 0.5), "exponents": [1, 2],
            "step": step, **changes}  # fmt: skip


def test_a_bit_flipped_anywhere_in_what_was_watched(tmp_path):
    """No flipped bit shows: the rows are as they were, or the part is said to be damaged."""
    rng, store = random.Random(0), Store(tmp_path)
    store.add(row(step, norm=1.0 / step) for step in range(1, 40))
    store.flush()
    (path,) = tmp_path.iterdir()
    whole, rows, damaged = path.read_bytes(), read_part(path), 0
    for _ in range(300):
        path.write_bytes(flipped(whole, rng))
        try:
            assert read_part(path) == rows
        except ValueError as error:
            assert str(error).startswith("000000039.parquet is damaged (")
            damaged += 1
    assert damaged > 50


def test_a_damaged_part_of_what_was_watched_is_set_aside(tmp_path, capsys):
    store = Store(tmp_path / "watch.parquet")
    for steps in ((1, 2), (3, 4), (5, 6)):
        store.add(map(row, steps))
        store.flush()
    second = tmp_path / "watch.parquet" / "000000004.parquet"
    second.write_bytes(second.read_bytes()[:200])
    assert [each["step"] for each in store.cut(5)] == [1, 2, 5]
    assert capsys.readouterr().err.startswith("mptrain: watch: 000000004.parquet is damaged (")
    assert sorted(path.name for path in second.parent.iterdir()) == [
        "000000002.parquet", "000000004.damaged", "000000005.parquet",
    ]  # fmt: skip


@pytest.mark.parametrize("dies_before", ["replace", "unlink"])
def test_what_was_watched_survives_a_kill_while_it_is_cut(tmp_path, monkeypatch, dies_before):
    store = Store(tmp_path / "watch.parquet")
    store.add(map(row, range(1, 9)))
    store.flush()

    def die(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if dies_before == "replace":
            patch.setattr(os, "replace", die)
        else:
            patch.setattr(Path, "unlink", die)
        store.cut(5)
    for step in (8, 5):  # once on to where it was, and then again from an earlier checkpoint
        kept = [each["step"] for each in Store(tmp_path / "watch.parquet").cut(step)]
        assert kept == list(range(1, step + 1))
    assert [path.name for path in (tmp_path / "watch.parquet").glob("*.parquet")] == ["000000005.parquet"]


@pytest.mark.slow
def test_two_hundred_kills_leave_nothing_unreadable():
    done = subprocess.run([sys.executable, str(KILLS)], capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
