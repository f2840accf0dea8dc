"""Several processes on one run: the same numbers as one, the same decisions, one record, nobody left waiting."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny as tiny_package
import torch
from tiny.ranks import close, free_port, ranks, together, waiting_for
from tiny.runs import last_state, lines, same_bits, settings, started, weights

from mptrain import batchnorm, cli, parallel
from mptrain.models.deepspeech import MaskedBatchNorm
from mptrain.results.record import Record
from mptrain.tasks.clip import contrastive_loss
from mptrain.tasks.language import Language
from mptrain.train import train
from mptrain.watch.store import read_part

pytestmark = pytest.mark.usefixtures("tiny")


RICH = {
    "task__norm": True,
    "clip": 0.5,
    "ema": 0.9,
    "accumulate": 2,
    "eval__every": 4,
    "log_every": 3,
    "checkpoint_every": 5,
    "task__samples": 43,  # the last batch of an epoch is smaller, and smaller than three ranks
}  # not with Adam, which makes steps of rounding noise where a gradient is zero: biases before a normalisation
CASES = {
    "fp32": ("fp32", {}, 1e-5),
    "fp32, everything": ("fp32", RICH, 1e-4),
    "fp16 that skips": ("fp16", {**RICH, "task__bad": [1, 3], "scaling__interval": 4}, 5e-3),
    "fp16_master": ("fp16_master", {"task__bad": [2], "optimizer": {"name": "adamw", "lr": 0.01}}, 5e-3),
    "two optimizers": ("fp16", {"task__pair": True, "task__second_bad": [1, 3], "task__second_from": 1}, 5e-3),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_as_one_process_with_the_whole_batch(tmp_path, case, size):
    precision, options, tolerance = CASES[case]
    alone = settings("tiny", precision, out=str(tmp_path / "alone"), steps=12, **options)
    train(alone)
    together(alone.model_copy(update={"out": str(tmp_path / "shared")}), size, tmp_path)
    close(weights(tmp_path / "shared"), weights(tmp_path / "alone"), rtol=tolerance, atol=tolerance)
    one, many = lines(tmp_path / "alone"), lines(tmp_path / "shared")
    for mine, theirs in zip(one, many, strict=True):
        assert {k: mine.get(k) for k in ("step", "scale", "applied", "skipped")} == {
            k: theirs.get(k) for k in ("step", "scale", "applied", "skipped")
        }
        if "eval" in mine:
            assert theirs["eval"]["loss"] == pytest.approx(mine["eval"]["loss"], rel=2 * tolerance)
        elif not isinstance(mine["loss"], dict) and mine["loss"] is not None:
            assert theirs["loss"] == pytest.approx(mine["loss"], rel=2 * tolerance, abs=tolerance)
    summary = Record(tmp_path / "shared").read_summary()
    assert summary["environment"]["device_name"].startswith(f"{size} x ")


def test_an_overflow_on_one_rank_skips_on_all(tmp_path):
    """Sample 3 is in one part of one batch; every rank skips that step and halves its scale."""
    options = {"task__bad_sample": 3, "task__norm": True, "log_every": 1, "steps": 8}
    train(settings("tiny", "fp16", out=str(tmp_path / "alone"), **options))
    together(settings("tiny", "fp16", out=str(tmp_path / "shared"), **options), 2, tmp_path)
    one, many = ([(line["step"], line["scale"], line["applied"], line.get("skipped")) for line in lines(folder)[:8]]
                 for folder in (tmp_path / "alone", tmp_path / "shared"))  # fmt: skip
    assert one == many and [line[3] for line in one].count(True) == 1 and many[-1][1] == 32768
    close(weights(tmp_path / "shared"), weights(tmp_path / "alone"), rtol=5e-3, atol=5e-3)


def test_divergence_is_everybodys(tmp_path):
    together(settings("tiny", "fp16", out=str(tmp_path / "run"), steps=12, task__bad=[-1], max_skips=3), 2, tmp_path)
    summary = Record(tmp_path / "run").read_summary()
    assert summary["status"] == "diverged" and "forward of 0 (Linear)" in summary["reason"]
    assert (tmp_path / "said1").read_text() == ""


def test_local_batch_normalisation_is_another_experiment(tmp_path):
    options = {"task__norm": True, "steps": 5}
    train(settings(out=str(tmp_path / "alone"), **options))
    together(settings(out=str(tmp_path / "local"), parallel={"batchnorm": "local"}, **options), 2,
             tmp_path)  # fmt: skip
    found, whole = weights(tmp_path / "local"), weights(tmp_path / "alone")
    assert (found["model.1.running_mean"] - whole["model.1.running_mean"]).abs().max() > 1e-3


@pytest.mark.parametrize(("number", "victim"), [(signal.SIGKILL, 1), (signal.SIGKILL, 0), (signal.SIGTERM, 1)])
def test_a_rank_that_ends(tmp_path, number, victim):
    """Killed: the others say so and end; asked to stop: all stop after the same step. Three go on where two were."""
    options = {"task__norm": True, "checkpoint_every": 2, "steps": 30, "log_every": 5}
    config = settings(out=str(tmp_path / "run"), task__sleep=0.05, **options)
    processes = ranks(config, 2, tmp_path)
    waiting_for(lambda: list(tmp_path.glob("run/checkpoints/*.pt")))
    os.kill(processes[victim].pid, number)
    for process in processes:
        process.join(30)
    said = (tmp_path / f"said{1 - victim}").read_text()
    if number == signal.SIGKILL:
        assert processes[1 - victim].exitcode == 1
        assert f"rank {1 - victim} lost another process of this job" in said
    else:
        assert [process.exitcode for process in processes] == [1, 1] and "stopped by signal 15 after step" in said
    assert Record(tmp_path / "run").state() == "resumable"
    together(config, 3, tmp_path)
    assert "resuming after step" in (tmp_path / "said0").read_text()
    train(settings(out=str(tmp_path / "alone"), task__sleep=0.05, **options))
    close(weights(tmp_path / "run"), weights(tmp_path / "alone"), rtol=1e-4, atol=1e-4)
    assert [line["step"] for line in lines(tmp_path / "run")] == [line["step"] for line in lines(tmp_path / "alone")]


def test_resumed_by_as_many_it_has_the_same_bits(tmp_path):
    """Dropout too: each rank's random numbers go on."""
    options = {"task__dropout": 0.3, "task__norm": True, "checkpoint_every": 1, "ema": 0.9}
    together(settings(out=str(tmp_path / "whole"), steps=9, **options), 2, tmp_path)
    config = settings(out=str(tmp_path / "cut"), steps=9, task__sleep=0.03, **options)
    for _ in range(4):
        processes = ranks(config, 2, tmp_path)
        before = len(list(tmp_path.glob("cut/checkpoints/*.pt")))
        waiting_for(lambda before=before: len(list(tmp_path.glob("cut/checkpoints/*.pt"))) > before or before == 2)
        time.sleep(0.05)
        for process in processes:
            process.kill()
            process.join()
    together(config, 2, tmp_path)
    assert same_bits(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
    assert (tmp_path / "cut" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def families(number, port, said):
    """The two families whose batches cannot be looked at part by part, on one rank of two."""
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.manual_seed(0)
    x, y, mask = torch.randn(5, 3), torch.randn(5, 3), torch.rand(5, 7) > 0.3
    frames = torch.randn(5, 4, 7)
    with parallel.joined("cpu") as two:
        mine = slice(0, 3) if number == 0 else slice(3, 5)
        pictures, captions = x[mine].clone().requires_grad_(), y[mine].clone().requires_grad_()
        loss = contrastive_loss(two.together(pictures) @ two.together(captions).T)
        (loss * len(pictures) / 5).backward()
        norm = MaskedBatchNorm(4)
        batchnorm.synchronise([norm], two)
        out = norm(frames[mine], mask[mine])
        torch.save(
            [loss.detach(), pictures.grad, captions.grad, out.detach(), norm.state_dict()], said / f"{number}.pt"
        )


def test_losses_that_look_across_the_batch(tmp_path):
    port = free_port()
    processes = [started(families, number, port, tmp_path) for number in range(2)]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    torch.manual_seed(0)
    x, y, mask = torch.randn(5, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True), torch.rand(5, 7) > 0.3
    frames = torch.randn(5, 4, 7)
    loss = contrastive_loss(x @ y.T)
    loss.backward()
    norm = MaskedBatchNorm(4)
    out = norm(frames, mask)
    parts = [torch.load(tmp_path / f"{number}.pt", weights_only=True) for number in range(2)]
    for part in parts:
        torch.testing.assert_close(part[0], loss.detach())
        close(part[4], norm.state_dict())
    for place, whole in ((1, x.grad), (2, y.grad), (3, out.detach())):
        torch.testing.assert_close(torch.cat([part[place] for part in parts]), whole)


def test_a_carried_state_is_put_together_and_cut():
    whole = {"output": torch.randn(2, 7, 3), "cell": torch.randn(2, 7, 4)}
    task = object.__new__(Language)
    parts = [task.part(whole, rank, 3) for rank in range(3)]
    assert [part["cell"].shape[1] for part in parts] == [len(part) for part in np.array_split(np.arange(7), 3)]
    close(task.merged(parts), whole)
    assert task.merged([{}, {}]) == {}


@pytest.mark.slow
def test_torchrun_restarts_a_job_whose_rank_died(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    call = [*launch, str(Path(tiny_package.__path__[0])), "+recipe=tiny", "out=run", "steps=40", "task.sleep=0.05"]
    path = os.pathsep.join([str(Path(parallel.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with open(tmp_path / "said", "wb") as said:
        job = subprocess.Popen([*call, "checkpoint_every=3"], env=environment, stdout=said, stderr=said)
        waiting_for(lambda: list(tmp_path.glob("run/checkpoints/*.pt")))
        for child in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split():
            if b"RANK=1" in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                os.kill(int(child), signal.SIGKILL)
        assert job.wait(120) == 0, (tmp_path / "said").read_text()
    assert "resuming after step" in (tmp_path / "said").read_text()
    train(settings(out=str(tmp_path / "alone"), steps=40))
    close(weights(tmp_path / "run"), weights(tmp_path / "alone"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("given", ["two 0 0", "2 2 0", "0 0 0", "2", "2 x 0", "2 0 -1", ""])
def test_an_environment_that_is_no_job(monkeypatch, capsys, given):
    for name, value in zip(("WORLD_SIZE", "RANK", "LOCAL_RANK"), given.split(" "), strict=False):
        monkeypatch.setenv(name, value)
    assert cli.main(["+recipe=tiny", "steps=1"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("mptrain: the environment says WORLD_SIZE=") and said.count("\n") == 1, said


def test_a_sweep_is_not_shared(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["-m", "+recipe=tiny", "seed=0,1"]) == 1
    assert "start torchrun once for each run" in capsys.readouterr().err


def test_an_error_of_rank_0_ends_all(tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    processes = ranks(settings(out=str(tmp_path), steps=1), 2, tmp_path)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [1, 1]
    assert "rank 1 ends with rank 0" in (tmp_path / "said1").read_text()


def test_a_finished_run_is_left_alone_by_all(tmp_path):
    config = settings(out=str(tmp_path / "run"), steps=1)
    train(config)
    before = last_state(tmp_path / "run")
    together(config, 2, tmp_path)
    assert "already finished" in (tmp_path / "said0").read_text() and (tmp_path / "said1").read_text() == ""
    assert torch.equal(before["random"]["torch"], last_state(tmp_path / "run")["random"]["torch"])


def test_native_products_are_counted_among_several_too(tmp_path):
    watch = {"enabled": True, "every": 2}
    together(settings("tiny", "bf16", out=str(tmp_path / "shared"), steps=6, watch=watch), 2, tmp_path)
    rows = [
        row for part in sorted((tmp_path / "shared" / "watch.parquet").glob("*.parquet")) for row in read_part(part)
    ]
    counted = [row for row in rows if row["name"] == "products"]
    assert {row["kind"] for row in counted} >= {"grad_weight"} and {row["dtype"] for row in counted} == {"bfloat16"}
    assert {row["flushed"] for row in counted} == {0}  # BF16 reaches as low as FP32
