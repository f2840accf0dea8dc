import torch

from mptrain.data.emoji import read_emoji
from mptrain.models.emoji_features import WEIGHTS, pretrained


def test_the_stored_weights_tell_the_groups_of_unseen_emoji_apart():
    """Every tenth concept was held out; the largest of the nine groups would be 21 %."""
    emoji = read_emoji()
    pictures = emoji.pictures[::10].flatten(0, 1).float() / 127.5 - 1
    groups = torch.tensor(emoji.groups[::10]).repeat_interleave(4)
    assert (pretrained()(pictures).argmax(1) == groups).float().mean() > 0.55
    assert WEIGHTS.stat().st_size < 300_000


def test_features_are_fp32_and_frozen():
    network = pretrained()
    features = network.features(torch.zeros(2, 3, 32, 32, dtype=torch.bfloat16))
    assert features.shape == (2, 64) and features.dtype == torch.float32
    assert not network.training and not any(p.requires_grad for p in network.parameters())


def test_grey_and_larger_pictures_are_brought_to_the_same_form():
    network = pretrained()
    small = torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    large = small.repeat_interleave(4, 2).repeat_interleave(4, 3).expand(-1, 3, -1, -1)
    torch.testing.assert_close(network.features(large), network.features(small))
