import pytest
import torch
from torch import nn

from mptrain.models.dcgan import Discriminator, Generator


def count(network, kind):
    return sum(isinstance(module, kind) for module in network.modules())


def test_paper_size_has_seven_and_six_plus_two_layers():
    with torch.device("meta"):
        generator, discriminator = Generator(128), Discriminator(128)
    assert count(generator, nn.ConvTranspose2d) == 7 and count(generator, nn.LeakyReLU) == 6
    assert count(generator, nn.Tanh) == 1
    assert count(discriminator, nn.Conv2d) == 6 and count(discriminator, nn.Linear) == 2
    assert count(discriminator, nn.BatchNorm2d) + count(discriminator, nn.BatchNorm1d) == 7
    assert count(discriminator, nn.Sigmoid) == 0


def test_paper_size_parameters_by_hand():
    with torch.device("meta"):
        generator, discriminator = Generator(128), Discriminator(128)
    maps = [100, 1024, 1024, 512, 256, 128, 64, 3]
    by_hand = 16 * sum(a * b for a, b in zip(maps[:-1], maps[1:], strict=True)) + 2 * sum(maps[1:-1]) + 3
    assert sum(p.numel() for p in generator.parameters()) == by_hand == 29_565_827
    maps = [3, 64, 128, 256, 512, 1024, 1024]
    by_hand = 16 * sum(a * b for a, b in zip(maps[:-1], maps[1:], strict=True)) + 2 * sum(maps[1:])
    by_hand += 4 * 1024 * 1024 + 2 * 1024 + 1024 + 1
    assert sum(p.numel() for p in discriminator.parameters()) == by_hand == 32_124_801


@pytest.mark.parametrize(("size", "channels"), [(8, 1), (32, 3), (64, 1)])
def test_shapes(size, channels):
    generator, discriminator = Generator(size, channels, 4, 10), Discriminator(size, channels, 4, 16)
    pictures = generator(torch.randn(3, 10))
    assert pictures.shape == (3, channels, size, size) and pictures.abs().max() <= 1
    assert discriminator(pictures).shape == (3,)


def test_size_must_be_a_power_of_two():
    with pytest.raises(ValueError, match="not 48"):
        Generator(48)


def test_inner_norm_leaves_the_first_and_the_fully_connected_layers_alone():
    network = Discriminator(32, 3, 4, 16, norm="inner")
    kinds = [type(layer).__name__ for layer in network.layers]
    assert kinds[:2] == ["Conv2d", "LeakyReLU"] and network.layers[0].bias is not None
    assert kinds.count("BatchNorm2d") == 3 and kinds[-3:] == ["Flatten", "Linear", "LeakyReLU"]
