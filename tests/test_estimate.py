"""Estimates against real steps, and against what is known of the paper's networks."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

from mptrain import compose, files, hollow
from mptrain.config import check
from mptrain.errors import UserError
from mptrain.estimate import _batch as first_batch
from mptrain.estimate import estimate, models, step
from mptrain.gpus import GPUS
from mptrain.growth import CLOSE, Growth, Step
from mptrain.memory import StepMemory
from mptrain.precision import hardware
from mptrain.precision.modes import Precision
from mptrain.results.record import Record
from mptrain.roofline import Operations
from mptrain.tasks.classify import Classify
from mptrain.train import Run

GIB = 2**30
CHEAP = ("gan", "language", "resnet", "ssd")


def measured(config):
    """The most live tensor bytes of a real step on the same batch that finds the optimizers' state in place."""
    run = Run(config, Record("."))
    window = [first_batch(run.task, config.batch_size)[1]] * config.accumulate
    run.step(window)
    with StepMemory(run.held()) as memory:
        run.step(window)
    return memory.peak()


def small(recipe, precision="fp32", **changes):
    values = compose.baseline(recipe, precision) | {"data": "synthetic", "batch_size": 6, "device": "cpu"}
    return check(values | changes)


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=() if name in CHEAP else pytest.mark.slow)
        for name in files.names("recipe")
        if not name.endswith("_paper")
    ],
)
def test_memory_is_that_of_a_real_step(recipe):
    config = small(recipe)
    found = step(config, config.numbers)
    # YOLO's loss costs a little for each box with an object, Faster R-CNN for each region kept: here for all
    most = 1.05 if recipe in ("faster_rcnn", "yolo") else 1.001
    assert 0.999 <= (found.peak - found.memory["input"]) / measured(config) <= most


@pytest.mark.skipif(not hardware.cpu_has_bfloat16(), reason="this CPU has no BF16 kernels")
@pytest.mark.parametrize("recipe", ["language", "resnet"])
def test_memory_in_16_bits_is_that_of_a_real_step(recipe):
    config = small(recipe, "bf16", accumulate=2)
    found = step(config, config.numbers)
    assert found.peak - found.memory["input"] == pytest.approx(measured(config), rel=0.001)


def test_storage_shows_in_the_kinds():
    config = small("resnet")
    plain, half, master = (
        model.step(6) for model in models(config, [Precision.load(n) for n in ("fp32", "bf16_pure", "fp16_master")])
    )
    assert plain.memory["weights"] == 4 * plain.parameters
    assert 2 * half.parameters <= half.memory["weights"] < 2.1 * half.parameters  # normalisation stays FP32
    assert master.memory["weights"] == half.memory["weights"]
    assert plain.memory["copies"] == half.memory["copies"] == 0
    assert master.memory["copies"] == 4 * master.parameters


class Convex:
    """A step whose memory is the larger of two lines."""

    def __init__(self):
        self.asked = []

    def step(self, size):
        self.asked.append(size)
        peak = max(1000 + 70 * size, 3000 + 50 * size)
        return Step(batch_size=size, memory={"weights": 1000, "activations": peak - 1000})


