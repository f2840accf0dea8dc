"""A NaN that is planted anywhere is found where it was planted, in networks of every build."""

import json

import pytest
import torch
import torch.nn.functional as F
from tiny.runs import settings
from torch import nn

from mptrain import rerun
from mptrain.results.record import Record
from mptrain.train import Run
from mptrain.watch.provenance import first_nonfinite


class Planted(torch.autograd.Function):
    """The identity, with a NaN put into its result or into its gradient."""

    @staticmethod
    def forward(ctx, x, where):
        ctx.where = where
        y = x.clone()
        if where == "forward":
            y.view(-1)[0] = torch.nan
        return y

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        if ctx.where == "backward":
            g.view(-1)[0] = torch.nan
        return g, None


class Fault(nn.Module):
    where = None

    def forward(self, x):
        return Planted.apply(x, self.where)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.core, self.fault, self.end = nn.Embedding(9, 6), nn.LSTM(6, 5), Fault(), nn.Linear(5, 3)

    def forward(self, x):
        return self.end(self.fault(self.core(self.words(x))[0]).mean(0))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.twice, self.fault, self.last = nn.Linear(4, 4), nn.Linear(4, 4), Fault(), nn.Linear(4, 3)

    def forward(self, x):
        x = self.twice(F.relu(self.first(x)))
        return self.last(F.relu(self.twice(self.fault(x)), inplace=True))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.branch, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.fault, self.last = Fault(), nn.Linear(4, 3)

    def forward(self, x):
        y = self.stem(x)
        y += self.fault(self.norm(self.branch(F.relu(y))))
        return self.last(F.relu_(y))


NETWORKS = {
    "lstm": (Recurrent, lambda: torch.randint(9, (7, 5)), "core", "weight_hh_l0"),
    "shared": (Shared, lambda: torch.randn(5, 4), "twice", "weight"),
    "residual": (Residual, lambda: torch.randn(5, 4), "branch", "weight"),
}


def blamed(model, x):
    y = torch.randint(3, (5,))

    def run():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return [loss]

    return first_nonfinite({"model": model}, run)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("where", ["forward", "backward", "weight", "data"])
def test_a_planted_nan(name, where):
    torch.manual_seed(0)
    make, batch, layer, parameter = NETWORKS[name]
    model, x = make(), batch()
    if where == "weight":
        with torch.no_grad():
            getattr(model.get_submodule(layer), parameter)[1, 1] = torch.nan
    elif where == "data" and x.is_floating_point():
        x[2, 1] = torch.nan
    elif where == "data":
        where = None  # whole numbers are always finite
    else:
        model.fault.where = where
    found = blamed(model, x)
    if where is None:
        assert found is None
        return
    first = next(name for name, module in model.named_modules() if name)
    expected = {"forward": "fault", "backward": "fault", "weight": layer, "data": first}
    assert (found.where, found.module) == (where, expected[where])
    assert found.inputs
    if where == "backward":
        assert found.op.startswith("PlantedBackward") and found.inputs[0]["nan"] == 0
        assert found.frames[-1].endswith("return Planted.apply(x, self.where)")
    if where == "data":
        assert found.inputs[0]["nan"] == 1 and found.inputs[0]["min"] == x[x.isfinite()].min().item()


def test_an_addition_in_place_is_named_with_its_line():
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = self.a(x)
            y += self.b(x)
            return y

    model = nn.Sequential(Adds(), nn.Linear(4, 3))
    with torch.no_grad():
        for layer in (model[0].a, model[0].b):
            layer.weight.zero_()
            layer.bias.fill_(3e38)  # finite alone, infinite together
    found = blamed(model, torch.ones(5, 4))
    assert (found.where, found.module, found.type, found.op) == ("forward", "0", "Adds", "add_")
    assert found.frames[-1].endswith("y += self.b(x)")
    assert [side["max"] for side in found.inputs] == pytest.approx([3e38, 3e38]) and found.inputs[0]["inf"] == 0


def test_a_function_between_modules_belongs_to_the_one_that_calls_it():
    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.b(torch.log(self.a(x).mul(0)))

    found = blamed(nn.Sequential(Between()), torch.ones(5, 4))
    assert (found.where, found.module, found.op) == ("forward", "0", "log")
    assert found.inputs[0]["min"] == found.inputs[0]["max"] == 0 and "does not help" in found.advice


@pytest.mark.parametrize("side", ["forward", "backward"])
def test_a_loss_of_ones_own(side):
    def my_loss(y):
        root = (y * 0).square().sum(1).sqrt()  # its derivative at zero is 0/0
        return (1 / root).mean() if side == "forward" else root.mean()

    def run():
        loss = my_loss(model(torch.ones(5, 4)))
        loss.backward()
        return [loss]

    model = nn.Linear(4, 3)
    found = first_nonfinite({"model": model}, run)
    assert (found.where, found.module) == (side, "(loss)")
    assert found.op == "reciprocal" if side == "forward" else found.op.startswith("SqrtBackward0")
    assert any("my_loss" in frame or "root" in frame for frame in found.frames)


@pytest.mark.usefixtures("tiny")
def test_the_batch_runs_again_as_it_ran(tmp_path, capsys):
    """With the dropout that fell, the scale that was, and no trace in gradients, buffers or random numbers."""
    config = settings("tiny", "fp16", out=str(tmp_path), steps=4, task__dropout=0.5, task__norm=True, scale="dynamic")
    run = Run(config, Record(tmp_path))
    tmp_path.mkdir(exist_ok=True)
    seen = []
    dropout = next(m for m in run.models["model"].modules() if isinstance(m, nn.Dropout))
    dropout.register_forward_hook(lambda module, inputs, output: seen.append(output.detach().clone()))
    window = next(run.loader.windows())
    with torch.no_grad():
        run.models["model"][-1].weight[0, 0] = torch.nan
    assert run.step(window)  # skipped
    scale = run.begun[0]
    assert run.scaler.value == scale / 2
    run.attempted = 1
    before = torch.get_rng_state()
    (found,) = rerun.explain(run, window)
    assert len(seen) == 2 and torch.equal(seen[0], seen[1]) and (seen[0] == 0).any()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in run.models["model"].parameters())
    assert found.where == "weight" and json.loads((tmp_path / "provenance.json").read_text())["where"] == "weight"
