"""DeepSpeech 2 with forward GRU layers and row convolution (Amodei et al. 2016; paper section 4.3).

Two 2-D convolutions over (frequency, time), three forward GRU layers, a row convolution that looks a few frames
ahead, one fully connected layer, and the output for CTC. The paper prints about 115 M parameters for English and 215
M for Mandarin and no widths: 2,560 cells with 29 characters give 115.4 M, 3,360 cells with 6,000 characters give
214.4 M.

Padding never leaks: after every convolution the frames beyond a clip's own length are set back to zero, batch norm
counts real frames only, and a forward GRU cannot see what comes later. The logits of a clip are the same alone and in
a batch.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def frame_mask(lengths: Tensor, frames: int) -> Tensor:
    """True at the real frames: lengths (B,) -> (B, frames)."""
    return torch.arange(frames, device=lengths.device) < lengths.unsqueeze(1)


def conv_length(lengths, kernel: int, stride: int):
    """Frames that leave a convolution padded by kernel // 2 on either side, for int or Tensor lengths."""
    return (lengths + 2 * (kernel // 2) - kernel) // stride + 1


class MaskedBatchNorm(nn.BatchNorm1d):
    """Batch norm of x (B, C, ..., T) over the frames that mask (B, T) marks as real; FP32 inside; others leave as zero.

    With nothing masked it is `nn.BatchNorm`, running statistics included.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float

    total: Callable[[Tensor], Tensor] = staticmethod(lambda x: x)
    """sums over the processes that share a batch"""

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 3:
            raise ValueError(f"expected (batch, channels, ..., time), got {tuple(x.shape)}")

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        self._check_input_dim(x)
        real = mask.reshape(mask.shape[0], *[1] * (x.dim() - 2), mask.shape[1])
        values = x.float()
        shape = (1, -1, *[1] * (x.dim() - 2))
        mean, variance = self.running_mean, self.running_var
        if self.training:
            axes = [axis for axis in range(x.dim()) if axis != 1]
            count = self.total(mask.sum() * (x[0, 0].numel() // x.shape[-1]))
            mean = self.total(values.masked_fill(~real, 0.0).sum(axes)) / count
            centred = (values - mean.view(shape)).masked_fill(~real, 0.0)
            variance = self.total(centred.square().sum(axes)) / count
            self._remember(mean.detach(), variance.detach() * (count / (count - 1).clamp(min=1)))
        gain = self.weight.float() * torch.rsqrt(variance.float() + self.eps)
        y = (values - mean.float().view(shape)) * gain.view(shape) + self.bias.float().view(shape)
        return y.masked_fill(~real, 0.0).type_as(x)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), self.momentum)
        self.num_batches_tracked.add_(1)


class RowConvolution(nn.Module):
    """Each cell's own weighted sum of its present and its next `ahead` frames: x (B, C, T) -> (B, C, T)."""

    def __init__(self, width: int, ahead: int):
        super().__init__()
        self.ahead = ahead
        self.conv = nn.Conv1d(width, width, ahead + 1, groups=width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, self.ahead)))


class DeepSpeech2(nn.Module):
    """Spectrograms (B, T, bins) and their lengths (B,) -> logits (B, T', classes) and their lengths (B,).

    `kernels` and `strides` are (frequency, time) pairs, one a convolution. T' follows from `output_lengths`; frames
    beyond a clip's own T' carry no meaning. Every clip has a frame: looking would make a GPU wait in every step.
    """

    def __init__(
        self,
        bins: int = 161,
        classes: int = 29,
        channels: Sequence[int] = (32, 32),
        kernels: Sequence[Sequence[int]] = ((41, 11), (21, 11)),
        strides: Sequence[Sequence[int]] = ((2, 2), (2, 1)),
        width: int = 2560,
        layers: int = 3,
        ahead: int = 19,
        dropout: float = 0.0,
    ):
        super().__init__()
        if any(size % 2 == 0 for kernel in kernels for size in kernel):
            raise ValueError(f"kernels {kernels} have an even side; odd ones keep frames where they are")
        self.kernels, self.strides = [(k[0], k[1]) for k in kernels], [(s[0], s[1]) for s in strides]
        inputs, height = 1, bins
        self.convs, self.conv_norms = nn.ModuleList(), nn.ModuleList()
        for outputs, kernel, stride in zip(channels, self.kernels, self.strides, strict=True):
            padding = (kernel[0] // 2, kernel[1] // 2)
            self.convs.append(nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False))
            self.conv_norms.append(MaskedBatchNorm(outputs))
            inputs, height = outputs, conv_length(height, kernel[0], stride[0])
        self.grus = nn.ModuleList(
            nn.GRU(width if layer else inputs * height, width, batch_first=True) for layer in range(layers)
        )
        self.gru_norms = nn.ModuleList(MaskedBatchNorm(width) for _ in range(layers))
        self.row = RowConvolution(width, ahead)
        self.hidden = nn.Linear(width, width)
        self.output = nn.Linear(width, classes)
        self.dropout = nn.Dropout(dropout)

    def output_lengths(self, lengths):
        """Frames that come out for so many that go in, for int or Tensor lengths."""
        for kernel, stride in zip(self.kernels, self.strides, strict=True):
            lengths = conv_length(lengths, kernel[1], stride[1])
        return lengths

    def forward(self, spectrogram: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = spectrogram.transpose(1, 2).unsqueeze(1)
        x = x.masked_fill(~frame_mask(lengths, x.shape[-1])[:, None, None], 0.0)
        for conv, norm, kernel, stride in zip(self.convs, self.conv_norms, self.kernels, self.strides, strict=True):
            lengths = conv_length(lengths, kernel[1], stride[1])
            x = conv(x)
            x = F.hardtanh(norm(x, frame_mask(lengths, x.shape[-1])), 0.0, 20.0)
        mask = frame_mask(lengths, x.shape[-1])
        x = x.flatten(1, 2)
        for gru, norm in zip(self.grus, self.gru_norms, strict=True):
            x, _ = gru(self.dropout(x.transpose(1, 2)))
            x = norm(x.transpose(1, 2), mask)
        x = F.relu(self.row(x)).transpose(1, 2)
        x = F.relu(self.hidden(self.dropout(x)))
        return self.output(self.dropout(x)), lengths