@pytest.mark.parametrize("room", [1000, 3049, 3050, 5000, 7999, 8000, 8070, 100_000, 10**9])
def test_largest_batch_is_the_largest_that_fits(room):
    model = Convex()
    growth = Growth(model.step, 200)
    found = growth.largest(room)
    fits = [size for size in (found, found + 1 + found // 50) if size and model.step(size).peak <= room]
    assert fits == ([found] if found else [])
    assert bool(found) == (room >= 3050)
    asked = len(model.asked)
    assert growth.largest(room) == found  # what is known is not asked again
    assert len(model.asked) == asked


def test_where_memory_was_seen_to_be_straight_nothing_is_traced():
    model = Convex()
    growth = Growth(model.step, 1000)
    sizes = [growth.largest(room) for room in (10**7, 5 * 10**6, 2 * 10**6, 10**6)]
    assert all(
        0 <= room - 70 * size - 1000 <= CLOSE * room
        for size, room in zip(sizes, (10**7, 5 * 10**6, 2 * 10**6, 10**6), strict=True)
    )
    assert len(model.asked) <= 5


@pytest.mark.parametrize(
    ("recipe", "precision", "rel"),
    [("resnet", "bf16", 1e-12), ("language", "fp32", 5e-4)],  # oneDNN rounds its workspaces
)
def test_two_traced_steps_tell_all_others(recipe, precision, rel):
    config = small(recipe, precision)
    (model,) = models(config, [config.numbers])
    growth = Growth(model.step, 6)
    computed = growth.step(42)
    model.step(84)  # a step before, of which something may be kept
    traced = model.step(42)
    assert computed.peak == pytest.approx(traced.peak, rel=rel)
    for (dtype, *work), (other, *other_work) in zip(computed.operations, traced.operations, strict=True):
        assert dtype == other
        assert work == pytest.approx(other_work, rel=2e-3)
    assert 41 <= growth.largest(computed.peak) <= 42


def test_a_loop_over_pictures_has_other_operations_in_a_larger_batch():
    config = small("ssd", batch_size=2)
    (model,) = models(config, [config.numbers])
    growth = Growth(model.step, 2)
    assert not growth.lines
    assert growth.step(3).peak == model.step(3).peak
    assert growth.step(12).peak == pytest.approx(model.step(12).peak, rel=0.01)
    machine = GPUS[0]
    assert growth.seconds(12, machine, "float32") == pytest.approx(model.step(12).seconds(machine, False), rel=0.01)
    assert set(growth.traced) == {2, 3, 4, 12} and not growth.traced[12].operations  # twelve were not traced


def test_asking_for_a_device_moves_nothing():
    found = []
    with FakeTensorMode(), Operations(found):
        assert torch.empty(10).device.type == "cpu"
    assert sum(size for _, _, size in found) == 0


def test_batches_repeat_their_samples():
    given = {"pictures": torch.rand(2, 3, 4, 4), "labels": torch.tensor([7, 8]), "drawn": torch.arange(5), "tries": 9}
    given["hidden"] = torch.tensor([[True, False], [False, False]])
    given |= {"targets": [{"boxes": torch.rand(1, 4)}, {"boxes": torch.rand(3, 4)}], "first": True}
    batch = hollow.batch(given, FakeTensorMode(), 2, 5)
    assert isinstance(batch["pictures"], FakeTensor)
    assert batch["pictures"].shape == (5, 3, 4, 4)
    assert batch["labels"].tolist() == [7, 8, 7, 8, 7]
    assert [len(target["boxes"]) for target in batch["targets"]] == [1, 3, 1, 3, 1]
    assert batch["hidden"].sum() == 3
    assert torch.equal(batch["drawn"], given["drawn"])
    assert (batch["tries"], batch["first"]) == (9, True)


@pytest.mark.slow
def test_resnet50_needs_43_percent_less_in_16_bits():
    config = compose.config(["+recipe=resnet50_paper", "batch_size=32"])
    full, half = (model.step(32) for model in models(config, [Precision.load(name) for name in ("fp32", "fp16")]))
    assert full.parameters == pytest.approx(25.55e6, rel=0.005)
    assert 2.5 * GIB < full.peak < 3.0 * GIB
    assert half.peak / full.peak == pytest.approx(0.57, abs=0.02)
    assert half.memory["weights"] == full.memory["weights"] == 4 * full.parameters
    # 4.1 G multiply-adds a picture forward, twice that backward (but for the first layer's input)
    assert full.flops == half.flops == pytest.approx(32 * 3 * 2 * 4.1e9, rel=0.05)


@pytest.mark.slow
def test_big_lstm_with_its_optimizer():
    found = step(compose.config(["+recipe=language_paper"]), Precision.load("fp32"))
    assert found.parameters == pytest.approx(1.78e9, rel=0.01)
    assert found.memory["weights"] == 4 * found.parameters
    assert found.memory["optimizer"] >= 4 * found.parameters
    assert found.peak > 3 * 4 * found.parameters


def test_what_values_decide_is_refused(monkeypatch):
    monkeypatch.setattr(Classify, "cross_entropy", lambda self, logits, labels: logits.sum() * float(logits.max()))
    with pytest.raises(UserError, match="values decide what happens.*mptrain [+]recipe=resnet data=synthetic steps=3"):
        step(small("resnet"), Precision.load("fp32"))


def test_fp8_keeps_a_byte_for_each_input_of_a_linear_layer():
    config = small("clip", batch_size=16)
    half, eighth = (model.step(512) for model in models(config, [Precision.load(n) for n in ("bf16", "fp8")]))
    assert eighth.memory["activations"] < half.memory["activations"]
    assert eighth.flops == pytest.approx(half.flops, rel=1e-9)
    assert {"float8", "bfloat16"} == {dtype for dtype, flops, _ in eighth.operations if flops}
    assert not any(flops for dtype, flops, _ in half.operations if dtype == "float8")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("precision=fp16_acc16", "precision=fp16 has the same memory"),
        ("scale=layerwise", "goes by the values.*scale=dynamic has the same"),
        ("batch_size=1000000000", "batch_size=1000000000: an estimate goes up to 10,000,000"),
    ],
)
def test_what_has_no_estimate_is_refused(setting, said):
    with pytest.raises(UserError, match=said):
        estimate(["+recipe=resnet", setting])


