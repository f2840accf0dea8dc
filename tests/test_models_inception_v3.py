import pytest
import torch
from torch import nn

from mptrain.models import inception_v3 as v3


def test_full_size_has_an_auxiliary_classifier() -> None:
    with torch.device("meta"):
        network = v3.inception_v3(num_classes=1000)
        assert sum(p.numel() for p in network.parameters()) == 27_161_264  # published: 27.2 M
        without = [p.numel() for name, p in network.named_parameters() if not name.startswith("AuxLogits")]
        assert sum(without) == 23_834_568  # published: 23.8 M
        assert [tuple(output.shape) for output in network(torch.empty(2, 3, 299, 299))] == [(2, 1000)] * 2
        assert network.eval()(torch.empty(2, 3, 299, 299)).shape == (2, 1000)


@pytest.mark.parametrize(
    ("module", "outputs", "side"),
    [(v3.small_kernels, 24, 8), (v3.smaller_grid, 16 + 6, 4), (v3.long_kernels, 40, 8), (v3.wide_outputs, 80, 8)],
)
def test_modules(module, outputs, side) -> None:
    assert module(6, 2)(torch.randn(2, 6, 8, 8)).shape == (2, outputs, side, side)


def test_no_kernel_is_larger_than_3x3_or_1x7() -> None:
    network = v3.inception_v3_small()
    kernels = {m.kernel_size for m in network.modules() if isinstance(m, nn.Conv2d)}
    assert kernels == {(1, 1), (3, 3), (1, 7), (7, 1), (1, 3), (3, 1)}


def test_small_form_gives_auxiliary_logits_in_training_only() -> None:
    network = v3.inception_v3_small(num_classes=7, channels=3)
    for size in (28, 32):
        outputs = network.train()(torch.randn(2, 3, size, size))
        assert [tuple(output.shape) for output in outputs] == [(2, 7)] * 2
        assert network.eval()(torch.randn(2, 3, size, size)).shape == (2, 7)
