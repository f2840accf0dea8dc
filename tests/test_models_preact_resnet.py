import torch
from torch import nn

from mptrain.models.preact_resnet import BottleneckUnit, preact_resnet8, preact_resnet50


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_resnet50_has_the_published_size() -> None:
    with torch.device("meta"):
        network = preact_resnet50(num_classes=1000)
        # He et al. 2016b at depth 50, without biases before batch norm: 25.55 M.
        assert parameters(network) == 25_549_352
        assert network.eval()(torch.empty(2, 3, 224, 224)).shape == (2, 1000)


def test_resnet50_has_fifty_layers_in_the_paper_s_stages() -> None:
    with torch.device("meta"):
        network = preact_resnet50()
    assert [len(stage) for stage in network.stages] == [3, 4, 6, 3]
    on_the_path = [m for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    projections = [u.shortcut for s in network.stages for u in s if u.shortcut is not None]
    assert len(on_the_path) - len(projections) == 50
    assert len(projections) == 4


def test_a_unit_passes_its_input_on_untouched() -> None:
    unit = BottleneckUnit(inputs=64, width=16, stride=1)
    nn.init.zeros_(unit.residual[-1].weight)
    x = torch.randn(2, 64, 5, 5)
    before = x.clone()
    assert torch.equal(unit(x), before)
    assert torch.equal(x, before), "no ReLU may work in place on the sum"


def test_every_convolution_after_the_stem_follows_norm_and_relu() -> None:
    for network in (preact_resnet8(), preact_resnet50()):
        for stage in network.stages:
            for unit in stage:
                convolutions = [i for i, layer in enumerate(unit.residual) if isinstance(layer, nn.Conv2d)]
                for index in convolutions[1:]:
                    assert [type(m) for m in unit.residual[index - 1]] == [nn.BatchNorm2d, nn.ReLU]
        first = network.stages[0][0]
        assert isinstance(first.activation, nn.Identity), "the stem ends activated"
        assert all(not isinstance(u.activation, nn.Identity) for s in network.stages for u in s if u is not first)
        assert [type(m) for m in network.activation] == [nn.BatchNorm2d, nn.ReLU]


def test_the_projection_sees_the_activated_input() -> None:
    unit = BottleneckUnit(inputs=8, width=4, stride=2).eval()
    nn.init.zeros_(unit.residual[-1].weight)
    x = torch.randn(2, 8, 6, 6)
    expected = unit.shortcut(torch.relu(unit.activation[0](x)))
    assert torch.allclose(unit(x), expected)


def test_small_form() -> None:
    network = preact_resnet8(num_classes=7, channels=3)
    for size in (28, 32):
        assert network(torch.randn(2, 3, size, size)).shape == (2, 7)
