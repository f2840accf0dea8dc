"""What people have met in mixed precision training, each trap beside what happens here, to the number."""

import ast
import math
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torchvision
from tiny.runs import settings
from torch import nn

import mptrain
from mptrain import cli, tasks
from mptrain.data import lm1b
from mptrain.errors import UserError
from mptrain.optim import optimizer
from mptrain.precision.counting import KINDS, count
from mptrain.precision.modes import Precision
from mptrain.precision.scaling import DynamicScaler, DynamicSettings, loss_scaler
from mptrain.process import Stopped
from mptrain.tasks.classify import Classify
from mptrain.tasks.language import Language
from mptrain.train import train
from mptrain.watch.statistics import describe

NAN = float("nan")


def one_weight(value=1.0, size=1):
    weight = nn.Parameter(torch.full((size,), value))
    return weight, torch.optim.SGD([weight], lr=1.0)


def torchs_step(scaler, weight, sgd, gradient):
    """An iteration with torch's own scaler, whose gradient is already there."""
    scaler.scale(torch.ones(()))
    weight.grad = torch.full_like(weight, gradient)
    scaler.step(sgd)
    scaler.update()


def our_step(scaler, weight, sgd, gradient):
    weight.grad = torch.full_like(weight, gradient)
    scaler.step(sgd)
    scaler.update()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the default device is the right one")
def test_a_scaler_that_was_not_told_its_device_scales_here_all_the_same():
    with pytest.warns(UserWarning, match="CUDA is not available"):
        theirs = torch.amp.GradScaler()
    assert not theirs.is_enabled() and theirs.state_dict() == {} and theirs.get_scale() == 1.0
    with pytest.raises(RuntimeError, match="source state dict is empty"):
        torch.amp.GradScaler("cpu").load_state_dict({})
    assert loss_scaler("dynamic").scale(torch.ones(())).item() == 65536


def test_bad_steps_never_take_the_scale_below_its_floor():
    (weight, sgd), theirs = one_weight(), torch.amp.GradScaler("cpu")
    bad = 0
    while math.isfinite(1 / torch.tensor(theirs.get_scale())):
        torchs_step(theirs, weight, sgd, NAN)
        bad += 1
    assert bad == 144
    ours = DynamicScaler()
    for number in range(1, 145):
        our_step(ours, weight, sgd, NAN)
        assert ours.value == max(1.0, 2.0 ** (16 - number))
    assert weight.item() == 1.0 and ours.consecutive_skips == 144


def test_a_scale_without_an_inverse_is_refused():
    (weight, sgd), theirs = one_weight(), torch.amp.GradScaler("cpu", init_scale=2.0**-130)
    theirs.scale(weight.sum()).backward()
    theirs.step(sgd)
    assert weight.item() == -math.inf
    with pytest.raises(UserError, match="positive number"):
        loss_scaler(2.0**-130)


def test_after_two_hundred_bad_steps_healthy_ones_train():
    (weight, sgd), theirs = one_weight(), torch.amp.GradScaler("cpu")
    ours, (mine, my_sgd) = DynamicScaler(), one_weight()
    for _ in range(200):
        torchs_step(theirs, weight, sgd, NAN)
        our_step(ours, mine, my_sgd, NAN)
    sgd.zero_grad()
    theirs.scale(weight.sum()).backward()
    theirs.step(sgd)
    assert theirs.get_scale() == 0.0 and weight.isnan().all()
    my_sgd.zero_grad()
    ours.scale(mine.sum()).backward()
    assert ours.step(my_sgd) is True and mine.item() == 0.0


def test_growth_stops_before_infinity_as_torchs_does():
    (weight, sgd), theirs = one_weight(), torch.amp.GradScaler("cpu", growth_interval=1)
    ours = DynamicScaler(DynamicSettings(interval=1))
    for _ in range(300):
        torchs_step(theirs, weight, sgd, 0.0)
        our_step(ours, weight, sgd, 0.0)
    assert ours.value == theirs.get_scale() == 2.0**127


