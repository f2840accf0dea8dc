"""T5's encoder: initialisation, relative positions, the sum that nothing normalises, and clamping."""

import math

import pytest
import torch
import torch.nn.functional as F

import mptrain
from mptrain.models.t5 import MARGIN, T5Encoder, bucket, limited


def encoder(clamp=False, layers=2, width=8, feed=12):
    torch.manual_seed(0)
    return T5Encoder(50, width, layers, heads=2, feed=feed, clamp=clamp).double()


def test_forward_against_plain_sums():
    model = encoder()
    words = torch.randint(50, (3, 7))
    x = model.embedding(words)
    distances = torch.tensor([[column - row for column in range(7)] for row in range(7)])
    bias = model.positions(16 * (distances > 0) + distances.abs()).permute(
        2, 0, 1
    )  # of distances below 8 all are exact

    def norm(layer, x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.weight

    for block in model.blocks:
        attention, feed = block.attention, block.feed
        y = norm(attention.norm, x)
        heads = []
        for head in (slice(0, 4), slice(4, 8)):
            query, key, value = (
                (y @ layer.weight.T)[..., head] for layer in (attention.query, attention.key, attention.value)
            )
            heads.append((query @ key.transpose(1, 2) + bias[head.start // 4]).softmax(-1) @ value)
        x = x + torch.cat(heads, -1) @ attention.output.weight.T
        y = norm(feed.norm, x)
        gate = y @ feed.gate.weight.T
        gate = gate / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        x = x + (gate * (y @ feed.wide.weight.T)) @ feed.narrow.weight.T
    torch.testing.assert_close(model(words), norm(model.norm, x))


def test_initialisation_is_t5_s():
    torch.manual_seed(0)
    model = T5Encoder(400, 256, 1, heads=4, feed=512, clamp=False)
    assert float(model.embedding.weight.detach().std()) == pytest.approx(1, rel=0.05)
    attention, feed = model.blocks[0].attention, model.blocks[0].feed
    inputs = {
        attention.key: 256,
        attention.value: 256,
        attention.output: 256,
        feed.gate: 256,
        feed.wide: 256,
        feed.narrow: 512,
    }
    for layer, count in inputs.items():
        assert layer.bias is None and float(layer.weight.detach().std()) == pytest.approx(count**-0.5, rel=0.05)
    # attention has no 1/sqrt(64): it is in the queries, at the start
    assert float(attention.query.weight.detach().std()) == pytest.approx((256 * 64) ** -0.5, rel=0.05)


def test_buckets_of_relative_positions():
    found = bucket(300, torch.device("cpu"))
    assert found.shape == (300, 300) and found.min() == 0 and found.max() == 31
    assert found[200, 200] == 0 and found[200, 193:200].tolist() == [7, 6, 5, 4, 3, 2, 1]
    assert (found[0, 1:8] - found[1:8, 0] == 16).all()  # keys ahead have buckets of their own
    behind = found[299].flip(0)
    assert (behind[1:] >= behind[:-1]).all() and behind[8] == 8 and behind[127] == behind[128] == 15
    assert behind[10] == 8 + int(math.log(10 / 8) / math.log(16) * 8) and behind[64] == 14


@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.half, 64512.0), (torch.bfloat16, 3.3895e38), (torch.float32, 3.4028e38)]
)
def test_clamping_stays_below_the_end_of_each_format(dtype, largest):
    x = torch.tensor([-torch.inf, -2.0, 0.5, torch.inf, torch.finfo(dtype).max], dtype=dtype)
    found = limited(x)
    assert found.dtype == dtype and found.isfinite().all() and found[1:3].tolist() == [-2.0, 0.5]
    assert found[3] == found[4] == -found[0] and float(found[3]) == pytest.approx(largest, rel=1e-4)
    assert MARGIN == 1000


def test_clamping_rescues_the_sum_from_a_layer_that_overflows():
    words = torch.arange(6)[None]
    plain, clamped = encoder(), encoder(clamp=True)
    torch.testing.assert_close(plain(words), clamped(words), rtol=0, atol=0)
    for model in (plain, clamped):
        model.half()
        with torch.no_grad():
            model.blocks[0].feed.narrow.weight.fill_(60000.0)
    assert not plain(words).isfinite().all()
    assert clamped(words).isfinite().all()


def test_the_sum_is_what_no_norm_touches():
    """Twice as much from a layer moves the sum, and the last norm alone takes its size away."""
    model = encoder(layers=1)
    words = torch.randint(50, (2, 5))
    sums = []
    model.norm.register_forward_pre_hook(lambda module, inputs: sums.append(inputs[0]))
    before = model(words)
    with torch.no_grad():
        model.blocks[0].feed.narrow.weight.mul_(1e6)
    after = model(words)
    assert sums[1].abs().max() > 1e4 * sums[0].abs().max() and after.abs().max() < 10 * before.abs().max()
    assert F.rms_norm(sums[1], (8,), eps=1e-6).allclose(after)


def test_clamping_rescues_attention_from_scores_that_overflow():
    words = torch.randint(50, (3, 7))
    for clamp in (False, True):
        torch.manual_seed(0)
        model = T5Encoder(50, 16, 2, heads=2, feed=12, clamp=clamp)
        with torch.no_grad():
            model.blocks[0].attention.query.weight.mul_(1e4)
            model.blocks[0].attention.key.weight.mul_(50)
        with mptrain.Precision.load("fp16").arithmetic("cpu"):
            assert bool(model(words).isfinite().all()) == clamp
        assert model(words).isfinite().all()


def test_none_sees_a_word_behind_it():
    torch.manual_seed(0)
    model = T5Encoder(50, 8, 2, heads=2, feed=12, clamp=False, causal=True).double()
    words = torch.randint(50, (3, 7))
    changed = words.clone()
    changed[:, 4:] = 1
    before, after = model(words), model(changed)
    assert torch.equal(before[:, :4], after[:, :4]) and not torch.equal(before[:, 4:], after[:, 4:])
    torch.testing.assert_close(model(words[:, :5]), before[:, :5])
