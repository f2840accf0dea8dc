import torch
from torch import nn
from torchvision.models import vgg16

from mptrain.models.vgg import vgg_small


def test_full_size_is_torchvision_s_configuration_d() -> None:
    with torch.device("meta"):
        network = vgg16(num_classes=1000)
    assert sum(p.numel() for p in network.parameters()) == 138_357_544  # published: 138.4 M


def test_small_form_keeps_the_stages() -> None:
    network = vgg_small(num_classes=10)
    kinds = [type(m).__name__ for m in network.features]
    stages = " ".join(kinds).replace("Conv2d ReLU", "c").replace("MaxPool2d", "|")
    assert stages == "c c | c c | c c c | c c c |"
    widths = [m.out_channels for m in network.features if isinstance(m, nn.Conv2d)]
    assert widths == [16, 16, 32, 32, 64, 64, 64, 128, 128, 128]
    assert all(m.kernel_size == (3, 3) for m in network.features if isinstance(m, nn.Conv2d))
    assert sum(isinstance(m, nn.Linear) for m in network.modules()) == 3
    for size in (28, 32):
        assert vgg_small(num_classes=7, channels=3)(torch.randn(2, 3, size, size)).shape == (2, 7)
