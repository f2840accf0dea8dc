"""FP16 accumulation against plain loops.

Operands are small integers where several products share a chunk, so that their FP32 sums are exact in any order, and
the running sums are large enough to be rounded.
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from mptrain.precision.modes import Precision


def region(chunk):
    return Precision.load("fp16_acc16", chunk=chunk).arithmetic()


def integers(*size, high=40):
    return torch.randint(-high, high + 1, size).float().requires_grad_()


def total(terms, chunk):
    """The running sum of a list of products, rounded to half after each chunk."""
    sum_ = torch.tensor(0.0)
    for start in range(0, len(terms), chunk):
        sum_ = (sum_ + torch.tensor(math.fsum(terms[start : start + chunk]), dtype=torch.float32)).half().float()
    return sum_.item()


def plain_mm(a, b, chunk):
    return torch.tensor([
        [total([x * y for x, y in zip(row, column, strict=True)], chunk) for column in b.t().tolist()]
        for row in a.tolist()
    ])  # fmt: skip


def backward(y):
    gradient = torch.randint(-40, 41, y.shape).half()
    y.backward(gradient)
    return gradient.float()


@pytest.mark.parametrize("chunk", [1, 3, 4, 16])
def test_products_equal_a_plain_loop(chunk):
    torch.manual_seed(chunk)
    a, b = integers(3, 37), integers(37, 4)
    with region(chunk):
        y = torch.mm(a, b)
    g = backward(y)
    assert torch.equal(y.float(), plain_mm(a.detach(), b.detach(), chunk))
    assert not torch.equal(y.float(), (a.detach() @ b.detach()).half().float())
    assert torch.equal(a.grad, plain_mm(g, b.detach().t(), chunk))
    assert torch.equal(b.grad, plain_mm(a.detach().t(), g, chunk))


def test_linear_adds_its_bias_once():
    torch.manual_seed(0)
    x, w, b = integers(2, 3, 37), integers(4, 37), integers(4, high=1000)
    with region(4):
        y = F.linear(x, w, b)
    g = backward(y)
    flat, g_flat = x.detach().reshape(6, 37), g.reshape(6, 4)
    assert torch.equal(y.float(), (plain_mm(flat, w.detach().t(), 4) + b).reshape(2, 3, 4).half().float())
    assert torch.equal(x.grad.reshape(6, 37), plain_mm(g_flat, w.detach(), 4))
    assert torch.equal(w.grad, plain_mm(g_flat.t(), flat, 4))
    assert torch.equal(b.grad, g_flat.sum(0))


def test_batched_and_added_products():
    torch.manual_seed(0)
    a, b, c = integers(3, 4, 21), integers(3, 21, 5), integers(4, 5)
    each = torch.stack([plain_mm(x.detach(), y.detach(), 4) for x, y in zip(a, b, strict=True)])
    with region(4):
        assert torch.equal(torch.bmm(a, b).float(), each)
        assert torch.equal(a @ b, torch.bmm(a, b))
        assert torch.equal(torch.baddbmm(c, a, b, beta=2).float(), (2 * c + each).half().float())
        assert torch.equal((a[0] @ b)[2].float(), plain_mm(a[0].detach(), b[2].detach(), 4))
        assert torch.equal((a @ b[0])[2].float(), plain_mm(a[2].detach(), b[0].detach(), 4))
        assert torch.equal((a[0] @ b[0, :, 0]).float(), plain_mm(a[0].detach(), b[0, :, :1].detach(), 4)[:, 0])
        assert torch.equal(torch.addmm(c, a[0], b[0]).float(), (c + each[0]).half().float())
        long = plain_mm(a.detach().transpose(0, 1).reshape(4, 63), b.detach().reshape(63, 5), 4)
        assert torch.equal(torch.addbmm(c, a, b).float(), (c + long).half().float())
        assert torch.equal(torch.dot(a[0, 0].half(), b[0, :, 0].half()).float(), each[0, 0, 0])
        assert torch.bmm(a[:0], b[:0]).shape == (0, 4, 5) and torch.mm(a[0, :, :0], b[0, :0]).abs().sum() == 0


def plain_convolution(x, w, stride, padding, dilation, groups, chunk, transposed=False, extra=0):
    """Terms channel by channel, then position by position; zeros of the padding and of the stride are terms."""
    if transposed:
        spread = torch.zeros(*x.shape[:2], *((s - 1) * stride + 1 for s in x.shape[2:]))
        spread[:, :, ::stride, ::stride] = x
        per = w.shape[0] // groups
        w = torch.cat([w[g * per : (g + 1) * per].transpose(0, 1) for g in range(groups)]).flip((2, 3))
        reach = [dilation * (k - 1) for k in w.shape[2:]]
        across, down = reach[1] - padding, reach[0] - padding
        x = F.pad(spread, [across, across + extra, down, down + extra])
        stride = 1
    else:
        x = F.pad(x, [padding] * 4)
    out_channels, in_channels, kh, kw = w.shape
    height = (x.shape[2] - dilation * (kh - 1) - 1) // stride + 1
    width = (x.shape[3] - dilation * (kw - 1) - 1) // stride + 1
    y = torch.zeros(x.shape[0], out_channels, height, width)
    for n, o, i, j in itertools.product(range(x.shape[0]), range(out_channels), range(height), range(width)):
        first = o // (out_channels // groups) * in_channels
        part = x[n, first : first + in_channels, i * stride :: dilation, j * stride :: dilation][:, :kh, :kw]
        y[n, o, i, j] = total((part * w[o]).flatten().tolist(), chunk)
    return y


def plain_weight_gradient(x, g, w, stride, padding, dilation, groups, chunk):
    x = F.pad(x, [padding] * 4)
    height, width = g.shape[2:]
    result = torch.zeros_like(w)
    for o, c, i, j in itertools.product(*map(range, w.shape)):
        channel = o // (w.shape[0] // groups) * w.shape[1] + c
        part = x[:, channel, i * dilation :: stride, j * dilation :: stride][:, :height, :width]
        result[o, c, i, j] = total((part * g[:, o]).flatten().tolist(), chunk)
    return result


GEOMETRIES = [(1, 0, 1, 1), (2, 1, 1, 1), (1, 2, 2, 1), (2, 1, 1, 2), (3, 2, 2, 2), (1, 1, 1, 4)]


@pytest.mark.parametrize("stride, padding, dilation, groups", GEOMETRIES)
def test_convolution_equals_a_plain_loop(stride, padding, dilation, groups):
    torch.manual_seed(0)
    x, w, b = integers(2, 4, 7, 6), integers(4, 4 // groups, 3, 2), integers(4)
    with region(4):
        y = F.conv2d(x, w, b, stride, padding, dilation, groups)
    g = backward(y)
    geometry = (stride, padding, dilation, groups, 4)
    expected = plain_convolution(x.detach(), w.detach(), *geometry) + b.view(-1, 1, 1)
    assert torch.equal(y.float(), expected.half().float())
    # the input's gradient is the transposed convolution; `extra` rows were never reached by the stride
    full = plain_convolution(F.pad(g, [0, 1, 0, 1]), w.detach(), *geometry, transposed=True)
    assert torch.equal(x.grad, full[:, :, :7, :6])
    assert torch.equal(w.grad, plain_weight_gradient(x.detach(), g, w.detach(), *geometry))
    assert torch.equal(b.grad, g.sum((0, 2, 3)).half().float())


@pytest.mark.parametrize("stride, padding, dilation, groups", GEOMETRIES)
def test_transposed_convolution_equals_a_plain_loop(stride, padding, dilation, groups):
    torch.manual_seed(0)
    extra = stride - 1
    x, w = integers(2, 4, 4, 3), integers(4, 4 // groups, 3, 4)
    with region(4):
        y = F.conv_transpose2d(x, w, None, stride, padding, extra, groups, dilation)
    g = backward(y)
    geometry = (stride, padding, dilation, groups, 4)
    expected = plain_convolution(x.detach(), w.detach(), *geometry, transposed=True, extra=extra)
    assert torch.equal(y.float(), expected)
    assert torch.equal(x.grad, plain_convolution(g, w.detach(), *geometry))
    assert torch.equal(w.grad, plain_weight_gradient(g, x.detach(), w.detach(), *geometry))


SHAPES = {
    "conv1d": (lambda x, w: F.conv1d(x, w, padding=1), (2, 4, 9), (6, 4, 3)),
    "conv1d same": (lambda x, w: F.conv1d(x, w, padding="same"), (2, 4, 9), (6, 4, 3)),
    "conv2d unbatched": (F.conv2d, (4, 6, 7), (6, 4, 3, 2)),
    "conv3d": (lambda x, w: F.conv3d(x, w, stride=2, padding=1), (2, 2, 5, 4, 3), (3, 2, 3, 3, 3)),
    "conv_transpose1d": (lambda x, w: F.conv_transpose1d(x, w, stride=2), (2, 4, 5), (4, 3, 3)),
    "conv_transpose2d padded beyond its stride": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=2, dilation=3),
        (2, 3, 4, 3), (3, 2, 2, 3),
    ),
    "conv_transpose3d": (lambda x, w: F.conv_transpose3d(x, w, padding=1), (1, 2, 3, 3, 3), (2, 3, 2, 2, 2)),
    "conv_tbc": (lambda x, w: torch.conv_tbc(x, w, torch.zeros(5), 1), (7, 2, 4), (3, 4, 5)),
    "matmul": (torch.matmul, (2, 1, 3, 37), (4, 37, 5)),
    "bilinear": (lambda x, w: F.bilinear(x.half(), x.half(), w.half()), (3, 4), (5, 4, 4)),
}  # fmt: skip


@pytest.mark.parametrize("case", SHAPES)
def test_one_chunk_rounds_once(case):
    torch.manual_seed(0)
    operation, *sizes = SHAPES[case]
    inputs, others = [[integers(*size, high=9) for size in sizes] for _ in range(2)]
    for t, other in zip(inputs, others, strict=True):
        other.data.copy_(t)
    results = []
    for context, operands in ((region(10**6), inputs), (Precision.load("fp16").arithmetic(), others)):
        torch.manual_seed(1)
        with context:
            y = operation(*operands)
        y.backward(torch.randint(-9, 10, y.shape).half())
        results.append([y.detach(), *(t.grad for t in operands)])
    for ours, once in zip(*results, strict=True):
        assert ours.dtype == once.dtype
        torch.testing.assert_close(ours, once, rtol=2**-9 if case == "bilinear" else 0, atol=0)


class PlainDot(torch.autograd.Function):
    """[M, K] x [K, N], one product at a time."""

    @staticmethod
    def loop(a, b):
        sum_ = torch.zeros(a.shape[0], b.shape[1])
        for k in range(a.shape[1]):
            sum_ = (sum_ + a[:, k : k + 1] * b[k : k + 1]).half().float()
        return sum_

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return PlainDot.loop(a, b)

    @staticmethod
    def backward(ctx, gradient):
        a, b = ctx.saved_tensors
        return PlainDot.loop(gradient, b.t()), PlainDot.loop(a.t(), gradient)


def plain_lstm(x, h, c, w_ih, w_hh, b_ih, b_hh):
    outputs = []
    for step in x:
        gates = PlainDot.apply(step, w_ih.t()) + b_ih + (PlainDot.apply(h, w_hh.t()) + b_hh)
        i, f, g, o = gates.chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h)
    return torch.stack(outputs)


def plain_gru(x, h, w_ih, w_hh, b_ih, b_hh):
    outputs = []
    for step in x:
        r, z, n = (PlainDot.apply(step, w_ih.t()) + b_ih).chunk(3, 1)
        hr, hz, hn = (PlainDot.apply(h, w_hh.t()) + b_hh).chunk(3, 1)
        r, z = torch.sigmoid(r + hr), torch.sigmoid(z + hz)
        h = (1 - z) * torch.tanh(n + r * hn) + z * h
        outputs.append(h)
    return torch.stack(outputs)


def plain_attention(q, k, v):
    weights = (PlainDot.apply(q, k.t()) * (1 / math.sqrt(q.shape[1]))).softmax(-1)
    return PlainDot.apply(weights.half().float(), v)


def lstm(x, h, c, *weights):
    return torch.lstm(x, (h[None], c[None]), weights, True, 1, 0.0, True, False, False)[0]


def gru(x, h, *weights):
    return torch.gru(x, h[None], weights, True, 1, 0.0, True, False, False)[0]


@pytest.mark.parametrize(
    "ours, plain, sizes",
    [
        (lstm, plain_lstm, [(3, 2, 5), (2, 4), (2, 4), (16, 5), (16, 4), (16,), (16,)]),
        (gru, plain_gru, [(3, 2, 5), (2, 4), (12, 5), (12, 4), (12,), (12,)]),
        (F.scaled_dot_product_attention, plain_attention, [(5, 8), (6, 8), (6, 3)]),
    ],
    ids=["lstm", "gru", "attention"],
)
def test_recurrent_layers_and_attention_equal_plain_loops(ours, plain, sizes):
    torch.manual_seed(0)
    inputs = [torch.randn(*size).requires_grad_() for size in sizes]
    with region(1):
        y = ours(*(t[None] for t in inputs) if plain is plain_attention else inputs)
    y = y[0] if plain is plain_attention else y
    images = [t.detach().half().float().requires_grad_() for t in inputs]
    expected = plain(*images)
    assert torch.equal(y, expected.half())
    g = torch.randn_like(expected).half()
    y.backward(g)
    expected.backward(g.float())
    for t, image in zip(inputs, images, strict=True):
        torch.testing.assert_close(t.grad, image.grad.half().float(), rtol=2**-10, atol=1e-7)
    assert torch.equal(inputs[-1].grad, images[-1].grad.half().float())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": True}]
)
def test_recurrent_layers_with_one_chunk_are_nearly_torchs(kind, options):
    torch.manual_seed(0)
    module = kind(4, 5, **options)
    x = torch.randn(6, 3, 4)
    expected, state = module(x)
    with region(1000):
        y, end = module(x)
    torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=3e-3)
    for a, b in zip((end if kind is nn.LSTM else [end]), (state if kind is nn.LSTM else [state]), strict=True):
        torch.testing.assert_close(a.float(), b, rtol=1e-2, atol=3e-3)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("make", [lambda: nn.LSTM(4, 5, 2, bidirectional=True, proj_size=3),
                                  lambda: nn.GRU(4, 5, 2, bidirectional=True), lambda: nn.RNN(4, 5)])  # fmt: skip
def test_packed_sequences_equal_the_sequences_one_by_one(make):
    torch.manual_seed(0)
    module = make()
    lengths = [6, 4, 4, 1]
    x = torch.randn(6, 4, 4)
    with region(4):
        packed, end = module(pack_padded_sequence(x, lengths))
        y, _ = pad_packed_sequence(packed)
        for i, length in enumerate(lengths):
            alone, alone_end = module(x[:length, i : i + 1])
            assert torch.equal(y[:length, i], alone[:, 0])
            for a, b in zip(end if isinstance(end, tuple) else [end],
                            alone_end if isinstance(end, tuple) else [alone_end], strict=True):  # fmt: skip
                assert torch.equal(a[:, i], b[:, 0])


def test_attention_masks():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 5, 8) for _ in range(3))
    mask = torch.rand(5, 5) < 0.5
    mask[2] = False
    added = torch.zeros(5, 5).masked_fill(~mask, -math.inf)
    for options in ({"is_causal": True}, {"attn_mask": mask}, {"attn_mask": added}, {"scale": 0.1}):
        expected = F.scaled_dot_product_attention(q, k, v, **options).nan_to_num()
        with region(1000):
            y = F.scaled_dot_product_attention(q, k, v, **options)
        torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=3e-3)
    with region(4):
        grouped = F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)
        spread = F.scaled_dot_product_attention(q, k[:, [0, 0, 1, 1]], v[:, [0, 0, 1, 1]])
    assert torch.equal(grouped, spread)


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_sums_of_one_sign_stagnate_at_2048_times_a_chunk(chunk):
    ones = torch.ones(1, 2048 * 24)
    with region(chunk):
        y = F.linear(ones, ones)
    assert y.item() == 2048 * chunk
    with Precision.load("fp16").arithmetic():
        assert F.linear(ones, ones).item() == 2048 * 24


def test_what_has_no_form_is_refused():
    from mptrain.precision import accumulate

    with pytest.raises(NotImplementedError, match="keep_fp32"):
        accumulate.run(torch.ops.aten.relu.default, (torch.ones(1),), {}, 4)
