"""Layerwise scaling: on any graph the unscaled gradients are the plain ones, and small gradients survive FP16."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mptrain.errors import UserError
from mptrain.precision import scaling
from mptrain.precision.arithmetic import Arithmetic
from mptrain.precision.layerwise import LayerwiseScaler


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.a, self.b = (nn.Conv2d(i, 6, 3, padding=1) for i in (3, 6, 6))
        self.norm, self.end = nn.BatchNorm2d(6), nn.Linear(6, 5)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.norm(self.a(x)).relu()
        x = torch.cat([x, self.b(x).relu_()], dim=1).view(len(x), 2, 6, -1).mean((1, 3))
        return self.end(x)


class SharedOutOfOrder(nn.Module):
    """Layers registered in another order than they run in, one of them used three times."""

    def __init__(self):
        super().__init__()
        self.last, self.shared, self.first = nn.Linear(8, 5), nn.Linear(8, 8), nn.Linear(12, 8)

    def forward(self, x):
        x = self.first(x).tanh()
        for _ in range(3):
            x = x + self.shared(x).relu()
        return self.last(x) * self.last.weight.mean()


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.words, self.core, self.end = nn.Embedding(20, 6), kind(6, 8, 2, bidirectional=True), nn.Linear(16, 5)

    def forward(self, x):
        return self.end(self.core(self.words(x))[0].mean(0))


def attention():
    layer = nn.TransformerEncoderLayer(12, 3, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.LayerNorm(12), nn.Flatten(), nn.Linear(48, 5))


NETWORKS = {
    "sequential": lambda: (nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 5)), torch.randn(7, 12)),
    "residual": lambda: (Residual(), torch.randn(7, 3, 6, 6)),
    "shared": lambda: (SharedOutOfOrder(), torch.randn(7, 12)),
    "nested": lambda: (
        nn.Sequential(nn.Sequential(nn.Linear(12, 12), nn.Sequential(SharedOutOfOrder())), nn.Linear(5, 5)),
        torch.randn(7, 12),
    ),
    "lstm": lambda: (Recurrent(nn.LSTM), torch.randint(20, (4, 7))),
    "gru": lambda: (Recurrent(nn.GRU), torch.randint(20, (4, 7))),
    "attention": lambda: (attention(), torch.randn(7, 4, 12)),
    "transposed": lambda: (
        nn.Sequential(nn.ConvTranspose2d(3, 4, 2, 2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 5)),
        torch.randn(7, 3, 2, 2),
    ),
}


def backward(scaler, optimizer, loss):
    """One iteration up to the step; whether the gradients are finite."""
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    return scaler.unscale_(optimizer)


@pytest.mark.parametrize("name", NETWORKS)
def test_in_fp32_gradients_are_the_plain_ones_also_after_an_overflow(name):
    torch.manual_seed(1)
    model, x = NETWORKS[name]()
    y = torch.randint(5, (7,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = LayerwiseScaler({"model": model}, every=1)
    # gradients far below FP16's range, so that factors are not all 1
    for step, weight in enumerate((1e-9, 1e-9, float("inf"), 1e-9, 1e-9)):
        loss = F.cross_entropy(model(x), y) * weight
        if step == 2:
            assert backward(scaler, optimizer, loss) is False
            scaler.step(optimizer)
            assert scaler.update()
            continue
        plain = torch.autograd.grad(F.cross_entropy(model(x), y) * weight, list(model.parameters()))
        assert backward(scaler, optimizer, loss)
        for (path, p), expected in zip(model.named_parameters(), plain, strict=True):
            # oneDNN and BatchNorm leave noise where the true gradient is zero
            assert (p.grad - expected).norm() <= 1e-6 * expected.norm() + 1e-7 * weight, path
        scaler.step(optimizer)
        scaler.update()
    assert any(layer.factor > 1 for layer in scaler.layers.values())


class Fading(nn.Module):
    """Sigmoids, the classical vanishing gradient: the first layers' is over 2^-40 of the last's."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(18))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).sigmoid()
        return x


