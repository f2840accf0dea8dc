import math

import pytest
import torch
from torch import nn

from mptrain.models.clip import CLIP, ConvolutionalTower, TextTransformer, VisionTransformer


def parameters(network):
    return sum(p.numel() for p in network.parameters())


def test_vit_h_14_has_the_published_size():
    """OpenCLIP's model profile: 986.11 M parameters, 632.08 M for pictures and 354.03 M for text."""
    with torch.device("meta"):
        image = VisionTransformer(size=224, patch=14, width=1280, layers=32, heads=16, dimension=1024)
        text = TextTransformer(words=49_408, length=77, width=1024, layers=24, heads=16, dimension=1024)
        whole = CLIP(image, text)
    assert round(parameters(image) / 1e6, 2) == 632.08
    assert round(parameters(text) / 1e6, 2) == 354.03
    assert round(parameters(whole) / 1e6, 2) == 986.11


def small(image=None):
    torch.manual_seed(0)
    image = image or VisionTransformer(size=16, patch=8, width=16, layers=1, heads=2, dimension=8)
    return CLIP(image, TextTransformer(words=30, length=10, width=16, layers=2, heads=2, dimension=8)).eval()


def test_stem_of_small_convolutions_sees_the_same_patches():
    torch.manual_seed(0)
    tower = VisionTransformer(size=32, patch=8, width=16, layers=1, heads=2, dimension=8, stem="convolutions")
    maps = [layer.out_channels for layer in tower.patches if isinstance(layer, nn.Conv2d)]
    assert maps == [4, 4, 8, 8, 16, 16, 16] and tower.patches(torch.randn(2, 3, 32, 32)).shape == (2, 16, 4, 4)
    assert tower(torch.randn(2, 3, 32, 32)).shape == (2, 8)


def test_pooling_the_patches_leaves_the_class_token_out():
    """Without blocks the mean does not depend on the class token at all."""
    torch.manual_seed(0)
    tower = VisionTransformer(size=32, patch=8, width=16, layers=0, heads=2, dimension=8, pool="mean")
    pictures = torch.randn(2, 3, 32, 32)
    before = tower(pictures)
    tower.class_token.data.fill_(7.0)
    torch.testing.assert_close(tower(pictures), before)
    assert not torch.allclose(before[0], before[1])


def test_features_are_unit_vectors_in_fp32_and_the_scale_starts_at_its_published_value():
    pictures, captions, scale = small()(torch.randn(3, 3, 16, 16), torch.randint(30, (3, 5)), torch.tensor([5, 3, 1]))
    for features in (pictures, captions):
        assert features.dtype == torch.float32 and features.shape == (3, 8)
        torch.testing.assert_close(features.norm(dim=1), torch.ones(3))
    assert scale.item() == pytest.approx(1 / 0.07, rel=1e-6)


@pytest.mark.parametrize(("log_scale", "scale"), [(9.0, 100.0), (-3.0, 1.0), (math.log(20.0), 20.0)])
def test_scale_is_clamped(log_scale, scale):
    model = small()
    model.log_scale.data.fill_(log_scale)
    assert model(torch.randn(1, 3, 16, 16), torch.ones(1, 2, dtype=int), torch.tensor([2]))[2].item() == pytest.approx(
        scale
    )


def test_padding_and_later_words_do_not_matter():
    text = small().text
    words = torch.randint(30, (1, 7))
    alone = text(words[:, :4], torch.tensor([4]))
    beside = text(torch.cat([words, torch.randint(30, (1, 7))]), torch.tensor([4, 7]))[:1]
    torch.testing.assert_close(alone, beside)


def test_earlier_words_do_matter():
    text = small().text
    one, other = torch.tensor([[1, 5, 6, 0]]), torch.tensor([[1, 9, 6, 0]])
    assert not torch.allclose(text(one, torch.tensor([4])), text(other, torch.tensor([4])))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_empty_caption_is_finite_in_half_precision(dtype):
    text = small().text.to(dtype)
    found = text(torch.tensor([[1, 0, 0], [1, 4, 0]]), torch.tensor([1, 3]))
    found.sum().backward()
    assert found.isfinite().all()
    assert all(p.grad.isfinite().all() for p in text.parameters())


@pytest.mark.parametrize(
    ("norm", "kind"), [("batch", nn.BatchNorm2d), ("group", nn.GroupNorm), ("layer", nn.GroupNorm)]
)
def test_convolutional_tower_has_the_norm_asked_for(norm, kind):
    tower = ConvolutionalTower(width=16, stages=2, dimension=8, norm=norm)
    norms = [module for module in tower.modules() if isinstance(module, nn.BatchNorm2d | nn.GroupNorm)]
    assert len(norms) == 4 and all(isinstance(module, kind) for module in norms)
    if kind is nn.GroupNorm:
        assert [module.num_groups for module in norms] == ([2, 2, 4, 4] if norm == "group" else [1] * 4)
    assert small(tower)(torch.randn(2, 3, 16, 16), torch.ones(2, 3, dtype=int), torch.tensor([3, 2]))[0].shape == (2, 8)
