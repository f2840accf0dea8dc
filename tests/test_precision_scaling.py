"""Loss scalers: golden traces, torch's own GradScaler beside ours, and what an update does."""

import random

import pytest
import torch
from torch import nn

from mptrain.errors import UserError
from mptrain.precision.modes import Precision
from mptrain.precision.scaling import DynamicScaler, DynamicSettings, LossScaler, StaticScaler, check_scale, loss_scaler

OVERFLOWS = [1, 0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0]
GOLDEN = {
    "torch, apex, hysteresis 1": ({}, [8, 8, 4, 4, 2, 1, 1, 1, 1, 2, 2, 2, 2, 4, 2, 2, 2]),
    "DeepSpeed, Megatron, hysteresis 2": (
        {"hysteresis": 2}, [16, 16, 8, 8, 4, 2, 2, 2, 2, 4, 4, 4, 4, 8, 8, 8, 8],
    ),
    "DeepSpeed, consecutive": (
        {"hysteresis": 2, "consecutive": True}, [16, 16, 16, 16, 16, 8, 8, 8, 8, 16, 16, 16, 16, 32, 32, 32, 32],
    ),
    "fairseq, tolerance 0.6": ({"tolerance": 0.6}, [8, 8, 8, 8, 8, 4, 4, 4, 4, 8, 8, 8, 8, 16, 8, 8, 8]),
}  # fmt: skip


class Problem:
    """One weight, whose next gradient is what the caller says."""

    def __init__(self, **options):
        self.weight = nn.Parameter(torch.zeros(3))
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0, **options)

    def backward(self, scaler, gradient):
        self.weight.grad = None
        factor = torch.as_tensor(gradient, dtype=torch.float32).expand(3)
        scaler.scale((self.weight * factor).sum()).backward()


def iterate(scaler, problem, gradient):
    problem.backward(scaler, gradient)
    applied = scaler.step(problem.optimizer)
    return applied, scaler.update()


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_traces(name):
    changes, expected = GOLDEN[name]
    scaler, problem = DynamicScaler(DynamicSettings(init=16, interval=4, **changes)), Problem()
    trace = []
    for overflow in OVERFLOWS:
        applied, skipped = iterate(scaler, problem, float("inf") if overflow else 1.0)
        assert applied is not bool(overflow) and skipped is bool(overflow)
        trace.append(scaler.value)
    assert trace == expected


@pytest.mark.parametrize("seed", range(20))
def test_beside_torchs_grad_scaler(seed):
    rng = random.Random(seed)
    interval, rate = rng.choice([1, 2, 3, 7]), rng.choice([0.05, 0.2, 0.5])
    init = 2.0 ** rng.randint(0, 20)
    theirs = torch.amp.GradScaler("cpu", init_scale=init, growth_interval=interval)
    ours = DynamicScaler(DynamicSettings(init=init, interval=interval, floor=2.0**-100))
    a, b = Problem(), Problem()
    for _ in range(120):
        bad = rng.choice([float("inf"), float("-inf"), float("nan")])
        gradient = bad if rng.random() < rate else rng.choice([1.0, -3.0])
        b.backward(theirs, gradient)
        theirs.step(b.optimizer)
        theirs.update()
        iterate(ours, a, gradient)
        assert ours.value == theirs.get_scale() and ours.good == theirs._get_growth_tracker()
        assert torch.equal(a.weight, b.weight)


def test_defaults_are_torchs():
    settings, theirs = DynamicSettings(), torch.amp.GradScaler("cpu")
    assert settings.init == theirs.get_scale() == 65536
    assert settings.growth == theirs.get_growth_factor() and settings.backoff == theirs.get_backoff_factor()
    assert settings.interval == theirs.get_growth_interval() == 2000


def test_first_growth_after_exactly_the_interval():
    scaler, problem = DynamicScaler(DynamicSettings(init=4, interval=5)), Problem()
    trace = [iterate(scaler, problem, 1.0) and scaler.value for _ in range(11)]
    assert trace == [4, 4, 4, 4, 8, 8, 8, 8, 8, 16, 16]


def test_growth_stops_before_infinity():
    scaler, problem = DynamicScaler(DynamicSettings(interval=1)), Problem()
    for _ in range(300):
        iterate(scaler, problem, 0.0)
    assert scaler.value == 2.0**127


