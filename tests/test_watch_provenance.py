import dataclasses
import gc
import json

import pytest
import torch
from torch import nn
from torch.nn.modules import module as every_module

import mptrain
from mptrain.precision.modes import Precision
from mptrain.watch.provenance import first_nonfinite


class Faulty(nn.Module):
    def __init__(self, forward=None, backward=None):
        super().__init__()
        self.scale, self.hook = forward, backward

    def forward(self, x):
        if self.hook is not None:
            x = x * 1.0
            x.register_hook(lambda g: g * self.hook)
            x = x * 1.0
        return x if self.scale is None else x * self.scale


def network(**faults):
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Sequential(nn.Linear(2, 2), Faulty(**faults)),
                         nn.Linear(2, 1))  # fmt: skip


def blame(models, x):
    def run():
        for model in models.values():
            model.zero_grad()
            model(x).sum().backward()

    found = first_nonfinite(models, run)
    return None if found is None else f"{found.where} of {found.label}"


def test_all_is_well():
    assert blame({"model": network()}, torch.ones(3, 2)) is None


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_forward(bad):
    assert blame({"model": network(forward=bad)}, torch.ones(3, 2)) == "forward of 2.1 (Faulty)"


def test_the_input():
    assert blame({"model": network()}, torch.full((3, 2), torch.inf)) == "data of 0 (Linear)"


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_backward(bad):
    torch.manual_seed(0)
    assert blame({"model": network(backward=bad)}, torch.ones(3, 2)) == "backward of 2.1 (Faulty)"


def test_several_networks_are_named():
    models = {"discriminator": network(), "generator": network(forward=torch.inf)}
    assert blame(models, torch.ones(3, 2)) == "forward of generator.2.1 (Faulty)"


def test_containers_and_whole_numbers():
    class Odd(nn.Module):
        def forward(self, x):
            return {"a": [x.long(), (x * torch.inf,)]}

    odd = Odd()
    assert (
        str(first_nonfinite({"model": odd}, lambda: odd(torch.ones(1)))) == "forward of the whole network (Odd) in mul"
    )


def test_no_hook_is_left():
    gc.collect()  # a Watch of another test, forgotten without a close, takes its hooks along here
    model, before = network(), list(every_module._global_forward_hooks)
    with pytest.raises(RuntimeError, match="stop"):
        first_nonfinite({"model": model}, lambda: (_ for _ in ()).throw(RuntimeError("stop")))
    assert list(every_module._global_forward_hooks) == before and not torch.is_anomaly_enabled()


def test_under_no_grad_too():
    model = network(forward=torch.inf)
    with torch.no_grad():
        assert (
            str(first_nonfinite({"model": model}, lambda: model(torch.ones(1, 2)))) == "forward of 2.1 (Faulty) in mul"
        )


def test_a_weight():
    model = network()
    with torch.no_grad():
        model[2][0].weight[0, 1] = torch.nan
    found = first_nonfinite({"model": model}, lambda: model(torch.ones(1, 2)).sum().backward())
    assert str(found) == "weights of 2.0 (Linear)" and found.inputs[0]["nan"] == 1


def test_ranges_and_source_lines():
    found = first_nonfinite({"model": (model := network(forward=torch.inf))}, lambda: model(torch.ones(3, 2)))
    assert found.op == "mul" and found.inputs[0]["shape"] == [3, 2] and found.inputs[0]["nan"] == 0
    assert found.frames[-1].endswith("return x if self.scale is None else x * self.scale")
    assert __file__ in found.frames[-1]
    assert "does not help" in found.advice and "no FP16 is at work here: lower the learning rate" in found.advice


@pytest.mark.parametrize(("name", "advice"), [("fp16", "use BF16 if a value outgrew"), ("bf16", "lower the learning")])
def test_bf16_is_advised_where_fp16_is_at_work(name, advice):
    model, arithmetic = nn.Linear(2, 1), Precision.load(name).arithmetic()

    def run():
        with arithmetic:
            return [model(torch.full((1, 2), 6e4)).float() * (1 if name == "fp16" else 1e38)]

    nn.init.constant_(model.weight, 1.0)
    found = first_nonfinite({"model": model}, run)
    assert found.where == "forward" and advice in found.advice


def test_a_derivative_that_does_not_exist_is_traced_to_its_line():
    class Root(nn.Module):
        def forward(self, x):
            return (x * 0).sqrt()

    model = nn.Sequential(nn.Linear(2, 2), Root(), nn.Flatten())
    found = first_nonfinite({"model": model}, lambda: (model(torch.ones(3, 2)) * 0).sum().backward())
    assert (found.where, found.module, found.type) == ("backward", "1", "Root")
    assert found.op.startswith("SqrtBackward0") and found.frames[-1].endswith("return (x * 0).sqrt()")


def test_the_loss_outside_of_modules():
    def run():
        loss = (model(torch.ones(3, 2)) * 0).log().sum() * 0
        loss.backward()
        return [loss]

    model = nn.Linear(2, 2)
    found = first_nonfinite({"model": model}, run)
    assert found.where == "forward" and found.module == "(loss)"


