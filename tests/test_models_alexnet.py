import torch
from torch import nn
from torchvision.models import alexnet

from mptrain.models.alexnet import alexnet_small


def test_full_size_is_torchvision_s() -> None:
    with torch.device("meta"):
        network = alexnet(num_classes=1000)
    assert sum(p.numel() for p in network.parameters()) == 61_100_840  # published: 61.1 M


def test_small_form_has_the_same_layers() -> None:
    with torch.device("meta"):
        full = alexnet(num_classes=10)
    network = alexnet_small(num_classes=10)
    for kind in (nn.Conv2d, nn.MaxPool2d, nn.Linear, nn.Dropout):
        assert count(network, kind) == count(full, kind)
    assert not any("Norm" in type(m).__name__ for m in network.modules())
    for size in (28, 32):
        assert alexnet_small(num_classes=7, channels=3)(torch.randn(2, 3, size, size)).shape == (2, 7)


def count(network: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(m, kind) for m in network.modules())