def test_a_batch_without_statistics_is_no_traceback(monkeypatch):
    def loss(self, logits, labels):
        return torch.nn.functional.batch_norm(logits[:, :, None], None, None, training=True).sum()

    monkeypatch.setattr(Classify, "cross_entropy", loss)
    with pytest.raises(UserError, match="a step over 1 images is none: Expected more than 1 value.*another batch_size"):
        step(small("resnet", batch_size=1), Precision.load("fp32"))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [name for name in files.names("recipe") if name.endswith("_paper")])
def test_every_recipe_of_the_paper_has_an_estimate(recipe):
    config = compose.config([f"+recipe={recipe}", "batch_size=2"])
    (model,) = models(config, [Precision.load("fp16")])
    found = model.step(2)
    assert found.memory["weights"] == 4 * found.parameters > 0
    assert found.flops > 0


def test_initialisation_that_draws_until_it_suffices_ends():
    with hollow.networks(FakeTensorMode()):
        layer = torch.nn.Linear(3, 5)
        assert torch.nn.init.trunc_normal_(layer.weight, std=2.0) is layer.weight
        assert isinstance(layer.weight, FakeTensor)
        with pytest.raises(DataDependentOutputException):
            layer.weight.sum().item()


def test_layout_and_compiler_change_no_memory(capsys):
    plain, last = (small("resnet", "bf16", channels_last=value) for value in (False, True))
    peaks = [step(config, config.numbers).memory for config in (plain, last)]
    assert peaks[0] == peaks[1]
    compiled = small("resnet", "fp16", compile=True)
    assert step(compiled, compiled.numbers).peak == pytest.approx(sum(peaks[0].values()), rel=0.001)
    settings = ["compile=true", "parallel.shard=true", "precision=fp16", "precision.keep_fp32=[softmax]"]
    assert estimate(["+recipe=resnet", "batch_size=2", *settings]) == 0
    printed = capsys.readouterr().out
    assert "compile: operations are counted as they are written" in printed
    assert "parallel.shard: counted is one GPU" in printed
    assert "fp16 keep_fp32=[softmax]" in printed.replace("\n", " ")


def test_the_table_names_machines_and_what_is_left_out(capsys):
    assert estimate(["+recipe=language", "batch_size=4", "precision=bf16"]) == 0
    printed = capsys.readouterr().out.replace("│", "|")
    assert "left out: what the allocator keeps" in printed
    first, second = (line.split("|")[1:-1] for line in printed.splitlines() if "bf16" in line and "|" in line)
    assert first[-5].strip() == second[1].strip() == "-"  # no BF16 on a V100
    assert float(first[-1].replace(",", "")) > 0
    largest = [int(cell.split(":")[0].replace(",", "")) for cell in second[2:]]
    assert 4 < largest[0] == largest[1] < largest[2]


def test_a_model_is_traced_at_any_batch():
    config = small("resnet")
    (model,) = models(config, [config.numbers])
    one, two, four = (model.step(size) for size in (6, 12, 24))
    assert four.flops == 2 * two.flops == 4 * one.flops
    assert four.memory["weights"] == one.memory["weights"]
    assert four.peak - two.peak >= 2 * (two.peak - one.peak) > 0


@pytest.mark.parametrize("shape", [(40, 64, 96, 128), (64, 40, 256, 256)])
def test_a_workspace_is_found_without_running_the_whole(shape, monkeypatch):
    exact = hollow.workspace.__wrapped__(torch.float32, *shape)
    monkeypatch.setattr(hollow, "SMALL", 0.0)
    assert hollow.workspace.__wrapped__(torch.float32, *shape) == pytest.approx(exact, rel=0.05)