def test_masks_of_infinities_are_no_fault():
    class Attention(nn.Module):
        def forward(self, x):
            return x.masked_fill(torch.eye(3, dtype=torch.bool), -torch.inf).softmax(-1)

    model = nn.Sequential(nn.Linear(3, 3), Attention())
    assert first_nonfinite({"model": model}, lambda: model(torch.ones(3, 3)).sum().backward()) is None


def test_an_fp16_gradient_that_overflows():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
    arithmetic = mptrain.Precision.load("fp16").arithmetic("cpu")

    def run():
        with arithmetic:
            loss = model(torch.ones(3, 2)).float().sum()
        (loss * 2.0**15).backward()  # a bias gets three times that

    found = first_nonfinite({"model": model}, run)
    assert found.where == "backward" and found.module == "1"


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    extra: object = None


class Wraps(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return Output(self.inner(x) * 1.0)


@pytest.mark.parametrize(
    ("faults", "where"), [({"forward": torch.inf}, "forward"), ({"backward": torch.nan}, "backward")]
)
def test_outputs_that_are_dataclasses(faults, where):
    torch.manual_seed(0)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Wraps(Wraps(nn.Linear(2, 2)))
            self.inner.inner.forward = lambda x: self.inner.inner.inner(x)
            self.faulty, self.last = Wraps(Faulty(**faults)), nn.Linear(2, 1)

        def forward(self, x):
            return self.last(self.faulty(self.inner(x).logits).logits)

    assert blame({"model": Outer()}, torch.ones(3, 2)) == f"{where} of faulty.inner (Faulty)"


def test_a_buffer():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    model[1].running_var[0] = torch.nan
    assert blame({"model": model}, torch.ones(3, 2)) == "weight of 1 (BatchNorm1d)"
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), Faulty(forward=torch.inf))
    assert blame({"model": model}, torch.randn(3, 2)) == "forward of 2 (Faulty)"


def test_a_row_that_a_mask_leaves_empty():
    model = nn.MultiheadAttention(4, 1, batch_first=True)
    x, hidden = torch.ones(1, 3, 4), torch.ones(1, 3, dtype=torch.bool)
    found = first_nonfinite({"model": model}, lambda: model(x, x, x, key_padding_mask=hidden)[0].sum().backward())
    assert found.where == "forward" and found.op is not None and "softmax" in found.op, found


def growing():
    layers = [nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)]
    with torch.no_grad():
        for layer, value in zip(layers, (10.0, 1000.0, 100.0), strict=True):
            layer.weight.fill_(value)
    return nn.Sequential(layers[0], nn.ReLU(inplace=True), nn.Sequential(layers[1]), layers[2])


def test_what_came_before_is_told():
    model = growing()

    def run():
        with torch.autocast("cpu", torch.float16):
            model(torch.ones(3, 2)).float().mean().backward()

    found = first_nonfinite({"model": model}, run)
    assert str(found) == "forward of 3 (Linear) in mm"
    assert [(each["module"], each["max"]) for each in found.before] == [("0", 20.0), ("2.0", 40000.0)]
    assert found.details[1] == "before it: 0 (3x2) 20 to 20; 2.0 (3x2) 4e+04 to 4e+04"
    assert found.details[0] == "given: float16 (3x2) 4e+04 to 4e+04; float16 (2x1) 100 to 100"
    assert found.details[2].startswith("at: ") and "model(torch.ones(3, 2))" in found.details[2]
    assert found.as_dict()["before"][0]["type"] == "Linear"


def test_gradients_that_came_before_are_told():
    model = network(backward=float("inf"))

    def run():
        model(torch.ones(3, 2)).sum().backward()

    found = first_nonfinite({"model": model}, run)
    assert found.where == "backward" and (found.before[0]["module"], found.before[0]["max"]) == ("3", 1.0)


def test_in_a_loop_of_ones_own(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(growing(), nn.BatchNorm1d(1), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = mptrain.Watch(model, optimizer, 1, tmp_path)

    def backward():
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.ones(3, 2)).float().mean()
        loss.backward()
        return loss.detach()

    loss = backward()
    before = [model[1].running_mean.clone(), model[0][0].weight.grad, torch.get_rng_state()]
    found = watch.explain(backward)
    assert not loss.isfinite() and found.module == "0.3"
    assert all(map(torch.equal, before[::2], [model[1].running_mean, torch.get_rng_state()]))
    assert model[0][0].weight.grad is before[1]
    watch.step(loss)
    assert {row["calls"] for row in watch.rows} == {1}
    written = json.loads((tmp_path / "provenance.json").read_text())
    assert written["step"] == 1 and written["module"] == "0.3" and written["before"]
    with torch.no_grad():
        model[0][3].weight.fill_(0.1)
    assert watch.explain(backward) is None
    watch.close()