def test_a_half_loss_under_a_scale_that_half_cannot_hold_is_refused():
    """The gradient of a loss is the scale; 65536 is more than 65504."""
    x = torch.ones(3, dtype=torch.float16, requires_grad=True)
    (x.mean() * torch.tensor(65536.0)).backward()
    assert x.grad.isinf().all()
    with pytest.raises(UserError, match="compute the loss in FP32"):
        loss_scaler(65536).scale(x.mean())
    x.grad = None
    loss_scaler(65536).scale(x.float().mean()).backward()
    assert x.grad.tolist() == [torch.tensor(65536 / 3).half().item()] * 3
    assert loss_scaler(32768).scale(x.mean()).item() == 32768


def test_a_clip_counts_after_unscaling():
    def step_norm(unscales):
        (weight, sgd), scaler = one_weight(size=4), torch.amp.GradScaler("cpu")
        scaler.scale(weight.sum()).backward()  # a gradient of norm 2
        if unscales:
            scaler.unscale_(sgd)
        nn.utils.clip_grad_norm_([weight], 1.0)
        scaler.step(sgd)
        return (weight - 1).norm().item()

    assert step_norm(True) == pytest.approx(1.0, rel=1e-5) and step_norm(False) == pytest.approx(1 / 65536, rel=1e-5)
    (weight, sgd), ours = one_weight(size=4), DynamicScaler()
    ours.scale(weight.sum()).backward()
    ours.unscale_(sgd)
    nn.utils.clip_grad_norm_([weight], 1.0)
    ours.step(sgd)
    assert (weight - 1).norm().item() == pytest.approx(1.0, rel=1e-5)


def test_a_static_scale_is_expressible():
    with pytest.raises(AssertionError):
        torch.amp.GradScaler("cpu", growth_factor=1.0)
    (weight, sgd), theirs, ours = one_weight(), torch.amp.GradScaler("cpu", 128.0, growth_interval=10**9), None
    torchs_step(theirs, weight, sgd, math.inf)
    assert theirs.get_scale() == 64
    ours = loss_scaler(128)
    our_step(ours, weight, sgd, math.inf)
    assert ours.value == 128 and weight.item() == 1.0


@pytest.mark.parametrize(("scale", "share"), [(1, 1.0), (2**10, 0.0)])
def test_a_gradient_of_three_in_a_billion_needs_a_scale(scale, share):
    layer, scaler = nn.Linear(8, 8, bias=False), loss_scaler(scale)
    with Precision.load("fp16").arithmetic("cpu"):
        loss = (layer(torch.ones(4, 8)).float() * 3e-9).sum()
    scaler.scale(loss).backward()
    assert (layer.weight.grad == 0).float().mean().item() == share


def test_untouched_rows_of_an_embedding_are_no_underflow():
    table = nn.Embedding(100, 4)
    table(torch.tensor([3, 5])).sum().backward()
    gradient = table.weight.grad
    assert (gradient == 0).float().mean().item() == pytest.approx(0.98)
    assert describe(gradient).zero == 392 and describe(gradient).below == 0
    counted = dict(zip(KINDS, count(gradient, gradient.half()).tolist(), strict=True))
    assert counted["zero"] == 392 and counted["flushed"] == 0


def test_the_seven_numbers():
    values = torch.tensor([1e-9, -1e-9, 0.0, 3e-5, 1.0, math.inf, NAN])
    assert values.half()[1].item() == 0.0 and values.half()[1].signbit()
    counted = dict(zip(KINDS, count(values, values.half()).tolist(), strict=True))
    assert counted == {"values": 7, "zero": 1, "flushed": 2, "subnormal": 1, "overflowed": 0, "nonfinite": 2}
    seen = describe(values)
    assert (seen.zero, seen.below, seen.subnormal, seen.inf, seen.nan) == (1, 2, 3, 1, 1)


