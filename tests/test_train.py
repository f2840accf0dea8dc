import json
import math
import signal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny.runs import last_state, lasting, lines, same_bits, settings, weights
from torch import nn

from mptrain.errors import UserError
from mptrain.tasks.task import Task
from mptrain.train import Run, train

pytestmark = pytest.mark.usefixtures("tiny")


def trained(folder, *args, **changes):
    summary = train(settings(*args, out=str(folder), **changes))
    return summary, weights(folder)


def batch_order(samples, batch_size, seed):
    epoch = 0
    while True:
        order = np.random.default_rng((seed, epoch)).permutation(samples)
        yield from (order[i : i + batch_size] for i in range(0, samples, batch_size))
        epoch += 1


@pytest.mark.parametrize("accumulate, clip", [(1, None), (1, 0.5), (3, 0.5)])
def test_fp32_is_a_plain_pytorch_loop(tmp_path, accumulate, clip):
    _, found = trained(
        tmp_path / "run", task__norm=True, task__dropout=0.2, accumulate=accumulate, clip=clip, batch_size=7, seed=3
    )
    rng = np.random.default_rng(3)
    x = torch.from_numpy(rng.standard_normal((40, 8)).astype(np.float32))
    y = (x[:, :4].sum(1) > 0).long() + 2 * (x[:, 4:].sum(1) > 0).long()

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    order = batch_order(40, 7, 3)
    used = 0
    for step in range(20):
        factor = (step + 1) / 5 if step < 4 else 0.5 * (1 + math.cos(math.pi * (step - 4) / 16))
        optimizer.param_groups[0]["lr"] = 0.1 * factor
        optimizer.zero_grad()
        window = [next(order) for _ in range(min(accumulate, 6 - used % 6))]  # an epoch has six batches
        used += len(window)
        for indices in window:
            loss = F.cross_entropy(model(x[indices]), y[indices])
            (loss if len(window) == 1 else loss * (len(indices) / sum(map(len, window)))).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    assert same_bits(found, {f"model.{key}": value for key, value in model.state_dict().items()})


def test_a_power_of_two_scale_changes_no_bit_in_fp32(tmp_path):
    _, one = trained(tmp_path / "1", clip=1.0)
    for scale in (2.0**-10, 2.0**12, "dynamic"):
        _, scaled = trained(tmp_path / str(scale), clip=1.0, scale=scale)
        assert same_bits(one, scaled)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "fp16_master"])
def test_clip_means_the_same_under_any_scale(tmp_path, precision):
    def delta(**changes):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        config = settings("tiny", precision, out=str(folder), steps=1, clip=0.01, schedule__warmup=0, **changes)
        train(config)
        torch.manual_seed(0)
        before = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        state = last_state(folder)
        after = state["weights"]["model"] if precision == "fp16_master" else list(state["models"]["model"].values())
        return math.sqrt(sum(((a - b.detach()) ** 2).sum() for a, b in zip(after, before.parameters(), strict=True)))

    for scale in (1.0, 128.0, "dynamic"):
        assert delta(scale=scale) == pytest.approx(0.1 * 0.01, rel=0.01)


def test_uneven_accumulation_weighs_samples_alike(tmp_path):
    cases = [(10, 1, 12), (2, 5, 12), (4, 3, 12)]  # 10; 2+2+2+2+2; 4+4+2
    found = [
        trained(tmp_path / str(i), task__samples=10, batch_size=size, accumulate=accumulate, steps=steps)[1]
        for i, (size, accumulate, steps) in enumerate(cases)
    ]
    for other in found[1:]:
        for key in found[0]:
            torch.testing.assert_close(other[key], found[0][key], rtol=0, atol=1e-6)
    summary = json.loads((tmp_path / "2" / "summary.json").read_text())
    assert summary["steps"] == {"attempted": 12, "applied": 12, "skipped": 0}