def test_floor_and_ceiling():
    scaler, problem = DynamicScaler(DynamicSettings(init=16, floor=4, ceiling=32, interval=2)), Problem()
    for _ in range(200):
        iterate(scaler, problem, float("nan"))
    assert scaler.value == 4 and scaler.consecutive_skips == 200
    assert problem.weight.isfinite().all()
    for _ in range(20):
        iterate(scaler, problem, 1.0)
    assert scaler.value == 32 and scaler.consecutive_skips == 0
    assert problem.weight.tolist() == [-20.0] * 3


def test_floor_above_the_scale_never_raises_it():
    scaler, problem = DynamicScaler(DynamicSettings(init=2, floor=8)), Problem()
    iterate(scaler, problem, float("inf"))
    assert scaler.value == 2


def test_without_a_floor_it_stops_where_fp32_has_an_inverse():
    scaler, problem = DynamicScaler(DynamicSettings(floor=0.0)), Problem()
    for _ in range(200):
        iterate(scaler, problem, float("nan"))
    assert scaler.value == 2.0**-126
    assert iterate(scaler, problem, 2.0**100) == (True, False)
    assert problem.weight.tolist() == [-(2.0**100)] * 3


def test_floor_of_a_back_off_that_would_pass_it():
    scaler, problem = DynamicScaler(DynamicSettings(init=16, floor=3, backoff=0.25)), Problem()
    trace = [iterate(scaler, problem, float("inf")) and scaler.value for _ in range(3)]
    assert trace == [4, 3, 3]


def test_static_is_static_and_skips():
    scaler, problem = loss_scaler(128), Problem()
    for gradient in [1.0, float("inf"), float("nan")] * 30 + [1.0] * 3000:
        applied, skipped = iterate(scaler, problem, gradient)
        finite = gradient == 1.0
        assert applied is finite and skipped is not finite and scaler.value == 128
    assert problem.weight.tolist() == [-3030.0] * 3


def test_none_checks_too():
    scaler, problem = loss_scaler("none"), Problem()
    assert iterate(scaler, problem, float("nan")) == (False, True)
    assert iterate(scaler, problem, 1.0) == (True, False)
    assert scaler.value == 1.0 and problem.weight.tolist() == [-1.0] * 3


@pytest.mark.parametrize("make", [lambda: loss_scaler("none"), lambda: loss_scaler(8), lambda: loss_scaler("dynamic")])
def test_fused_and_foreach_optimizers_are_skipped_alike(make):
    weights = []
    for options in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        weight = nn.Parameter(torch.ones(3))
        optimizer, scaler = torch.optim.AdamW([weight], lr=0.1, **options), make()
        for gradient in (1.0, float("inf"), 2.0):
            optimizer.zero_grad()
            scaler.scale((weight * gradient).sum()).backward()
            scaler.step(optimizer)
            assert scaler.update() is (gradient == float("inf"))
        weights.append(weight.detach())
    torch.testing.assert_close(weights[0], weights[1])
    torch.testing.assert_close(weights[1], weights[2])


def test_several_optimizers():
    scaler = DynamicScaler(DynamicSettings(init=16))
    healthy, overflowing, idle = Problem(), Problem(), Problem()
    healthy.backward(scaler, 1.0)
    overflowing.backward(scaler, float("inf"))
    assert scaler.step(healthy.optimizer) is True
    assert scaler.step(overflowing.optimizer) is False
    assert scaler.step(idle.optimizer) is None
    assert scaler.value == 16
    assert scaler.update() is True
    assert scaler.value == 8 and scaler.consecutive_skips == 1
    assert healthy.weight.tolist() == [-1.0] * 3
    assert overflowing.weight.tolist() == idle.weight.tolist() == [0.0] * 3
    idle.backward(scaler, 1.0)
    assert scaler.step(idle.optimizer) is True and scaler.update() is False and scaler.consecutive_skips == 0


def test_an_iteration_without_any_gradient_changes_nothing_but_the_count():
    scaler, idle = DynamicScaler(DynamicSettings(init=16, interval=2)), Problem()
    assert scaler.step(idle.optimizer) is None and scaler.update() is False


def test_accumulation_equals_the_whole_batch():
    x, y = torch.randn(10, 3), torch.randn(10)
    weights = []
    for pieces in ([10], [2] * 5, [4, 4, 2]):
        torch.manual_seed(0)
        model, scaler = nn.Linear(3, 1), loss_scaler("dynamic")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for part, target in zip(x.split(pieces), y.split(pieces), strict=True):
            loss = nn.functional.mse_loss(model(part)[:, 0], target)
            scaler.scale(loss * (len(part) / 10)).backward()
        scaler.step(optimizer)
        scaler.update()
        weights.append(model.weight.detach())
    torch.testing.assert_close(weights[0], weights[1])
    torch.testing.assert_close(weights[0], weights[2])


