import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mptrain.models.deepspeech import DeepSpeech2, MaskedBatchNorm, RowConvolution, conv_length, frame_mask

SMALL = {
    "bins": 20,
    "classes": 9,
    "channels": (3, 4),
    "kernels": ((5, 11), (3, 5)),
    "strides": ((2, 2), (2, 3)),
    "width": 12,
    "ahead": 4,
}


def small(**options) -> DeepSpeech2:
    torch.manual_seed(0)
    network = DeepSpeech2(**SMALL | options)
    for norm in network.modules():
        if isinstance(norm, MaskedBatchNorm):
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
            nn.init.normal_(norm.bias)
    return network


@pytest.mark.parametrize(("width", "classes", "printed"), [(2560, 29, 115e6), (3360, 6000, 215e6)])
def test_the_paper_sizes_have_the_printed_parameter_counts(width, classes, printed):
    with torch.device("meta"):
        network = DeepSpeech2(width=width, classes=classes)
    count = sum(p.numel() for p in network.parameters())
    height = 41  # 161 bins, halved twice, rounded up
    convolutions = 32 * 41 * 11 + 32 * 32 * 21 * 11 + 2 * 2 * 32
    first = 3 * (32 * height * width + width * width + 2 * width)
    others = 2 * 3 * (2 * width * width + 2 * width)
    rest = 3 * 2 * width + 20 * width + (width + 1) * width + (width + 1) * classes
    assert count == convolutions + first + others + rest
    assert count == pytest.approx(printed, rel=0.005)


@given(
    length=st.integers(1, 300),
    kernel=st.sampled_from([1, 3, 5, 7, 11, 41]),
    stride=st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_output_length_is_what_a_real_convolution_gives(length, kernel, stride):
    x = torch.zeros(1, 1, length)
    real = nn.functional.conv1d(x, torch.zeros(1, 1, kernel), stride=stride, padding=kernel // 2).shape[-1]
    assert conv_length(length, kernel, stride) == real
    assert conv_length(torch.tensor([length]), kernel, stride).tolist() == [real]


@pytest.mark.parametrize("length", [1, 2, 3, 10, 11, 12, 57])
def test_output_lengths_of_the_network(length):
    logits, lengths = small().eval()(torch.randn(1, length, 20), torch.tensor([length]))
    assert lengths.tolist() == [logits.shape[1]] == [small().output_lengths(length)]


def test_a_clip_has_the_same_logits_alone_and_padded_in_a_batch():
    network = small().eval()
    lengths = [1, 40, 7, 23, 61]
    clips = [torch.randn(length, 20) for length in lengths]
    batch = torch.full((5, 70, 20), 1e3)  # what stands in the padding must not matter
    for row, clip in enumerate(clips):
        batch[row, : len(clip)] = clip
    together, out = network(batch, torch.tensor(lengths))
    for row, clip in enumerate(clips):
        alone, alone_length = network(clip.unsqueeze(0), torch.tensor([len(clip)]))
        assert out[row] == alone_length[0]
        torch.testing.assert_close(together[row, : out[row]], alone[0], rtol=1e-5, atol=1e-5)


def test_padding_changes_neither_gradients_nor_running_statistics():
    clips = [torch.randn(30, 20), torch.randn(17, 20)]

    def run(frames: int, fill: float) -> tuple[list, list]:
        network = small().train()
        batch = torch.full((2, frames, 20), fill)
        for row, clip in enumerate(clips):
            batch[row, : len(clip)] = clip
        logits, lengths = network(batch, torch.tensor([30, 17]))
        sum(logits[row, : lengths[row]].square().sum() for row in range(2)).backward()
        return [p.grad for p in network.parameters()], list(network.buffers())

    for tight, loose in zip(run(30, 0.0), run(55, 7.0), strict=True):
        for one, other in zip(tight, loose, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_masked_batch_norm_is_batch_norm_where_nothing_is_masked():
    x = torch.randn(3, 4, 5, 7) * 3 + 1
    ours, reference = MaskedBatchNorm(4), nn.BatchNorm2d(4)
    for _ in range(2):
        torch.testing.assert_close(ours(x, torch.ones(3, 7, dtype=torch.bool)), reference(x), rtol=1e-5, atol=1e-5)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)
    torch.testing.assert_close(
        ours.eval()(x, torch.ones(3, 7, dtype=torch.bool)), reference.eval()(x), rtol=1e-5, atol=1e-5
    )


def test_masked_batch_norm_counts_real_frames_only():
    x = torch.tensor([[[1.0, 3.0, 99.0]], [[5.0, 77.0, 88.0]]])
    norm = MaskedBatchNorm(1)
    y = norm(x, frame_mask(torch.tensor([2, 1]), 3))
    deviation = (8 / 3 + norm.eps) ** 0.5  # of 1, 3 and 5 around 3
    torch.testing.assert_close(y, torch.tensor([[[-2 / deviation, 0.0, 0.0]], [[2 / deviation, 0.0, 0.0]]]))
    torch.testing.assert_close(norm.running_mean, torch.tensor([0.3]))
    torch.testing.assert_close(norm.running_var, torch.tensor([0.9 + 0.1 * 4.0]))  # unbiased: 8 / 2


def test_row_convolution_weighs_present_and_coming_frames_of_its_own_cell():
    row = RowConvolution(2, ahead=2)
    with torch.no_grad():
        row.conv.weight.copy_(torch.tensor([[[1.0, 10.0, 100.0]], [[2.0, 0.0, 0.0]]]))
    y = row(torch.tensor([[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]]))
    torch.testing.assert_close(y, torch.tensor([[[321.0, 32.0, 3.0], [8.0, 10.0, 12.0]]]))


def test_even_kernels_are_refused():
    with pytest.raises(ValueError, match="even"):
        small(kernels=((4, 11), (3, 5)))