def test_the_schedule_begins_at_the_first_applied_step(tmp_path):
    summary, _ = trained(
        tmp_path / "run", "tiny", "fp16", task__bad=[0, 1, 2], task__bad_factor=100.0, scaling__init=2.0**22,
        schedule={"name": "linear", "warmup": 3}, steps=12, log_every=1, scale="dynamic",
    )  # fmt: skip
    log = [line for line in lines(tmp_path / "run") if "loss" in line]
    skipped = [line["step"] for line in log if line.get("skipped")]
    assert skipped[:1] == [1] and 3 <= len(skipped) < 12
    applied = [line["lr"] for line in log if not line.get("skipped")]
    assert applied[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert log[0]["lr"] == pytest.approx(0.025)
    steps = summary["steps"]
    assert steps["applied"] + steps["skipped"] == steps["attempted"] == 12 and steps["skipped"] == len(skipped)


def test_a_static_scale_stays_and_its_skips_are_counted(tmp_path):
    summary, found = trained(tmp_path / "run", "tiny", "fp16", scale=128.0, task__bad=[2])
    assert summary["final_scale"] == 128 and summary["steps"]["skipped"] == 1
    assert all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize("precision, scale", [("fp16", "dynamic"), ("fp32", None), ("bf16", None)])
def test_ten_bad_batches_then_good_ones(tmp_path, precision, scale):
    summary, found = trained(
        tmp_path / "run", "tiny", precision, scale=scale, task__bad=list(range(10)), task__bad_factor=1e39,
        task__samples=160, steps=20, max_skips=11,
    )  # fmt: skip
    assert summary["status"] == "finished"
    assert summary["steps"] == {"attempted": 20, "applied": 10, "skipped": 10}
    assert summary["metric"]["value"] > 0.3 and all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize("precision", ["fp32", "fp16", "fp16_master", "fp16_nomaster", "bf16", "bf16_pure", "tf32"])
def test_endless_bad_batches_end_the_run_as_diverged(tmp_path, precision, capsys):
    config = settings(
        "tiny", precision, out=str(tmp_path / "run"), task__bad=[-1], task__bad_factor=1e39, task__norm=True,
        steps=40, max_skips=5,
    )  # fmt: skip
    summary = train(config)
    assert summary["status"] == "diverged" and summary["metric"]["value"] is None
    assert summary["steps"] == {"attempted": 5, "applied": 0, "skipped": 5}
    scale = "2048" if precision.startswith("fp16") else "1"
    assert f"the last at step 5 with scale {scale}; first in the data that reaches 0 (Linear)" in summary["reason"]
    assert all(value.isfinite().all() for value in weights(tmp_path / "run").values())
    assert capsys.readouterr().out.startswith("diverged: ")
    assert train(config)["reason"] == summary["reason"]  # and is not tried again


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_batchnorm_survives_a_huge_batch(tmp_path, precision):
    summary, found = trained(
        tmp_path / "run", "tiny", precision, task__norm=True, task__bad=[2], task__bad_factor=1e38, steps=15
    )
    assert summary["steps"]["skipped"] >= 1
    assert all(value.isfinite().all() for value in found.values())
    assert found["model.1.num_batches_tracked"] == summary["steps"]["applied"]
    assert math.isfinite(summary["metrics"]["loss"])


def test_two_optimizers_with_an_overflow_in_one(tmp_path):
    options = {"task__pair": True, "task__second_bad": [1, 3], "steps": 8, "log_every": 1, "task__samples": 80}
    summary, _ = trained(tmp_path / "run", "tiny", "fp16", **options)
    assert summary["steps"] == {"attempted": 8, "applied": 6, "skipped": 2, "by_optimizer": {"first": 0, "second": 2}}
    log = [line for line in lines(tmp_path / "run") if "loss" in line]
    assert [line["applied"] for line in log] == list(range(1, 9))
    assert [line["scale"] for line in log] == [65536, 32768, 32768, 16384, 16384, 16384, 16384, 16384]


def test_the_other_optimizer_moves_as_if_alone(tmp_path):
    _, alone = trained(tmp_path / "a", task__pair=True)
    _, beside = trained(tmp_path / "b", task__pair=True, task__second_bad=[1, 3])
    firsts = {key: value for key, value in alone.items() if key.startswith("first.")}
    assert same_bits(firsts, {key: value for key, value in beside.items() if key.startswith("first.")})
    assert not same_bits(alone, beside)


def test_an_optimizer_without_gradients_waits(tmp_path):
    summary, found = trained(tmp_path / "run", "tiny", "fp16", task__pair=True, task__second_from=1000, steps=8)
    assert summary["steps"]["applied"] == 3 and summary["steps"]["skipped"] == 0
    log = [line for line in lines(tmp_path / "run") if "loss" in line]
    assert log[-1]["applied"] == 8 and set(log[-1]["loss"]) == {"first", "second"}
    trained(tmp_path / "short", "tiny", "fp16", task__pair=True, task__second_from=1000, steps=4)
    assert set(lines(tmp_path / "short")[0]["loss"]) == {"first"}


@pytest.mark.parametrize("precision", ["fp32", "fp16", "fp16_master", "bf16_pure"])
@pytest.mark.parametrize("evaluated_in", ["fp32", "same"])
def test_evaluation_leaves_training_alone(tmp_path, precision, evaluated_in):
    options = {"task__norm": True, "task__dropout": 0.3, "ema": 0.9, "eval__precision": evaluated_in}
    _, without = trained(tmp_path / "a", "tiny", precision, **options)
    _, with_evaluations = trained(tmp_path / "b", "tiny", precision, eval__every=3, **options)
    assert same_bits(without, with_evaluations)
    assert [line["step"] for line in lines(tmp_path / "b") if "eval" in line] == [3, 6, 9, 12, 15, 18, 20]


def test_evaluation_precision_is_recorded_and_real(tmp_path):
    fp32 = trained(tmp_path / "a", "tiny", "bf16")[0]
    same = trained(tmp_path / "b", "tiny", "bf16", eval__precision="same")[0]
    assert (fp32["eval_precision"], same["eval_precision"]) == ("fp32", "same")
    assert fp32["metrics"]["loss"] != same["metrics"]["loss"]
    assert fp32["metrics"]["loss"] == pytest.approx(same["metrics"]["loss"], rel=0.02)


def test_averaged_weights_are_what_is_evaluated(tmp_path):
    plain = trained(tmp_path / "a")[0]
    averaged = trained(tmp_path / "b", ema=0.999)[0]
    assert same_bits(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert averaged["metrics"]["loss"] > 1.05 * plain["metrics"]["loss"]  # hardly moved from where it began


def test_nan_metric_is_null_in_strict_json(tmp_path):
    trained(tmp_path / "run", task__nan_metric=True)

    def refuse(constant):
        raise AssertionError(constant)

    text = (tmp_path / "run" / "summary.json").read_text()
    assert json.loads(text, parse_constant=refuse)["metric"]["value"] is None
    assert lines(tmp_path / "run")[-1]["eval"]["accuracy"] is None


def test_instruments_change_no_bit(tmp_path, monkeypatch):
    options = {"task__norm": True, "task__dropout": 0.3}
    for precision in ("fp32", "fp16", "bf16", "tf32"):
        _, watched = trained(tmp_path / f"a{precision}", "tiny", precision, **options)
        with monkeypatch.context() as patch:
            patch.setattr(Run, "measuring", lambda self: None)
            _, unwatched = trained(tmp_path / f"b{precision}", "tiny", precision, **options)
        assert same_bits(watched, unwatched)


def test_what_ran_is_recorded(tmp_path):
    formats = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "tf32": "tf32", "fp16_master": "float16"}
    for precision, name in formats.items():
        summary, _ = trained(tmp_path / precision, "tiny", precision, task__norm=True)
        assert summary["dtypes"]["matmul"] == name and summary["dtypes"]["loss"] == "float32"
        assert summary["memory"]["peak_mib"] > 0


def test_memory_counts_masters_averages_and_optimizer_state(tmp_path):
    def peak(name, *args, **changes):
        summary, _ = trained(tmp_path / name, *args, task__hidden=512, task__depth=2, steps=3, **changes)
        return summary["memory"]["peak_mib"]

    parameters = (8 * 512 + 512 + 512 * 512 + 512 + 512 * 4 + 4) * 4 / 2**20
    plain = peak("plain", optimizer={"name": "sgd", "lr": 0.1})
    assert plain >= 2 * parameters  # weights and gradients
    assert peak("momentum") == pytest.approx(plain + parameters, rel=0.15)
    adam = peak("adam", optimizer={"name": "adam", "lr": 0.1})
    assert adam >= plain + 1.9 * parameters
    assert peak("averaged", ema=0.9) >= peak("momentum again") + 0.9 * parameters
    # 16-bit weights and gradients (half each), FP32 masters with gradients of their own
    assert peak("masters", "tiny", "fp16_master", optimizer={"name": "sgd", "lr": 0.1}) >= 2.4 * parameters


def test_runs_of_one_process_do_not_influence_each_other(tmp_path):
    jobs = [("fp16_master", 1), ("fp32", 0), ("bf16", 0), ("fp32", 1)]
    options = {"task__dropout": 0.2, "task__norm": True, "ema": 0.9, "threads": 1}

    def results(name, order):
        for precision, seed in order:
            trained(tmp_path / name / f"{precision}{seed}", "tiny", precision, seed=seed, **options)
        return [
            (weights(tmp_path / name / f"{precision}{seed}"), lasting(tmp_path / name / f"{precision}{seed}"))
            for precision, seed in jobs
        ]

    torch.set_num_threads(2)
    before = (torch.get_num_threads(), signal.getsignal(signal.SIGINT), torch.is_autocast_enabled("cpu"))
    forward, backward = results("a", jobs), results("b", jobs[::-1])
    for (bits, summary), (other_bits, other) in zip(forward, backward, strict=True):
        assert same_bits(bits, other_bits) and summary == other
    assert before == (torch.get_num_threads(), signal.getsignal(signal.SIGINT), torch.is_autocast_enabled("cpu"))


def test_throughput_counts_samples_by_the_clock(tmp_path, monkeypatch):
    ticks = iter(range(10**6))
    config = settings(out=str(tmp_path / "run"), task__samples=20, steps=9, warmup=2, eval__every=4)
    from mptrain.results.record import Record

    record = Record(config.folder())
    with record.opened(config.model_dump(), set()):
        run = Run(config, record)
        run.throughput._clock = lambda: float(next(ticks))
        summary = run.to_the_end()
    # batches of 8, 8 and 4; two steps of warm-up; 4 + 8 + 8 + 4 + 8 + 8 + 4 samples; the window opens, pauses for two
    # evaluations and one checkpoint, and closes: four intervals of one tick
    assert summary["throughput"] == {"value": 44 / 4, "unit": "samples/s", "warmup": 2, "steps": 7}
    short, _ = trained(tmp_path / "short", steps=3, warmup=3)
    assert short["throughput"]["value"] is None


def test_a_crash_is_recorded_and_can_be_tried_again(tmp_path):
    config = settings(out=str(tmp_path / "run"), task__crash_at=1002, checkpoint_every=5)
    with pytest.raises(RuntimeError, match="told to crash"):
        train(config)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed" and summary["reason"] == "RuntimeError: the tiny task was told to crash"
    assert "losses" in summary["traceback"]
    with pytest.raises(RuntimeError, match="told to crash"):
        train(config)
    assert last_state(tmp_path / "run")["steps"]["attempted"] == 5


def test_a_mistake_before_the_first_step_leaves_no_folder(tmp_path):
    with pytest.raises(UserError, match="data=nothing is unknown"):
        train(settings(out=str(tmp_path / "deep" / "run"), data="nothing"))
    assert not (tmp_path / "deep" / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("device", ["cuda", "cuda:7"])
def test_a_missing_gpu_is_said(tmp_path, device):
    with pytest.raises(UserError, match=f"device={device}: torch finds no CUDA GPU here"):
        train(settings(out=str(tmp_path / "run"), device=device))


def test_finished_runs_are_not_repeated(tmp_path, capsys):
    config = settings(out=str(tmp_path / "run"))
    first = train(config)
    capsys.readouterr()
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    assert train(config) == first
    assert capsys.readouterr().out == f"already finished, nothing to do: {tmp_path / 'run'}\n"
    changed = {path for path, time in files.items() if path.stat().st_mtime_ns != time}
    assert changed <= {tmp_path / "run" / "lock", tmp_path / "run"}


def test_another_configuration_is_refused_and_a_cosmetic_change_is_not(tmp_path):
    train(settings(out=str(tmp_path / "run")))
    with pytest.raises(UserError, match=r"another configuration \(steps: 20 -> 21; optimizer.lr: 0.1 -> 0.2\)"):
        train(settings(out=str(tmp_path / "run"), steps=21, optimizer__lr=0.2))
    cosmetic = {"log_every": 3, "workers": 1, "checkpoint_every": 7, "progress": False, "tensorboard": True}
    assert train(settings(out=str(tmp_path / "run"), **cosmetic))["status"] == "finished"


def test_every_task_says_what_it_is():
    assert {"metric", "unit", "margin"} <= Task.__annotations__.keys()


def test_what_follows_the_last_loss_runs_in_fp32_and_one_loss_too_many_is_refused(tmp_path, monkeypatch):
    from mptrain.tasks.tiny import Tiny

    once, seen = Tiny.losses, []

    def losses(self, batch, again=0):
        for phase in once(self, batch):
            yield phase
            seen.append(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)
            yield from [phase] * again

    monkeypatch.setattr(Tiny, "losses", losses)
    train(settings(precision="bf16", out=str(tmp_path / "run"), steps=2))
    assert seen and set(seen) == {torch.float32}
    monkeypatch.setattr(Tiny, "losses", lambda self, batch: losses(self, batch, again=1))
    with pytest.raises(ValueError, match="more losses than it has networks, the next for 'model'"):
        train(settings(out=str(tmp_path / "another")))
