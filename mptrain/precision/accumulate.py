"""Dot products accumulated in FP16: the ablation of section 3.3 of Mixed Precision Training.

Tensor cores can keep the running sum in FP16 as well as in FP32. The paper reports that some networks then miss their
FP32 accuracy. Here the sum is rounded to FP16 after every `chunk` products, which are added in FP32, in the forward
product and in both products of the backward pass; each operation that is a sum of products is brought to that one
form: convolutions by unfolding their windows, recurrent layers step by step, attention by its two products. A sum
stagnates once it is 2,048 times larger than what a chunk adds.

All tensors come in as FP32 images of FP16 values.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 2**24
"""Elements of partial sums held at a time."""


def run(operation: Any, args: Sequence, kwargs: dict, chunk: int) -> Any:
    """The result of an ATen operation whose dot products accumulate in FP16.

    Raises NotImplementedError for an operation that has no such form here (packed recurrent sequences).
    """
    name = operation._schema.name.partition("::")[2]
    bound = _bind(operation, args, kwargs)
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu") and "batch_sizes" in bound:
        raise NotImplementedError(f"{name} on packed sequences cannot accumulate in FP16; pass a padded tensor instead")
    if (form := _FORMS.get(name)) is None:
        raise NotImplementedError(f"{name} cannot accumulate in FP16; name it in precision.keep_fp32")
    return form(lambda a, b: matmul(a, b, chunk), bound)


def _bind(operation: Any, args: Sequence, kwargs: dict) -> dict[str, Any]:
    schema = operation._schema.arguments
    bound = {a.name: a.default_value for a in schema if a.has_default_value()}
    return bound | {a.name: value for a, value in zip(schema, args, strict=False)} | kwargs


def matmul(a: Tensor, b: Tensor, chunk: int) -> Tensor:
    """`torch.matmul` with an FP16 running sum."""
    if a.dim() == 1 or b.dim() == 1:
        result = matmul(a[None] if a.dim() == 1 else a, b[:, None] if b.dim() == 1 else b, chunk)
        result = result.squeeze(-1) if b.dim() == 1 else result
        return result.squeeze(-1 if b.dim() == 1 else -2) if a.dim() == 1 else result
    if b.dim() == 2:
        return _Dot.apply(a.reshape(1, -1, a.shape[-1]), b[None], chunk).reshape(*a.shape[:-1], b.shape[-1])
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a = a.expand(*batch, *a.shape[-2:]).reshape(-1, *a.shape[-2:])
    b = b.expand(*batch, *b.shape[-2:]).reshape(-1, *b.shape[-2:])
    return _Dot.apply(a, b, chunk).reshape(*batch, a.shape[-2], b.shape[-1])


class _Dot(torch.autograd.Function):
    """[B, M, K] x [B, K, N], forward and backward."""

    @staticmethod
    def forward(ctx, a, b, chunk):
        ctx.save_for_backward(a, b)
        ctx.chunk = chunk
        return dot(a, b, chunk)

    @staticmethod
    def backward(ctx, gradient):
        a, b = ctx.saved_tensors
        return dot(gradient, b.mT, ctx.chunk), dot(a.mT, gradient, ctx.chunk), None


def dot(a: Tensor, b: Tensor, chunk: int) -> Tensor:
    """[B, M, K] x [B, K, N] with the sum rounded to FP16 after every `chunk` products."""
    batch, rows, terms = a.shape
    columns = b.shape[-1]
    pad = -terms % chunk
    a, b = F.pad(a, (0, pad)), F.pad(b, (0, 0, 0, pad))
    a = a.reshape(batch, rows, -1, chunk).permute(0, 2, 1, 3)
    b = b.reshape(batch, -1, chunk, columns)
    total = a.new_zeros(batch, rows, columns)
    step = max(1, BLOCK // max(1, total.numel()))
    for start in range(0, a.shape[1], step):
        partial = a[:, start : start + step] @ b[:, start : start + step]
        for i in range(partial.shape[1]):
            total = (total + partial[:, i]).half().float()
    return total


Dot = Callable[[Tensor, Tensor], Tensor]


def _linear(dot: Dot, a: dict) -> Tensor:
    result = dot(a["input"], a["weight"].mT if a["weight"].dim() > 1 else a["weight"])
    return result if a["bias"] is None else result + a["bias"]


def _add_product(left: str, right: str) -> Callable[[Dot, dict], Tensor]:
    def form(dot: Dot, a: dict) -> Tensor:
        product = dot(a[left], a[right])
        if left == "batch1" and a["self"].dim() == 2 and product.dim() == 3:
            product = product.sum(0)
        return a["beta"] * a["self"] + a["alpha"] * product

    return form


def _windows(x: Tensor, size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """[N, C, *space] -> [N, *out, C * prod(size)]."""
    n = len(size)
    for i in range(n):
        x = x.unfold(2 + i, dilation[i] * (size[i] - 1) + 1, stride[i])[..., :: dilation[i]]
    return x.permute(0, *range(2, 2 + n), 1, *range(2 + n, 2 + 2 * n)).flatten(1 + n)


def _convolve(dot: Dot, x: Tensor, w: Tensor, stride, pads: Sequence[int], dilation, groups: int) -> Tensor:
    """`pads` as F.pad wants them."""
    x = F.pad(x, list(pads))
    parts = []
    for x_part, w_part in zip(x.chunk(groups, 1), w.chunk(groups, 0), strict=True):
        columns = _windows(x_part, w.shape[2:], stride, dilation)
        parts.append(dot(columns, w_part.flatten(1).mT).movedim(-1, 1))
    return torch.cat(parts, 1) if groups > 1 else parts[0]


def _spread(value: Any, n: int) -> list[int]:
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * n if len(values) == 1 else values


def _convolution(dot: Dot, a: dict) -> Tensor:
    x, w, bias = a["input"], a["weight"], a["bias"]
    n = w.dim() - 2
    unbatched = x.dim() == n + 1
    x = x[None] if unbatched else x
    stride, dilation = _spread(a["stride"], n), _spread(a["dilation"], n)
    if isinstance(a["padding"], str):
        total = [d * (k - 1) if a["padding"] == "same" else 0 for d, k in zip(dilation, w.shape[2:], strict=True)]
        sides = [(t // 2, t - t // 2) for t in total]
    else:
        sides = [(p, p) for p in _spread(a["padding"], n)]
    if a.get("transposed", "output_padding" in a and "transposed" not in a):
        x, w = _zeros_between(x, stride), _transposed_weight(w, a["groups"])
        extra = _spread(a["output_padding"], n)
        reach = [d * (k - 1) for d, k in zip(dilation, w.shape[2:], strict=True)]
        sides = [(r - p, r - p + e) for r, (p, _), e in zip(reach, sides, extra, strict=True)]
        stride = [1] * n
    pads = [side for pair in reversed(sides) for side in pair]
    result = _convolve(dot, x, w, stride, pads, dilation, a["groups"])
    result = result if bias is None else result + bias.view(-1, *[1] * n)
    return result[0] if unbatched else result


def _zeros_between(x: Tensor, stride: Sequence[int]) -> Tensor:
    """A transposed convolution is a convolution over its input spread out by its stride."""
    for i, s in enumerate(stride):
        if s > 1:
            x = F.pad(x.unsqueeze(3 + i), [0, 0] * (x.dim() - 3 - i) + [0, s - 1]).flatten(2 + i, 3 + i)
            x = x.narrow(2 + i, 0, x.shape[2 + i] - (s - 1))
    return x


def _transposed_weight(w: Tensor, groups: int) -> Tensor:
    """[in, out / groups, *k] -> [out, in / groups, *k], flipped in space."""
    parts = [part.transpose(0, 1) for part in w.chunk(groups, 0)]
    return torch.cat(parts, 0).flip(list(range(2, w.dim())))


def _attention(dot: Dot, a: dict) -> Tensor:
    q, k, v = a["query"], a["key"], a["value"]
    if a["enable_gqa"]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    scores = dot(q, k.mT) * (1 / math.sqrt(q.shape[-1]) if a["scale"] is None else a["scale"])
    mask = a["attn_mask"]
    if a["is_causal"]:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = F.dropout(torch.nan_to_num(scores.softmax(-1)), a["dropout_p"])
    return dot(weights.half().float(), v)


def _conv_tbc(dot: Dot, a: dict) -> Tensor:
    x, w = a["self"].permute(1, 2, 0), a["weight"].permute(2, 1, 0)
    result = _convolve(dot, x, w, [1], [a["pad"], a["pad"]], [1], 1)
    return result.permute(2, 0, 1) + a["bias"]


def _cell(kind: str, dot: Dot, x: Tensor, state: tuple[Tensor, ...], w: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """One step of a recurrent layer; `w` is weight_ih, weight_hh, bias_ih, bias_hh (and a projection)."""
    w_ih, w_hh, b_ih, b_hh, *projection = (*w, None, None)[: max(4, len(w))]
    assert w_ih is not None and w_hh is not None
    left, right = dot(x, w_ih.mT), dot(state[0], w_hh.mT)
    left = left if b_ih is None else left + b_ih
    right = right if b_hh is None else right + b_hh
    if kind == "lstm":
        i, f, g, o = (left + right).chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return (dot(h, projection[0].mT) if projection and projection[0] is not None else h), c
    if kind == "gru":
        (r, z, n), (hr, hz, hn) = left.chunk(3, -1), right.chunk(3, -1)
        r, z = (r + hr).sigmoid(), (z + hz).sigmoid()
        n = (n + r * hn).tanh()
        return ((1 - z) * n + z * state[0],)
    return ((left + right).tanh() if kind == "rnn_tanh" else (left + right).relu(),)


def _recurrent(kind: str) -> Callable[[Dot, dict], tuple[Tensor, ...]]:
    def form(dot: Dot, a: dict) -> tuple[Tensor, ...]:
        x = a["input"].transpose(0, 1) if a["batch_first"] else a["input"]
        start = a["hx"] if kind == "lstm" else [a["hx"]]
        directions = 2 if a["bidirectional"] else 1
        per_layer = len(a["params"]) // (a["num_layers"] * directions)
        ends = []
        for layer in range(a["num_layers"]):
            outputs = []
            for direction in range(directions):
                number = layer * directions + direction
                weights = list(a["params"][number * per_layer : (number + 1) * per_layer])
                if not a["has_biases"]:
                    weights[2:2] = [None, None]
                state = tuple(s[number] for s in start)
                steps = []
                for t in range(x.shape[0]) if direction == 0 else reversed(range(x.shape[0])):
                    state = _cell(kind, dot, x[t], state, weights)
                    steps.append(state[0])
                outputs.append(torch.stack(steps if direction == 0 else steps[::-1]))
                ends.append(state)
            x = torch.cat(outputs, -1)
            if a["dropout"] and a["train"] and layer < a["num_layers"] - 1:
                x = F.dropout(x, a["dropout"])
        x = x.transpose(0, 1) if a["batch_first"] else x
        return (x, *(torch.stack(parts) for parts in zip(*ends, strict=True)))

    return form


def _single_cell(kind: str) -> Callable[[Dot, dict], Any]:
    def form(dot: Dot, a: dict) -> Any:
        state = tuple(a["hx"]) if kind == "lstm" else (a["hx"],)
        result = _cell(kind, dot, a["input"], state, [a["w_ih"], a["w_hh"], a["b_ih"], a["b_hh"]])
        return result if kind == "lstm" else result[0]

    return form


def _vecdot(dot: Dot, a: dict) -> Tensor:
    x, y = a["x"].movedim(a["dim"], -1), a["y"].movedim(a["dim"], -1)
    return dot(x[..., None, :], y[..., None])[..., 0, 0]


def _product(left: str, right: str) -> Callable[[Dot, dict], Tensor]:
    return lambda dot, a: dot(a[left], a[right])


_FORMS: dict[str, Callable[[Dot, dict], Any]] = {
    "mm": _product("self", "mat2"),
    "bmm": _product("self", "mat2"),
    "matmul": _product("self", "other"),
    "mv": _product("self", "vec"),
    "dot": _product("self", "tensor"),
    "vdot": _product("self", "other"),
    "linear": _linear,
    "addmm": _add_product("mat1", "mat2"),
    "addmv": _add_product("mat", "vec"),
    "addbmm": _add_product("batch1", "batch2"),
    "baddbmm": _add_product("batch1", "batch2"),
    "addr": lambda dot, a: a["beta"] * a["self"] + a["alpha"] * torch.outer(a["vec1"], a["vec2"]),
    "prelu": lambda dot, a: F.prelu(a["self"], a["weight"]),
    "linalg_vecdot": _vecdot,
    "scaled_dot_product_attention": _attention,
    "conv_tbc": _conv_tbc,
    **dict.fromkeys(["conv1d", "conv2d", "conv3d", "convolution", "_convolution"], _convolution),
    **dict.fromkeys(["conv_transpose1d", "conv_transpose2d", "conv_transpose3d"], _convolution),
    **{kind: _recurrent(kind) for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    **{f"{kind}_cell": _single_cell(kind) for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}  # fmt: skip
