"""How networks hold their parameters, what optimizers update, and what stays in FP32."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from mptrain.errors import UserError
from mptrain.precision.modes import Precision
from mptrain.precision.scaling import loss_scaler
from mptrain.precision.storage import CopiedWeights, PureWeights, Weights

HALF = ("fp16_master", "fp16_nomaster")
ALL = ("fp32", "tf32", "bf16", "fp16", "pseudo_fp16", "fp16_acc16", "fp16_master", "fp16_nomaster", "bf16_pure")


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 4))


def train(name, make=mlp, steps=8, scale=256, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), **changes):
    precision, model = Precision.load(name, **changes), make()
    weights, scaler = precision.prepare(model), loss_scaler(scale)
    optimizer, arithmetic = optimizer(weights.of("model")), precision.arithmetic()
    for step in range(steps):
        weights.zero_grad()
        x = torch.sin(torch.arange(48.0).view(6, 8) + step)
        with arithmetic:
            loss = (model(x).float() ** 2).mean()
        scaler.scale(loss).backward()
        weights.gather("model")
        if scaler.step(optimizer):
            weights.publish("model")
        scaler.update()
    return model, weights


def test_fp16_master_equals_fp16_bit_for_bit():
    by_autocast, _ = train("fp16")
    stored, weights = train("fp16_master")
    for full, low, master in zip(by_autocast.parameters(), stored.parameters(), weights.of("model"), strict=True):
        assert low.dtype == torch.float16 and master.dtype == torch.float32
        assert torch.equal(full, master) and torch.equal(full.half(), low)


def test_without_a_master_copy_one_rounding_differs():
    model, weights = train("fp16_nomaster", steps=1)
    reference, masters = train("fp16_master", steps=0)
    # by hand: the same step from the rounded weights, its result rounded
    start, by_hand = mlp(), mlp()
    with torch.no_grad():
        for p in by_hand.parameters():
            p.copy_(p.half())
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9)
    with Precision.load("fp16").arithmetic():
        loss = (by_hand(torch.sin(torch.arange(48.0).view(6, 8))).float() ** 2).mean()
    (loss * 256).backward()
    for p in by_hand.parameters():
        p.grad /= 256
    optimizer.step()
    for p, first in zip(start.parameters(), masters.of("model"), strict=True):
        assert torch.equal(p, first)  # a master copy starts unrounded
    for low, copied, expected in zip(model.parameters(), weights.of("model"), by_hand.parameters(), strict=True):
        assert torch.equal(low, expected.half()) and torch.equal(copied, low.float())
    assert reference[0].weight.dtype == torch.float16


def test_small_updates_reach_a_master_copy_and_nothing_else():
    moved = {}
    for name in (*HALF, "fp16", "bf16_pure", "bf16"):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        weights = Precision.load(name).prepare(model)
        optimizer = torch.optim.SGD(weights.of("model"), lr=1.0)
        for _ in range(1000):
            model.weight.grad = torch.full_like(model.weight, 2.0**-12 if "fp16" in name else 1e-3)
            weights.gather("model")
            optimizer.step()
            weights.publish("model")
        moved[name] = weights.of("model")[0].item()
    assert moved["fp16_nomaster"] == 1.0 and moved["bf16_pure"] == 1.0
    assert moved["fp16_master"] == moved["fp16"] == 1 - 1000 * 2.0**-12
    assert moved["bf16"] == pytest.approx(0.0, abs=1e-4)


def test_bf16_pure_has_no_fp32_anywhere():
    model, weights = train("bf16_pure", scale="none", optimizer=lambda p: torch.optim.Adam(p, lr=1e-3))
    assert type(weights) is PureWeights
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(a is b for a, b in zip(model.parameters(), weights.of("model"), strict=True))


def test_zero_gradients_and_adam_stay_finite():
    for name in HALF:

        def make():
            return nn.Sequential(nn.Linear(8, 4), nn.ReLU())

        model, weights = train(name, make, optimizer=lambda p: torch.optim.Adam(p, lr=1e-3))
        assert all(p.isfinite().all() for p in [*model.parameters(), *weights.of("model")])


@pytest.mark.parametrize("name", ALL)
def test_evaluating_restores(name):
    model, weights = train(name, scale="none" if name == "bf16_pure" else 256, steps=2)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    data = [p.data_ptr() for p in model.parameters()]
    x = torch.randn(3, 8)
    for fp32 in (True, False):
        with pytest.raises(KeyError, match="mine"), weights.evaluating(fp32), torch.no_grad():
            if fp32:
                assert {p.dtype for p in model.parameters()} == {torch.float32}
                full = torch.nn.functional.linear(x, weights.of("model")[0].float(), weights.of("model")[1].float())
                assert torch.equal(model[0](x), full)
            else:
                assert [p.data_ptr() for p in model.parameters()] == data
            raise KeyError("mine")
        assert [p.data_ptr() for p in model.parameters()] == data
        for n, t in model.state_dict().items():
            assert t.dtype == before[n].dtype and torch.equal(t, before[n])


@pytest.mark.parametrize("name", ALL)
def test_state_goes_on_where_it_was(name):
    scale = "none" if name == "bf16_pure" else 256
    model, weights = train(name, scale=scale, steps=3)
    other = mlp()
    again = Precision.load(name).prepare(other)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(weights.state_dict()))
    for a, b in zip(weights.of("model"), again.of("model"), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    with weights.evaluating(True), again.evaluating(True), torch.no_grad():
        x = torch.randn(3, 8)
        assert torch.equal(model(x), other(x))


def test_normalisation_layers_keep_fp32_parameters():
    def make():
        return nn.Sequential(
            nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True),
            nn.LayerNorm(5), nn.RMSNorm(5), nn.Linear(5, 2),
        )  # fmt: skip

    for name, low in (("fp16_master", torch.float16), ("fp16_nomaster", torch.float16), ("bf16_pure", torch.bfloat16)):
        model, precision = make(), Precision.load(name)
        weights = precision.prepare(model)
        for index, module in enumerate(model):
            for p in module.parameters():
                assert p.dtype == (low if index in (0, 6) else torch.float32)
        assert all(b.dtype in (torch.float32, torch.int64) for b in model.buffers())
        with precision.arithmetic():
            y = model(torch.randn(2, 3, 5))
        y.float().sum().backward()
        weights.gather("model")
        assert all(p.grad.dtype == p.dtype for p in weights.of("model"))


def test_parameters_in_another_format_are_refused_by_name():
    model = mlp()
    model[2].half()
    for name in ("fp32", "fp16", "fp16_master"):
        with pytest.raises(UserError, match=r"2\.weight \(float16\), 2\.bias \(float16\)") as error:
            Precision.load(name).prepare(model)
        assert "0.weight" not in str(error.value) and "fp16_master" in str(error.value)
    with pytest.raises(UserError, match="and 1 more"):
        Precision.load("fp16").prepare(mlp().double()[:5])


def test_frozen_parameters():
    for name in ALL:
        model = mlp()
        model[0].requires_grad_(False)
        frozen = model[0].weight.clone()
        weights = Precision.load(name).prepare(model)
        assert len(weights.of("model")) == 4
        with weights.evaluating(True):
            assert model[0].weight.dtype == torch.float32
        low = Precision.load(name).storage
        expected = frozen if low == "float32" else frozen.to(getattr(torch, low))
        assert torch.equal(model[0].weight, expected)


def test_a_network_frozen_for_a_while_keeps_its_copies():
    model = mlp()
    weights = Precision.load("fp16_master").prepare(model)
    model.requires_grad_(False)
    weights.gather("model")
    weights.publish("model")
    with weights.evaluating(True):
        assert model[0].weight.dtype == torch.float32
    assert len(weights.of("model")) == 6


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 8)
        self.hidden = nn.Linear(8, 8)
        self.output = nn.Linear(8, 7)
        self.output.weight = self.embedding.weight

    def forward(self, x):
        return self.output(torch.tanh(self.hidden(self.embedding((x[:, 0].abs() * 10).long() % 7))))


def test_tied_parameters_stay_tied():
    full, _ = train("fp16", Tied)
    for name in ALL:
        model, weights = train(name, Tied, scale="none" if name == "bf16_pure" else 256)
        assert model.output.weight is model.embedding.weight
        assert len(weights.of("model")) == 4
        with weights.evaluating(True):
            assert model.output.weight is model.embedding.weight and model.output.weight.dtype == torch.float32
        if name == "fp16_master":
            torch.testing.assert_close(weights.of("model")[1], full.hidden.weight, rtol=0, atol=1e-3)


def test_a_parameter_shared_by_two_networks_has_one_copy():
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    b.weight = a.weight
    weights = Precision.load("fp16_master").prepare({"a": a, "b": b})
    assert isinstance(weights, CopiedWeights)
    assert weights.of("a")[0] is weights.of("b")[0] and weights.of("a")[1] is not weights.of("b")[1]


def test_empty_networks():
    for name in ALL:
        weights = Precision.load(name).prepare({"a": nn.ReLU(), "b": nn.Linear(2, 2)})
        assert weights.of("a") == []
        for method in (weights.gather, weights.publish):
            method("a")
        with weights.evaluating(True):
            pass
        weights.load_state_dict(weights.state_dict())
        assert isinstance(weights, Weights)


class TestKeepFP32:
    def make(self):
        return nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8), nn.Softmax(-1))

    def dtypes(self, name, keep):
        model, found = self.make(), {}
        precision = Precision.load(name, keep_fp32=keep)
        precision.prepare(model)
        for path, module in model.named_modules():
            module.register_forward_hook(lambda m, a, o, path=path: found.update({path: o.dtype}))
        with precision.arithmetic():
            model(torch.randn(2, 8)).float().sum().backward()
        return {p: d for p, d in found.items() if p in ("0.0", "0.1", "1")}, model

    @pytest.mark.parametrize("name", ["fp16", "bf16", "fp16_master", "fp16_acc16", "bf16_pure"])
    @pytest.mark.parametrize(
        "keep, kept", [([], set()), (["1"], {"1"}), (["0"], {"0.0", "0.1"}), (["0.*"], {"0.0", "0.1"}),
                       (["*.1", "1"], {"0.1", "1"}), (["linear"], {"0.0", "0.1", "1"}), (["softmax"], set())],
    )  # fmt: skip
    def test_modules_and_functions(self, name, keep, kept):
        found, model = self.dtypes(name, keep)
        low = torch.bfloat16 if "bf16" in name else torch.float16
        assert found == {path: torch.float32 if path in kept else low for path in ("0.0", "0.1", "1")}
        stored = Precision.load(name).storage
        for path in ("0.0", "0.1", "1"):
            expected = stored if path not in kept or keep == ["linear"] else "float32"
            assert model.get_submodule(path).weight.dtype == getattr(torch, expected)

    def test_a_kept_module_computes_what_fp32_does(self):
        model = self.make()
        x = torch.randn(2, 8)
        for name in ("fp16", "tf32", "bf16"):
            precision = Precision.load(name, keep_fp32=["1"])
            precision.prepare(model)
            with precision.arithmetic():
                found = model[1](x)
            assert torch.equal(found, nn.functional.linear(x, model[1].weight, model[1].bias))

    def test_unknown_names_are_refused_with_near_ones(self):
        for keep, near in (("sofmax", "softmax"), ("0.O", "0.0"), ("layer9.*", "layer1")):
            with pytest.raises(UserError, match=near) as error:
                Precision.load("fp16", keep_fp32=[keep]).prepare(self.make())
            assert keep in str(error.value)

    def test_packed_sequences_and_copies(self):
        model = nn.Sequential(nn.LSTM(3, 4))
        precision = Precision.load("fp16", keep_fp32=["0"])
        precision.prepare(model)
        packed = pack_padded_sequence(torch.randn(5, 2, 3).half(), [5, 3])
        other = copy.deepcopy(model)
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        with precision.arithmetic():
            assert model(packed)[0].data.dtype == torch.float32
            assert model(packed)[0].data.abs().sum() > 0 and other(packed)[0].data.abs().sum() == 0

    def test_preparing_twice_wraps_once(self):
        model, precision = self.make(), Precision.load("fp16", keep_fp32=["1"])
        precision.prepare(model)
        precision.prepare(model)
        with precision.arithmetic():
            assert model[1](torch.randn(2, 8)).dtype == torch.float32
        assert list(model.state_dict()) == list(self.make().state_dict())

    def test_a_projection_inside_attention_is_refused(self):
        model = nn.Sequential(nn.MultiheadAttention(8, 2))
        with pytest.raises(UserError, match="attention module itself"):
            Precision.load("fp16", keep_fp32=["0.out_proj"]).prepare(model)
        precision = Precision.load("fp16", keep_fp32=["0"])
        precision.prepare(model)
        x = torch.randn(3, 2, 8)
        with precision.arithmetic():
            assert model[0](x, x, x)[0].dtype == torch.float32
