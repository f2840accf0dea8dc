import pytest
import torch
from torch import nn

from mptrain.models import inception_v2 as v2


def test_modules_have_the_outputs_of_the_paper_s_figure_5() -> None:
    with torch.device("meta"):
        network = v2.inception_v2()
        x = network.stem(torch.empty(2, 3, 224, 224))
        assert x.shape == (2, 192, 28, 28)
        shapes = []
        for module in network.inception:
            x = module(x)
            shapes.append((x.shape[1], x.shape[2]))
    assert shapes == [
        (256, 28), (320, 28), (576, 14), (576, 14), (576, 14), (576, 14), (576, 14), (1024, 7), (1024, 7), (1024, 7),
    ]  # fmt: skip


def test_size_is_that_of_the_caffe_network_in_its_two_wider_projections(monkeypatch) -> None:
    # The widely used port has biases on its convolutions and 128 channels in the pooled projections of 4c and 4d, where
    # the paper has 96; published: 11.3 M, exactly 11,295,240.
    rows = [(*row[:6], 128) if number in (5, 6) else row for number, row in enumerate(v2.FULL_SIZE)]
    monkeypatch.setattr(v2, "FULL_SIZE", tuple(rows))
    with torch.device("meta"):
        network = v2.inception_v2()
    biases = sum(m.out_channels for m in network.modules() if isinstance(m, nn.Conv2d))
    assert sum(p.numel() for p in network.parameters()) + biases == 11_295_240


@pytest.mark.parametrize("size", [28, 32])
def test_small_form(size) -> None:
    network = v2.inception_v2_small(num_classes=7, channels=3)
    assert network(torch.randn(2, 3, size, size)).shape == (2, 7)
    x = network.stem(torch.randn(1, 3, size, size))
    sides = [(x := module(x)).shape[-1] for module in network.inception]
    assert sides == [size // 4, 4, 4, 4, 2, 2]
