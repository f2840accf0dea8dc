"""Killed, stopped or cut short at any moment, the same command ends with the same bits."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import tiny
from tiny.runs import lasting, same_bits, settings, started, stopped_at_each_checkpoint, weights

from mptrain import cli
from mptrain.results import checkpoint
from mptrain.results.record import Record
from mptrain.train import train

pytestmark = pytest.mark.usefixtures("tiny")

RICH = {
    "task__norm": True,
    "task__dropout": 0.2,
    "task__noise": 0.1,
    "clip": 0.5,
    "ema": 0.9,
    "accumulate": 2,
    "eval__every": 4,
    "log_every": 3,
    "optimizer": {"name": "adamw", "lr": 0.01},
}
CASES = {
    "fp32": ("fp32", {}),
    "fp32, everything": ("fp32", RICH),
    "fp32, two workers": ("fp32", {**RICH, "workers": 2}),
    "fp16 that skips": ("fp16", {**RICH, "task__bad": [1, 3], "scaling__interval": 4}),
    "fp16_master that skips": ("fp16_master", {**RICH, "task__bad": [2], "scaling__interval": 4}),
    "fp16_nomaster": ("fp16_nomaster", RICH),
    "bf16_pure": ("bf16_pure", RICH),
    "two optimizers": ("fp16", {"task__pair": True, "task__second_bad": [1, 3], "task__second_from": 1, "ema": 0.9}),
    "diverging": ("fp16", {"task__bad": [0, 1, 2, 3, 4], "max_skips": 4, "task__dropout": 0.2, "log_every": 1}),
}


def uninterrupted(folder, precision, options):
    train(settings("tiny", precision, out=str(folder), **options))
    return folder


def assert_same(found, expected):
    assert same_bits(weights(found), weights(expected))
    assert (found / "metrics.jsonl").read_bytes() == (expected / "metrics.jsonl").read_bytes()
    assert lasting(found) == lasting(expected)


def run(config, silent=True):
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere if silent else sys.stdout):
        train(config)


def killed_until_done(config, rng, longest):
    """Kills at random moments, ever later if nothing gets done; returns how often."""
    kills = 0
    while True:
        process = started(run, config)
        process.join(rng.uniform(0, longest * 1.02**kills))
        if process.exitcode is None:
            process.kill()
            process.join()
        if process.exitcode == 0:
            return kills
        assert process.exitcode == -signal.SIGKILL
        kills += 1
        assert kills < 400


@pytest.mark.parametrize("case", ["fp32, two workers", "fp16_master that skips"])
def test_killed_at_random(tmp_path, case):
    precision, options = CASES[case]
    options = {**options, "steps": 16, "checkpoint_every": 2, "task__sleep": 0.01}
    config = settings("tiny", precision, out=str(tmp_path / "killed"), **options)
    kills = killed_until_done(config, random.Random(case), longest=0.5)
    assert kills >= 1
    assert_same(tmp_path / "killed", uninterrupted(tmp_path / "whole", precision, options))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_killed_at_random_for_long(tmp_path, case):
    """Thirty kills and more, over as many runs as that takes."""
    precision, options = CASES[case]
    options = {**options, "steps": 40, "checkpoint_every": 1, "task__sleep": 0.01}
    whole = uninterrupted(tmp_path / "whole", precision, options)
    rng, kills, runs = random.Random(case), 0, 0
    while kills < 30:
        config = settings("tiny", precision, out=str(tmp_path / str(runs := runs + 1)), **options)
        kills += killed_until_done(config, rng, longest=0.3)
        assert_same(config.folder(), whole)
        assert runs < 60


def run_and_die(config, moment):
    """Kills itself before its n-th touch of the disk."""
    touches = 0

    def counted(function):
        def call(*args, **kwargs):
            nonlocal touches
            if (touches := touches + 1) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "replace", "truncate", "unlink", "mkdir"):
        setattr(os, name, counted(getattr(os, name)))
    run(config)


@pytest.mark.parametrize("case", ["fp16 that skips", pytest.param("diverging", marks=pytest.mark.slow)])
def test_killed_before_every_touch_of_the_disk(tmp_path, case):
    precision, options = CASES[case]
    options = {**options, "steps": 5, "checkpoint_every": 3}
    whole = uninterrupted(tmp_path / "whole", precision, options)
    moment = 0
    while True:
        folder = tmp_path / str(moment := moment + 1)
        config = settings("tiny", precision, out=str(folder), **options)
        process = started(run_and_die, config, moment)
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        run(config)
        assert_same(folder, whole)
        assert not list(folder.rglob("*.tmp"))
    assert moment > 15


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"fp32", "fp32, two workers", "diverging"}))
def test_resumed_from_every_step(tmp_path, case):
    """Within an epoch and at its end; a run stopped after each single step."""
    precision, options = CASES[case]
    options = {**options, "steps": 12, "checkpoint_every": 1}
    whole = uninterrupted(tmp_path / "whole", precision, options)
    config = settings("tiny", precision, out=str(tmp_path / "cut"), **options)
    for _ in range(12):
        with pytest.raises(KeyboardInterrupt), stopped_at_each_checkpoint():
            run(config)
    run(config)  # at 12 of 12: evaluates and writes the summary
    assert_same(tmp_path / "cut", whole)


@pytest.mark.parametrize("damage", ["empty", "100 bytes", "half", "one bit"])
def test_a_damaged_checkpoint_gives_way_to_the_older(tmp_path, damage, capsys):
    options = {**RICH, "steps": 10, "checkpoint_every": 3}
    whole = uninterrupted(tmp_path / "whole", "fp16", options)
    config = settings("tiny", "fp16", out=str(tmp_path / "cut"), **options)
    with pytest.raises(KeyboardInterrupt), patch("mptrain.train.Run.end", interrupted):
        run(config)
    last = checkpoint.listed(Record(tmp_path / "cut").checkpoints)[-1]
    content = bytearray(last.read_bytes())
    content[len(content) // 3] ^= 4
    last.write_bytes(
        {"empty": b"", "100 bytes": content[:100], "half": content[: len(content) // 2], "one bit": content}[damage]
    )
    capsys.readouterr()
    run(config, silent=False)
    said = capsys.readouterr()
    assert said.err == f"mptrain: {last.name} is damaged (its checksum differs); using the one before\n"
    assert "resuming after step 9" in said.out
    assert_same(tmp_path / "cut", whole)


def interrupted(self):
    raise KeyboardInterrupt


def command(arguments, said):
    """The command line in a forked process, its output in a file."""
    with open(said, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(cli.main(arguments))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stopped_run_goes_on(tmp_path, number, workers):
    overrides = ["+recipe=tiny", f"out={tmp_path / 'run'}", "steps=30", "task.dropout=0.2", "tensorboard=false",
                 "checkpoint_every=3", f"workers={workers}"]  # fmt: skip
    said = tmp_path / "said"
    process = started(command, [*overrides, "task.sleep=0.05"], said)
    while process.is_alive() and not list(tmp_path.glob("run/checkpoints/*.pt")):
        time.sleep(0.01)
    os.kill(process.pid, number)
    process.join(20)
    text = said.read_text()
    assert process.exitcode == 130, text
    assert text.count("\n") == 1 and f"stopped by signal {int(number)} after step" in text
    assert Record(tmp_path / "run").state() == "resumable"
    process = started(command, [*overrides, "task.sleep=0.05"], said)
    process.join(30)
    assert process.exitcode == 0 and "resuming after step" in said.read_text()
    options = {"steps": 30, "task__dropout": 0.2, "task__sleep": 0.05, "workers": workers}
    assert_same(tmp_path / "run", uninterrupted(tmp_path / "whole", "fp32", options))


@pytest.mark.slow
def test_timeout_with_int(tmp_path):
    """A whole process, whose group gets the signal too, as from Ctrl-C in a terminal."""
    call = [sys.executable, str(Path(tiny.__path__[0])), "+recipe=tiny", "out=run", "steps=100000", "task.sleep=0.01"]
    call += ["checkpoint_every=9999999", "workers=2", "tensorboard=false"]
    path = os.pathsep.join([str(Path(cli.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        ["timeout", "-s", "INT", "-k", "30", "12", *call], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode in (124, 130), done.stderr
    assert done.stderr.startswith("mptrain: stopped by signal 2 after step ") and done.stderr.count("\n") == 1
    assert Record(tmp_path / "run").state() == "resumable"