@pytest.mark.parametrize(("precision", "end"), [("fp32", 0.0), ("bf16", 0.0), ("bf16_pure", 1.0)])
def test_a_thousand_small_updates(precision, end):
    """1.0 less 1000 times 0.001; BF16 has no number between 0.996 and 1."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, 1.0)
    weights = Precision.load(precision).prepare(layer)
    sgd = torch.optim.SGD(weights.of("model"), lr=1e-3)
    for _ in range(1000):
        for p in layer.parameters():
            p.grad = torch.ones_like(p)
        weights.gather("model")
        sgd.step()
        weights.publish("model")
    assert layer.weight.item() == pytest.approx(end, abs=1e-4)


def test_adam_on_half_parameters_and_a_gradient_of_zero():
    def step(**options):
        weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
        weight.grad = torch.zeros_like(weight)
        torch.optim.Adam([weight], lr=0.1, **options).step()
        return weight

    assert step(foreach=False).isnan().all() and step(fused=True).isfinite().all()
    with pytest.raises(UserError, match="eps=1e-08 is zero in float16"):
        optimizer("adam", [nn.Parameter(torch.ones(2, dtype=torch.float16))], lr=0.1)


def test_a_last_batch_of_one_sample_weighs_one_sample():
    logits, labels = torch.eye(2)[[0] * 17], torch.tensor([0] * 16 + [1])
    parts = list(zip(logits.split(8), labels.split(8), strict=True))
    right = [(x.argmax(1) == y).float().mean().item() for x, y in parts]
    assert sum(right) / 3 == pytest.approx(0.667, abs=1e-3)
    task = Classify(nn.Identity(), label_smoothing=0.0, aux_weight=0.0, margin=0.01)
    for size in (1, 8, 17):
        found = task.evaluate(zip(logits.split(size), labels.split(size), strict=True))
        assert found["top1"] == 16 / 17 == pytest.approx(0.941, abs=1e-3)


class Guesses(nn.Module):
    """Gives the word 2 a negative log-likelihood of 1 after the word 0, of 4 after the word 1."""

    def forward(self, words, state=None):
        wanted = torch.tensor([1.0, 4.0])[words]
        logits = torch.zeros(*words.shape, 3)
        logits[..., 2] = -((wanted.exp() - 1) / 2).log()  # two other words with a logit of 0
        return logits, state


def test_perplexity_weighs_tokens():
    task = object.__new__(Language)
    task.model, task.train_set, task.rare = Guesses(), SimpleNamespace(window=100), torch.tensor([0])
    given = [torch.full((1, n), word) for n, word in ((100, 0), (100, 0), (10, 1))]
    found = task.evaluate({"words": w, "targets": torch.full_like(w, 2), "tokens": w.numel()} for w in given)
    assert found["perplexity"] == pytest.approx(3.14, abs=5e-3)
    assert math.exp((1 + 1 + 4) / 3) == pytest.approx(7.39, abs=5e-3)


def test_areas_of_boxes_are_not_computed_in_half():
    box = torch.tensor([[0.0, 0.0, 300.0, 300.0]]).half()
    assert ((box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1])).isinf()
    assert torchvision.ops.box_area(box).item() == 90000


def test_near_ties_change_places_when_logits_are_rounded():
    logits = 8 + 0.02 * torch.randn(20_000, 10, generator=torch.Generator().manual_seed(0))
    best = logits.argmax(1)
    for dtype, share in ((torch.bfloat16, 0.53), (torch.float16, 0.14)):
        assert (logits.to(dtype).argmax(1) != best).float().mean().item() == pytest.approx(share, abs=0.01)
    task = Classify(nn.Identity(), label_smoothing=0.0, aux_weight=0.0, margin=0.01)
    assert task.evaluate([(logits, best)])["top1"] > 0.9999  # two in a hundred thousand are ties in FP32 too


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp16_master"])
@pytest.mark.parametrize("inside", [True, False])
def test_no_step_runs_on_the_weights_of_the_one_before(precision, inside):
    """Not even where the update is made within the region, as torch's own autocast does by its cache."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, 4.0)
    numbers = Precision.load(precision)
    weights, arithmetic, losses = numbers.prepare(layer), numbers.arithmetic("cpu"), []
    sgd = torch.optim.SGD(weights.of("model"), lr=0.2)

    def update(loss):
        weights.zero_grad()
        loss.backward()
        weights.gather("model")
        sgd.step()
        weights.publish("model")
        losses.append(loss.item())

    if inside:
        with arithmetic:
            for _ in range(3):
                update(layer(torch.ones(1, 1)).float().square().sum())
    else:
        for _ in range(3):
            with arithmetic:
                loss = layer(torch.ones(1, 1)).float().square().sum()
            update(loss)
    assert losses[0] == 16 and losses[0] > losses[1] > losses[2]


