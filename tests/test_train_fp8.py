"""Whole runs in FP8: what they say, resume, skip, count, watch, share among processes."""

import json
from unittest.mock import patch

import pytest
from tiny.ranks import close, together
from tiny.runs import last_state, lasting, lines, same_bits, settings, stopped_at_each_checkpoint, weights

from mptrain.precision import hardware
from mptrain.results.record import Record
from mptrain.train import Run, train
from mptrain.watch.store import read_part

pytestmark = pytest.mark.usefixtures("tiny")

DEEP = {"task__depth": 3}  # 8-16-16-16-4: the two in the middle are taken


def fp8(folder, **changes):
    return settings("tiny", "fp8", out=str(folder), **{**DEEP, **changes})


def test_layers_are_printed_and_recorded(tmp_path, capsys):
    summary = train(fp8(tmp_path / "run"))
    out = {"first and last layer": ["0", "6"]}
    assert summary["fp8"] == {"layers": ["2", "4"], "out": out} and summary["backend"] == "emulated"
    assert summary["dtypes"]["matmul"] == "bfloat16 and float8_e4m3fn" and summary["scale"] == "none"
    said = capsys.readouterr().out
    assert said.startswith("fp8: E4M3 forward and E5M2 gradients in 2, 4; in BF16:\n  first and last layer: 0, 6\n")
    fp32 = train(settings("tiny", "fp32", out=str(tmp_path / "fp32"), **DEEP))
    assert summary["metrics"]["loss"] == pytest.approx(fp32["metrics"]["loss"], abs=0.05)
    assert not same_bits(weights(tmp_path / "run"), weights(tmp_path / "fp32"))
    capsys.readouterr()
    shallow = train(settings("tiny", "fp8", out=str(tmp_path / "shallow")))
    assert shallow["dtypes"]["matmul"] == "bfloat16" and shallow["fp8"]["layers"] == []
    bf16 = train(settings("tiny", "bf16", out=str(tmp_path / "bf16")))
    assert "fp8" not in bf16 and same_bits(weights(tmp_path / "shallow"), weights(tmp_path / "bf16"))
    assert "fp8: no layer of this network multiplies in FP8" in capsys.readouterr().out


def test_resumed_from_every_step_it_has_the_same_bits(tmp_path):
    options = {"steps": 8, "checkpoint_every": 1, "task__dropout": 0.2, "task__norm": True, "count": True, "ema": 0.9}
    train(fp8(tmp_path / "whole", **options))
    config = fp8(tmp_path / "cut", **options)
    for _ in range(8):
        with pytest.raises(KeyboardInterrupt), stopped_at_each_checkpoint():
            train(config)
    train(config)
    assert same_bits(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
    assert lasting(tmp_path / "cut") == lasting(tmp_path / "whole")
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    counts = [json.loads((tmp_path / name / "counts.json").read_text()) for name in ("cut", "whole")]
    assert counts[0] == counts[1]
    rows = {(row["layer"], row["direction"]): row for row in counts[0]}
    assert set(rows) == {(layer, d) for layer in ("4", "8") for d in ("input", "weight", "grad_output")}
    assert rows["4", "weight"]["values"] == 8 * 256 and rows["4", "input"]["values"] == 8 * 8 * 16


def test_a_loss_scale_changes_no_bit(tmp_path):
    train(fp8(tmp_path / "1"))
    for scale in (2.0**-10, 2.0**12, "layerwise"):
        summary = train(fp8(tmp_path / str(scale), scale=scale))
        assert summary["final_scale"] == (65536 if scale == "layerwise" else scale)
        assert same_bits(weights(tmp_path / "1"), weights(tmp_path / str(scale)))


def test_bad_batches_are_skipped_and_the_layer_is_named(tmp_path):
    bad = {"task__bad_factor": 1e39, "task__norm": True}
    good = train(fp8(tmp_path / "good", task__bad=[1, 2], **bad))
    assert good["steps"] == {"attempted": 20, "applied": 18, "skipped": 2}
    assert all(value.isfinite().all() for value in weights(tmp_path / "good").values())
    lost = train(fp8(tmp_path / "lost", task__bad=[-1], max_skips=3, **bad))
    assert lost["status"] == "diverged" and "first in the data that reaches 0 (Linear)" in lost["reason"]


def test_a_nonfinite_weight_is_found_where_it_is(tmp_path):
    config = fp8(tmp_path / "run", max_skips=3)
    real = Run.step

    def step(self, window):
        self.models["model"][4].weight.data[3, 5] = float("inf")
        return real(self, window)

    with patch.object(Run, "step", step):
        summary = train(config)
    assert summary["status"] == "diverged" and "first in the weights of 4 (Linear)" in summary["reason"]


def test_a_watched_run_has_the_same_bits_and_counts_operands(tmp_path):
    train(fp8(tmp_path / "plain", steps=3))
    train(fp8(tmp_path / "watched", steps=3, watch={"enabled": True, "every": 1}))
    assert same_bits(weights(tmp_path / "plain"), weights(tmp_path / "watched"))
    assert last_state(tmp_path / "watched")["scaler"] == last_state(tmp_path / "plain")["scaler"]
    parts = (tmp_path / "watched" / "watch.parquet").iterdir()
    rows = [row for part in parts for row in read_part(part) if row["name"] == "products"]
    counted = {(row["layer"], row["kind"], row["dtype"]) for row in rows}
    rest = {(layer, kind, dtype) for layer, kind, dtype in counted if dtype == "bfloat16"}
    assert counted - rest == {
        (layer, kind, dtype)
        for layer in ("2", "4")
        for kind, dtype in (("input", "float8_e4m3fn"), ("weight", "float8_e4m3fn"), ("grad_output", "float8_e5m2"))
    }
    places = {("0", "grad_weight"), ("6", "grad_input"), ("6", "grad_weight")}  # the data takes no gradient
    assert {key[:2] for key in rest} == (places if hardware.cpu_has_bfloat16() else set())
    assert all(row["count"] == 8 * 16 for row in rows if row["kind"] in ("input", "grad_output"))


@pytest.mark.parametrize("evaluated_in", ["fp32", "same"])
def test_evaluation(tmp_path, evaluated_in):
    summary = train(fp8(tmp_path / "run", eval__precision=evaluated_in, eval__every=3))
    again = train(fp8(tmp_path / "again", eval__precision=evaluated_in))
    assert same_bits(weights(tmp_path / "run"), weights(tmp_path / "again"))
    assert summary["metrics"] == again["metrics"] and summary["eval_precision"] == evaluated_in
    if evaluated_in == "same":
        full = train(fp8(tmp_path / "full"))
        assert full["metrics"]["loss"] != summary["metrics"]["loss"]
        assert full["metrics"]["loss"] == pytest.approx(summary["metrics"]["loss"], abs=0.05)


@pytest.mark.slow
def test_two_processes_do_what_one_does(tmp_path):
    """Units differ from part to part of a batch; being powers of two, they change little of what is rounded."""
    alone = fp8(tmp_path / "alone", steps=12)
    train(alone)
    together(alone.model_copy(update={"out": str(tmp_path / "shared")}), 2, tmp_path)
    close(weights(tmp_path / "shared"), weights(tmp_path / "alone"), rtol=1e-2, atol=1e-2)
    summary = Record(tmp_path / "shared").read_summary()
    assert summary["fp8"]["layers"] == ["2", "4"] and summary["dtypes"]["matmul"] == "bfloat16 and float8_e4m3fn"