def test_sparse_gradients():
    for bad in (False, True):
        table = nn.Embedding(10, 3, sparse=True)
        before = table.weight.detach().clone()
        optimizer, scaler = torch.optim.SGD(table.parameters(), lr=1.0), StaticScaler(2.0**10)
        rows = table(torch.tensor([2, 5, 2]))
        scaler.scale((rows * (float("inf") if bad else 1.0)).sum()).backward()
        assert scaler.step(optimizer) is not bad
        moved = torch.zeros(10, 3)
        if not bad:
            moved[2], moved[5] = 2, 1
        torch.testing.assert_close(table.weight.detach(), before - moved)


def test_sparse_duplicates_that_overflow_only_in_their_sum():
    table = nn.Embedding(4, 1, sparse=True)
    optimizer, scaler = torch.optim.SGD(table.parameters(), lr=1.0), LossScaler()
    scaler.scale((table(torch.tensor([1, 1])) * 3e38).sum()).backward()
    assert scaler.step(optimizer) is False


def test_unscaling_twice_is_an_error():
    scaler, problem = loss_scaler(8), Problem()
    problem.backward(scaler, 1.0)
    assert scaler.unscale_(problem.optimizer) is True
    assert problem.weight.grad.tolist() == [1.0] * 3
    with pytest.raises(RuntimeError, match="already called"):
        scaler.unscale_(problem.optimizer)
    assert scaler.step(problem.optimizer) is True
    scaler.update()
    problem.backward(scaler, 1.0)
    assert scaler.unscale_(problem.optimizer) is True


@pytest.mark.parametrize("scale", [8, "dynamic", "none"])
def test_a_loop_without_update_is_stopped(scale):
    """Its second step would be made with gradients that are still scaled."""
    scaler, problem = loss_scaler(scale), Problem()
    problem.backward(scaler, 1.0)
    assert scaler.step(problem.optimizer) is True
    problem.backward(scaler, 1.0)
    with pytest.raises(RuntimeError, match="since the last update.*; call update.* once per iteration"):
        scaler.step(problem.optimizer)
    scaler.update()
    assert scaler.step(problem.optimizer) is True


def test_half_gradients_are_refused_where_they_cannot_be_unscaled():
    weight = nn.Parameter(torch.ones(3).half())
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = loss_scaler(8)
    scaler.scale(weight.sum()).backward()
    with pytest.raises(UserError, match="fp16_master"):
        scaler.unscale_(optimizer)
    weight.grad = torch.full((3,), float("inf")).half()
    assert loss_scaler("none").step(optimizer) is False


def test_bfloat16_gradients_are_checked_and_unscaled():
    weight = nn.Parameter(torch.ones(3).bfloat16())
    optimizer, scaler = torch.optim.SGD([weight], lr=0.5), loss_scaler("none")
    scaler.scale(weight.sum()).backward()
    assert scaler.step(optimizer) is True and weight.tolist() == [0.5] * 3
    weight.grad = torch.full((3,), float("nan")).bfloat16()
    scaler.update()
    assert scaler.step(optimizer) is False


def test_the_scaled_loss_is_float32():
    loss = nn.Parameter(torch.ones(()).half()) * 2
    assert loss_scaler("dynamic").scale(loss).dtype == torch.float32
    assert loss_scaler("dynamic").scale(loss).item() == 131072


@pytest.mark.parametrize("name, scale", [("fp16", "dynamic"), ("fp16", 1024), ("bf16", "none"), ("fp16_master", 1024)])
def test_clipping_after_unscaling_means_the_same_in_every_precision(name, scale):
    def step(name, scale):
        torch.manual_seed(0)
        precision, model = Precision.load(name), nn.Linear(8, 4)
        before = model.weight.detach().clone()
        weights, scaler = precision.prepare(model), loss_scaler(scale, DynamicSettings(init=1024))
        optimizer = torch.optim.SGD(weights.of("model"), lr=1.0)
        with precision.arithmetic():
            loss = (model(torch.randn(16, 8)).float() ** 2).mean() * 30
        scaler.scale(loss).backward()
        weights.gather("model")
        assert scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(weights.of("model"), 1.0)
        assert norm > 1.5
        scaler.step(optimizer)
        weights.publish("model")
        return (weights.of("model")[0].detach().float() - before).norm().item()

    assert step(name, scale) == pytest.approx(step("fp32", "none"), rel=0.01)


