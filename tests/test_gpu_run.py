"""On a CUDA GPU: whole runs. One synchronisation a step, switches, memory, resuming, every precision."""

import gc
import json
import warnings

import pytest
import torch
from tiny.runs import settings, weights

from mptrain import compose, estimate, files
from mptrain.config import check
from mptrain.precision import hardware
from mptrain.results.record import Record
from mptrain.train import Run, train

pytestmark = pytest.mark.gpu
SYNCHRONISED = "called a synchronizing CUDA operation"


def configured(tmp_path, recipe, precision, **changes):
    values = compose.baseline(recipe, precision) | {"data": "synthetic", "device": "cuda", "progress": False}
    return check(values | {"tensorboard": False, "out": str(tmp_path / f"{recipe}-{precision}")} | changes)


def synchronisations(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum(SYNCHRONISED in str(warning.message) for warning in caught)


@pytest.mark.parametrize("precision, scale", [("fp32", None), ("bf16", None), ("fp16", "dynamic"), ("fp16", 128)])
@pytest.mark.parametrize("recipe", ["resnet", "translate"])
def test_one_synchronisation_a_step(tmp_path, recipe, precision, scale):
    config = configured(tmp_path, recipe, precision, scale=scale, batch_size=32)
    run = Run(config, Record(config.folder()))
    windows = run.loader.windows()
    for _ in range(3):
        run.step(next(windows))
    window = next(windows)
    torch.cuda.synchronize()
    assert synchronisations(lambda: run.step(window)) == 1
    assert synchronisations(lambda: torch.ones(1, device="cuda").item()) == 1  # the counter counts


@pytest.mark.parametrize("precision", files.names("precision"))
def test_every_precision_trains(tiny, precision):
    flags = hardware.tf32_flags("cuda")
    sums = [getattr(torch.backends.cuda.matmul, name) for name in hardware.REDUCED_SUMS]
    summary = train(settings(precision=precision, steps=12, device="cuda", out=str(tiny / precision), log_every=1))
    assert summary["status"] == "finished" and summary["device"] == "cuda"
    assert summary["steps"]["applied"] >= 4
    set_to = "tf32" if precision == "tf32" and summary["backend"] == "native" else "ieee"
    assert set(summary["environment"]["tf32"].values()) == {set_to}
    assert hardware.tf32_flags("cuda") == flags
    assert [getattr(torch.backends.cuda.matmul, name) for name in hardware.REDUCED_SUMS] == sums
    assert summary["memory"]["how"] == "torch.cuda.max_memory_allocated" and summary["memory"]["peak_mib"] > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp16_master"])
def test_a_run_is_near_the_same_run_on_a_cpu(tiny, precision):
    """Emulated there, native here: the losses of the first steps agree to rounding."""
    losses = {}
    for device in ("cpu", "cuda"):
        changes = {"steps": 6, "log_every": 1, "device": device, "scale": 8 if "fp16" in precision else None}
        train(settings(precision=precision, out=str(tiny / device), **changes))
        lines = [json.loads(line) for line in (tiny / device / "metrics.jsonl").read_text().splitlines()]
        losses[device] = [line["loss"] for line in lines if "loss" in line]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-5 if precision == "fp32" else 3e-2)


def test_an_overflow_is_skipped_and_leaves_no_trace(tiny):
    config = settings(precision="fp16", scale=2.0**60, device="cuda", out=str(tiny / "run"))
    run = Run(config, Record(config.folder()))
    before = [p.clone() for p in run.models["model"].parameters()]
    assert run.step(next(run.loader.windows()))
    assert run.skipped == {"model": 1} and run.applied == {"model": 0}
    after = list(run.models["model"].parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_killed_run_goes_on_from_its_checkpoint(tiny, monkeypatch, precision):
    def config(folder):
        return settings(precision=precision, steps=12, device="cuda", out=str(tiny / folder), checkpoint_every=5)

    step = Run.step

    def stops_at_the_eighth(self, window):
        if self.attempted == 7:
            raise KeyboardInterrupt
        return step(self, window)

    with monkeypatch.context() as patched:
        patched.setattr(Run, "step", stops_at_the_eighth)
        with pytest.raises(KeyboardInterrupt):
            train(config("again"))
    again, once = train(config("again")), train(config("once"))
    assert again["steps"] == once["steps"] and again["final_scale"] == once["final_scale"]
    a, b = (torch.cat([w.flatten() for w in weights(tiny / folder).values()]) for folder in ("again", "once"))
    torch.testing.assert_close(a, b)


def test_16_bits_save_memory_where_activations_are_most_of_it(tmp_path):
    peaks = {}
    for precision in ("fp32", "bf16", "fp16"):
        config = configured(tmp_path, "resnet", precision, batch_size=512)
        run = Run(config, Record(config.folder()))
        windows = run.loader.windows()
        for _ in range(3):
            run.step(next(windows))
        peaks[precision] = torch.cuda.max_memory_allocated()
        del run, windows
        gc.collect()
    assert peaks["fp16"] < 0.75 * peaks["fp32"]
    assert peaks["bf16"] == pytest.approx(peaks["fp16"], rel=0.05)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("recipe", ["resnet50_paper", "gan_paper"])
def test_estimated_memory_is_what_is_allocated(tmp_path, recipe, precision):
    """At sizes beside which the workspaces of cuBLAS and cuDNN are small."""
    config = configured(tmp_path, recipe, precision, batch_size=128)
    said = estimate.step(config, config.numbers).peak
    run = Run(config, Record(config.folder()))
    window = next(run.loader.windows())
    for _ in range(4):
        run.step(window)
    assert torch.cuda.max_memory_allocated() == pytest.approx(said, rel=0.1)
