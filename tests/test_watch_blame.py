import pytest
import torch
from torch import nn

from mptrain.watch.blame import first_nonfinite


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

    return first_nonfinite(models, run)


def test_all_is_well():
    assert blame({"model": network()}, torch.ones(3, 2)) is None


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_forward(bad):
    assert blame({"model": network(forward=bad)}, torch.ones(3, 2)) == "forward of 2.1 (Faulty)"


def test_the_input():
    assert blame({"model": network()}, torch.full((3, 2), torch.inf)) == "forward of 0 (Linear)"


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_backward(bad):
    torch.manual_seed(0)
    assert blame({"model": network(backward=bad)}, torch.ones(3, 2)) == "backward at the output of 2.0 (Linear)"


def test_several_networks_are_named():
    models = {"discriminator": network(), "generator": network(forward=torch.inf)}
    assert blame(models, torch.ones(3, 2)) == "forward of generator.2.1 (Faulty)"


def test_containers_and_whole_numbers():
    class Odd(nn.Module):
        def forward(self, x):
            return {"a": [x.long(), (x * torch.inf,)]}

    odd = Odd()
    assert first_nonfinite({"model": odd}, lambda: odd(torch.ones(1))) == "forward of the whole network (Odd)"


def test_no_hook_is_left():
    model = network()
    with pytest.raises(RuntimeError, match="stop"):
        first_nonfinite({"model": model}, lambda: (_ for _ in ()).throw(RuntimeError("stop")))
    assert not any(module._forward_hooks for module in model.modules())


def test_under_no_grad_too():
    model = network(forward=torch.inf)
    with torch.no_grad():
        assert first_nonfinite({"model": model}, lambda: model(torch.ones(1, 2))) == "forward of 2.1 (Faulty)"