def test_a_power_of_two_in_fp32_changes_no_bit():
    results = []
    for scale in ("none", 1, 2**-20, 128, 2**40, "dynamic"):
        torch.manual_seed(0)
        model, scaler = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), loss_scaler(scale)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for step in range(10):
            optimizer.zero_grad()
            x = torch.sin(torch.arange(32.0).view(4, 8) + step)
            scaler.scale((model(x) ** 2).mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        results.append([p.detach() for p in model.parameters()])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_every_field_of_the_state_comes_back():
    settings = DynamicSettings(
        init=64, growth=4, backoff=0.25, interval=5, floor=2, ceiling=4096, hysteresis=3, consecutive=True,
        tolerance=0.1,
    )  # fmt: skip
    default = DynamicSettings()
    assert all(getattr(settings, name) != getattr(default, name) for name in vars(default))
    scaler, problem = DynamicScaler(settings), Problem()
    for gradient in [1.0] * 7 + [float("inf")] * 2:
        iterate(scaler, problem, gradient)
    fresh = DynamicScaler()
    fresh.load_state_dict(scaler.state_dict())
    for name, value in vars(scaler).items():
        if name != "_scratch":  # constants on the device, made from `value` when needed
            assert getattr(fresh, name) == value, name
    assert fresh.consecutive_skips == 2 and fresh.chances == 1 and fresh.good == 0
    rng = random.Random(0)
    for _ in range(100):
        gradient = float("inf") if rng.random() < 0.3 else 1.0
        assert iterate(scaler, problem, gradient) == iterate(fresh, problem, gradient)
        assert scaler.state_dict() == fresh.state_dict()


@pytest.mark.parametrize("scale", ["none", 128, "dynamic"])
def test_the_state_of_another_scaler_is_refused(scale):
    state = loss_scaler(scale).state_dict()
    for other in {"none", 128, 256, "dynamic"} - {scale}:
        with pytest.raises(UserError, match="does not fit"):
            loss_scaler(other).load_state_dict(state)
    with pytest.raises(UserError, match="does not fit"):
        loss_scaler(scale).load_state_dict({})


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "abc", True, None, 2.0**127, 2.0**-127, [8]])
def test_scales_that_are_none(value):
    with pytest.raises(UserError, match="scale="):
        loss_scaler(value)


def test_scales_that_are():
    assert check_scale("128") == 128 and loss_scaler("128").label == "128" and loss_scaler(8.5).value == 8.5
    assert loss_scaler("dynamic").label == "dynamic" and type(loss_scaler("none")) is LossScaler


def test_gradients_of_several_formats_are_all_looked_at():
    full, half = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([full, half], lr=1.0)
    for bad in (full, half, None):
        scaler = loss_scaler(4)
        for p in (full, half):
            p.grad = torch.full_like(p, float("inf") if p is bad else 8.0)
        assert scaler.unscale_(optimizer) is (bad is None)
    assert full.grad.tolist() == [2.0] * 3 and half.grad.tolist() == [2.0] * 3


def test_complex_gradients():
    p = torch.nn.Parameter(torch.tensor([1 + 2j, 3 - 4j]))
    optimizer, scaler = torch.optim.SGD([p], lr=1.0), loss_scaler(4)
    p.grad = torch.tensor([8 + 4j, 2j])
    assert scaler.step(optimizer) is True and p.tolist() == [-1 + 1j, 3 - 4.5j]
    scaler.update()
    p.grad = torch.tensor([complex(1, float("inf")), 1])
    assert scaler.step(optimizer) is False and p.tolist() == [-1 + 1j, 3 - 4.5j]


@pytest.mark.parametrize(
    "settings",
    [
        {"growth": 1.0},
        {"backoff": 2.0},
        {"interval": 0},
        {"hysteresis": 0},
        {"tolerance": 1.5},
        {"floor": 4, "ceiling": 2},
    ],
)
def test_settings_under_which_nothing_would_move_as_it_should(settings):
    with pytest.raises(UserError, match=f"give {next(iter(settings))} "):
        DynamicSettings(**settings)
