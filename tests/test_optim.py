import inspect
import math

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mptrain import options
from mptrain.errors import UserError
from mptrain.optim import OPTIMIZERS, Average, optimizer, schedule


def parameters(dtype=torch.float32):
    return [nn.Parameter(torch.ones(2, dtype=dtype))]


def test_options_are_those_of_torch():
    left_to_torch = {"params", "lr", "foreach", "fused", "capturable", "differentiable"}
    assert OPTIMIZERS.keys() == options.OPTIMIZERS.keys()
    for name, kind in OPTIMIZERS.items():
        found = {k: p.default for k, p in inspect.signature(kind).parameters.items() if k not in left_to_torch}
        expected = {k: tuple(v) if isinstance(v, list) else v for k, v in options.OPTIMIZERS[name].items()}
        assert found == expected, name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_torchs_own(name):
    ours, theirs = parameters(), parameters()
    built = optimizer(name, ours, 0.1, weight_decay=0.01)
    reference = OPTIMIZERS[name](theirs, lr=0.1, weight_decay=0.01)
    for _ in range(3):
        for p in (*ours, *theirs):
            p.grad = p.detach() * 0.5 + 1
        built.step()
        reference.step()
    assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}),
        ("adam", {"weight_decay": 0.1, "amsgrad": True}),
        ("adamw", {}),
        ("adagrad", {}),
        ("rmsprop", {"momentum": 0.9, "centered": True}),
    ],
)
def test_updates_are_those_of_torchs_plain_loop(name, settings):
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in ((7, 5), (7,), (3, 7, 2, 2))]
    ours, theirs = ([nn.Parameter(t.clone()) for t in start] for _ in range(2))
    built = optimizer(name, ours, 0.01, **settings)
    reference = OPTIMIZERS[name](theirs, lr=0.01, foreach=False, **settings)
    for _ in range(30):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator) * 10 ** (3 * torch.randn((), generator=generator))
            q.grad = p.grad.clone()
        built.step()
        reference.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


def test_a_step_without_label_calls_hooks_and_is_seen_by_a_profiler():
    def labels() -> list[str]:
        with torch.autograd.profiler.profile() as seen:
            built.step()
        return [event.key for event in seen.key_averages() if event.key.startswith("Optimizer.step")]

    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    built, called = optimizer("sgd", [p], 0.1), []
    built.step()
    assert p.tolist() == pytest.approx([0.9, 0.9]) and not p.grad_fn
    assert labels() == ["Optimizer.step#SGD.step"]
    handles = [
        built.register_step_pre_hook(lambda *args: called.append("before")),
        built.register_step_post_hook(lambda *args: called.append("after")),
        register_optimizer_step_pre_hook(lambda *args: called.append("before any")),
    ]
    built.step()
    for handle in handles:
        handle.remove()
    built.step()
    assert called == ["before any", "before", "after"]
    assert p.tolist() == pytest.approx([0.6, 0.6])
    assert built.step(lambda: torch.tensor(3.0)) == 3.0


def test_mistakes_are_said():
    with pytest.raises(UserError, match="optimizer.momentm is not an option of sgd; did you mean momentum"):
        optimizer("sgd", parameters(), 0.1, momentm=0.9)
    with pytest.raises(UserError, match="optimizer sgd: Nesterov momentum requires"):
        optimizer("sgd", parameters(), 0.1, nesterov=True)
    with pytest.raises(UserError, match="schedule.foo is not an option of cosine; there are final"):
        schedule("cosine", 10, foo=1)


def test_an_eps_that_rounds_to_zero_is_refused():
    with pytest.raises(UserError, match="optimizer.eps=1e-08 is zero in float16"):
        optimizer("adam", parameters(torch.float16), 0.1)
    optimizer("adam", parameters(torch.float16), 0.1, eps=1e-4)
    optimizer("adam", parameters(torch.bfloat16), 0.1)


def test_constant_with_warmup():
    rate = schedule("constant", 10, warmup=4)
    assert [rate(k) for k in range(7)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1])


@pytest.mark.parametrize("warmup", [0, 5])
def test_cosine_is_torchs(warmup):
    model = parameters()
    sgd = torch.optim.SGD(model, lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=20 - warmup, eta_min=0.1)
    rate = schedule("cosine", 20, warmup, final=0.1)
    for k in range(warmup, 20):
        assert rate(k) == pytest.approx(sgd.param_groups[0]["lr"])
        sgd.step()
        theirs.step()
    assert rate(20) == rate(500) == pytest.approx(0.1)


def test_linear():
    rate = schedule("linear", 10, 2, final=0.2)
    assert [rate(k) for k in (0, 1, 2, 6, 10, 11)] == pytest.approx([1 / 3, 2 / 3, 1, 0.6, 0.2, 0.2])


def test_onecycle_is_torchs():
    steps, warmup = 40, 10
    sgd = torch.optim.SGD(parameters(), lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        sgd, max_lr=1.0, total_steps=steps + 1, pct_start=(warmup + 1) / (steps + 1), final_div_factor=1e12
    )
    rate = schedule("onecycle", steps, warmup)
    for k in range(steps):
        assert rate(k) == pytest.approx(sgd.param_groups[0]["lr"], abs=1e-9)
        sgd.step()
        theirs.step()


def test_step_and_exponential():
    rate = schedule("step", 100, milestones=[10, 20], gamma=0.5)
    assert [rate(k) for k in (0, 9, 10, 19, 20, 99)] == [1, 1, 0.5, 0.5, 0.25, 0.25]
    rate = schedule("exponential", 100, gamma=0.5, every=3)
    assert [rate(k) for k in (0, 2, 3, 6)] == [1, 1, 0.5, 0.25]


@pytest.mark.parametrize("name", options.SCHEDULES)
def test_every_schedule_stays_between_zero_and_one(name):
    for steps, warmup in ((1, 0), (1, 5), (7, 7), (50, 3)):
        rate = schedule(name, steps, warmup)
        assert all(0 <= rate(k) <= 1 and math.isfinite(rate(k)) for k in range(steps + 2))


def test_an_average_by_hand():
    network = nn.Linear(1, 1, bias=False)
    start = 0.5
    nn.init.constant_(network.weight, start)
    average = Average({"model": list(network.parameters())}, decay=0.75)
    with torch.no_grad():
        network.weight.fill_(start + 4)
    average.update("model")
    with average.evaluating({"model": network}):
        assert network.weight.item() == pytest.approx(start + 1)
    assert network.weight.item() == start + 4
    other = Average({"model": list(network.parameters())}, decay=0.75)
    other.load_state_dict(average.state_dict())
    assert torch.equal(other.shadow["model"][0], average.shadow["model"][0])


def test_an_average_of_16_bits_is_kept_in_fp32():
    """In BF16 a moving average with decay 0.999 of 2.0 that starts at 1.0 never leaves 1.0."""
    network = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        network.weight.fill_(1.0)
    average = Average({"model": list(network.parameters())}, decay=0.999)
    with torch.no_grad():
        network.weight.fill_(2.0)
    for _ in range(5000):
        average.update("model")
    assert average.shadow["model"][0].item() == pytest.approx(2 - 0.999**5000, abs=1e-3)