def test_in_fp16_it_saves_what_no_single_scale_saves():
    torch.manual_seed(0)
    model, x = Fading(), torch.randn(16, 32)
    fp16 = Arithmetic("cpu", "float16", emulated=True)

    def loss(region):
        if region is None:
            return model(x).square().sum()
        with region:
            out = model(x)
        return out.float().square().sum()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plain = torch.autograd.grad(loss(None), list(model.parameters()))
    assert plain[0].count_nonzero() == plain[0].numel()
    assert plain[-2].abs().max() / plain[0].abs().max() > 2.0**40
    scaler = LayerwiseScaler({"model": model}, every=1)
    for _ in range(12):
        finite = backward(scaler, optimizer, loss(fp16))
        scaler.step(optimizer)
        scaler.update()
    assert finite
    for p, expected in zip(model.parameters(), plain, strict=True):
        assert (p.grad - expected).norm() < 0.02 * expected.norm()
    for exponent in range(0, 25):
        optimizer.zero_grad()
        (loss(fp16) * 2.0**exponent).backward()
        first, last = model.layers[0].weight.grad, model.layers[-1].weight.grad
        assert not first.any() or not last.isfinite().all()


def test_a_layer_used_in_two_backward_passes_of_one_graph():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = LayerwiseScaler({"model": model}, every=1)
    for _ in range(3):
        optimizer.zero_grad()
        out = model(torch.ones(3, 4)) * 1e-8
        plain = torch.autograd.grad(out.sum() + out.square().sum(), list(model.parameters()), retain_graph=True)
        scaler.scale(out.sum()).backward(retain_graph=True)
        scaler.scale(out.square().sum()).backward()
        scaler.unscale_(optimizer)
        for p, expected in zip(model.parameters(), plain, strict=True):
            torch.testing.assert_close(p.grad, expected, rtol=1e-6, atol=0)
        scaler.update()


def test_two_losses_at_once_are_refused():
    model = nn.Linear(2, 2)
    scaler = LayerwiseScaler({"model": model})
    scaler.scale(model(torch.ones(1, 2)).sum())
    with pytest.raises(RuntimeError, match="one loss at a time"):
        scaler.scale(model(torch.ones(1, 2)).sum())


def test_an_overflow_widens_the_margin_until_it_grows_again():
    model = nn.Linear(2, 2)
    settings = scaling.DynamicSettings(interval=2)
    scaler = LayerwiseScaler({"model": model}, settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    assert backward(scaler, optimizer, model(torch.full((1, 2), torch.inf)).sum()) is False
    assert scaler.step(optimizer) is False and scaler.update()
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())
    assert (scaler.margin, scaler.value) == (4.0, 32768.0)
    for _ in range(2):
        assert backward(scaler, optimizer, model(torch.ones(1, 2)).sum())
        scaler.step(optimizer)
        scaler.update()
    assert (scaler.margin, scaler.value) == (2.0, 65536.0)


def test_its_state_goes_on_where_it_was():
    torch.manual_seed(0)
    model, x = NETWORKS["residual"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = LayerwiseScaler({"model": model}, every=2)
    for _ in range(3):
        backward(scaler, optimizer, model(x).square().sum() * 1e-9)
        scaler.update()
    other = LayerwiseScaler({"model": model})
    other.load_state_dict(copy.deepcopy(scaler.state_dict()))
    assert other.state_dict() == scaler.state_dict()
    backward(scaler, optimizer, model(x).square().sum() * 1e-9)
    layers = scaler.layers
    backward(other, optimizer, model(x).square().sum() * 1e-9)
    assert other.layers == layers and any(layer.factor > 1 for layer in layers.values())
    with pytest.raises(UserError, match="does not fit scale=dynamic"):
        scaling.DynamicScaler().load_state_dict(scaler.state_dict())


def test_it_needs_the_networks():
    assert isinstance(scaling.loss_scaler("layerwise", None, {"m": nn.Linear(1, 1)}), LayerwiseScaler)
    with pytest.raises(UserError, match="needs the networks"):
        scaling.loss_scaler("layerwise")