@pytest.mark.usefixtures("tiny")
def test_updates_are_made_outside_of_autocast(tmp_path, monkeypatch):
    seen = []
    real = torch.optim.SGD.step
    monkeypatch.setattr(
        torch.optim.SGD, "step", lambda *a, **k: (seen.append(torch.is_autocast_enabled("cpu")), real(*a, **k))[1]
    )
    train(settings("tiny", "bf16", out=str(tmp_path / "run"), steps=3, ema=0.9))
    assert seen == [False] * 3


def test_no_family_takes_the_logarithm_of_a_rounded_probability():
    """BCELoss passes on a CPU and is refused by CUDA's autocast; sigmoid(18) is 1 in half precision."""
    for path in Path(tasks.__file__).parent.parent.rglob("*.py"):
        names = {n.attr if isinstance(n, ast.Attribute) else n.id for n in ast.walk(ast.parse(path.read_text()))
                 if isinstance(n, ast.Attribute | ast.Name)}  # fmt: skip
        assert not names & {"BCELoss", "binary_cross_entropy"}, path
    assert torch.tensor(18.0).half().sigmoid().item() == 1.0


def test_an_optimizer_that_steps_by_itself_is_refused():
    weight = nn.Parameter(torch.ones(1))
    lbfgs, scaler = torch.optim.LBFGS([weight]), loss_scaler("dynamic")
    scaler.scale(weight.sum()).backward()
    with pytest.raises(UserError, match="LBFGS runs its closure several times"):
        scaler.step(lbfgs)


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16", "fp16_master"])
@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_normalised_weights(norm, precision):
    gradients = []
    for name in ("fp32", precision):
        torch.manual_seed(0)
        model = nn.Sequential(getattr(nn.utils.parametrizations, norm)(nn.Linear(5, 7)), nn.ReLU(), nn.Linear(7, 1))
        numbers, scaler = Precision.load(name), loss_scaler(128)
        weights = numbers.prepare(model)
        with numbers.arithmetic("cpu"):
            loss = model(torch.randn(4, 5)).float().square().mean()
        scaler.scale(loss).backward()
        weights.gather("model")
        assert scaler.unscale_(torch.optim.SGD(weights.of("model"), lr=0.1))
        gradients.append(torch.cat([p.grad.flatten() for p in weights.of("model")]))
    assert (gradients[1] - gradients[0]).norm() < 0.02 * gradients[0].norm()


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_a_gradient_penalty_is_that_of_unscaled_gradients(precision):
    found = []
    for name, scale in (("fp32", 1.0), (precision, 128.0)):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)), torch.randn(4, 5, requires_grad=True)
        with Precision.load(name).arithmetic("cpu"):
            y = model(x).float().sum()
        (gradient,) = torch.autograd.grad(y * scale, x, create_graph=True)
        penalty = ((gradient.float() / scale).norm(2, 1) - 1).square().mean()
        (penalty * scale).backward()
        found.append(model[0].weight.grad / scale)
    assert (found[1] - found[0]).norm() < 0.02 * found[0].norm()


def test_text_numbered_by_four_at_once_is_numbered_once(tmp_path):
    (tmp_path / "train.txt").write_text("the cat sat\nthe dog sat\n" * 500)
    (tmp_path / "heldout.txt").write_text("the cat\n")
    together, read = threading.Barrier(4), []

    def one():
        together.wait()
        read.append([part.tolist() for part in lm1b.read(tmp_path, 10)])

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read) == 4 and all(each == read[0] for each in read) and len(read[0][0]) == 4000
    assert len(list(tmp_path.glob(".mptrain-*"))) == 1


@pytest.mark.usefixtures("tiny")
def test_ctrl_c_ends_a_sweep_and_the_rest_is_left(tmp_path, monkeypatch, capsys):
    ran = []

    def stops_at_the_second(config):
        ran.append(config.seed)
        if config.seed == 1:
            raise Stopped("stopped by signal 2 after step 7; the same command goes on from there")

    monkeypatch.setattr(mptrain.train, "train", stops_at_the_second)
    assert cli.main(["-m", "+recipe=tiny", "seed=0,1,2"]) == 130
    assert ran == [0, 1] and capsys.readouterr().err.endswith("the same command goes on from there\n")
