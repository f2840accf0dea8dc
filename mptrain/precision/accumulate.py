"""Dot products accumulated in FP16: the ablation of section 3.3 of Mixed Precision Training.

Tensor cores can keep the running sum in FP16 as well as in FP32. The paper reports that some networks then miss their
FP32 accuracy. Here the sum is rounded to FP16 after every `chunk` products, which are added in FP32, in the forward
product and in both products of the backward pass; each operation that is a sum of products is brought to that one
form: convolutions by unfolding their windows, recurrent layers step by step, attention by its two products. A sum
stagnates once it is 2,048 times larger than what a chunk adds.

The terms of a convolution are taken channel by channel, position by position within the kernel; those of its weight
gradient sample by sample, position by position. Padding, and the zeros that a stride puts between the elements of a
transposed convolution's input, are terms too.

All tensors come in as FP32 images of FP16 values. What lies between the products of a recurrent layer or of attention
stays FP32, except attention's weights, which are rounded before their product.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

BLOCK = 2**24
"""Elements of partial sums held at a time."""


def run(operation: Any, args: Sequence, kwargs: dict, chunk: int) -> Any:
    """The result of an ATen operation whose dot products accumulate in FP16.

    Raises NotImplementedError for an operation that has no such form here.
    """
    name = operation._schema.name.partition("::")[2]
    if (form := _FORMS.get(name)) is None:
        raise NotImplementedError(f"{name} cannot accumulate in FP16; name it in precision.keep_fp32")
    return form(chunk, _bind(operation, args, kwargs))


def _bind(operation: Any, args: Sequence, kwargs: dict) -> dict[str, Any]:
    schema = operation._schema.arguments
    bound = {a.name: a.default_value for a in schema if a.has_default_value()}
    return bound | {a.name: value for a, value in zip(schema, args, strict=False)} | kwargs


def dot(a: Tensor, b: Tensor, chunk: int) -> Tensor:
    """[B, M, K] x [B, K, N] with the sum rounded to FP16 after every `chunk` products."""
    batch, rows, terms = a.shape
    columns = b.shape[-1]
    chunk = min(chunk, max(1, terms))
    chunks = math.ceil(terms / chunk)
    pad = chunks * chunk - terms
    a, b = F.pad(a, (0, pad)), F.pad(b, (0, 0, 0, pad))
    a = a.reshape(batch, rows, chunks, chunk).permute(0, 2, 1, 3)
    b = b.reshape(batch, chunks, chunk, columns)
    total = a.new_zeros(batch, rows, columns)
    step = max(1, BLOCK // max(1, total.numel()))
    for start in range(0, chunks, step):
        for block in (a[:, start : start + step] @ b[:, start : start + step]).unbind(1):
            total = (total + block).half().float()
    return total


class _Dot(Function):
    @staticmethod
    def forward(ctx, a, b, chunk):
        ctx.save_for_backward(a, b)
        ctx.chunk = chunk
        return dot(a, b, chunk)

    @staticmethod
    def backward(ctx, gradient):
        a, b = ctx.saved_tensors
        to_a = dot(gradient, b.mT, ctx.chunk) if ctx.needs_input_grad[0] else None
        to_b = dot(a.mT, gradient, ctx.chunk) if ctx.needs_input_grad[1] else None
        return to_a, to_b, None


def matmul(a: Tensor, b: Tensor, chunk: int) -> Tensor:
    """`torch.matmul` with an FP16 running sum."""
    if a.dim() == 1:
        return matmul(a[None], b, chunk).squeeze(-1 if b.dim() == 1 else -2)
    if b.dim() == 1:
        return matmul(a, b[:, None], chunk).squeeze(-1)
    if b.dim() == 2:
        flat = a.reshape(1, math.prod(a.shape[:-1]), a.shape[-1])
        return _Dot.apply(flat, b[None], chunk).reshape(*a.shape[:-1], b.shape[-1])
    if a.dim() == 2:
        return matmul(b.mT, a.mT, chunk).mT
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    many = math.prod(batch)
    a = a.expand(*batch, *a.shape[-2:]).reshape(many, *a.shape[-2:])
    b = b.expand(*batch, *b.shape[-2:]).reshape(many, *b.shape[-2:])
    return _Dot.apply(a, b, chunk).reshape(*batch, a.shape[-2], b.shape[-1])


# Convolutions: correlation, its transpose, and the product that both have for a weight gradient.


class _Geometry:
    """stride, dilation and padding ((before, after) of every dimension), and the number of groups."""

    def __init__(self, stride: list[int], sides: list[tuple[int, int]], dilation: list[int], groups: int, chunk: int):
        self.stride, self.sides, self.dilation, self.groups, self.chunk = stride, sides, dilation, groups, chunk

    def columns(self, x: Tensor, size: Sequence[int], out: Sequence[int] | None) -> tuple[Tensor, list[int]]:
        """[N, C, *space] -> ([groups, N * prod(out), C / groups * prod(size)], [N, *out]); `out` cuts what is over."""
        n = len(size)
        x = F.pad(x, [side for pair in reversed(self.sides) for side in pair])
        for i in range(n):
            x = x.unfold(2 + i, self.dilation[i] * (size[i] - 1) + 1, self.stride[i])[..., :: self.dilation[i]]
            x = x if out is None else x.narrow(2 + i, 0, out[i])
        places = [x.shape[0], *x.shape[2 : 2 + n]]
        x = x.permute(1, 0, *range(2, 2 + 2 * n)).reshape(
            self.groups, x.shape[1] // self.groups, math.prod(places), math.prod(size)
        )
        return x.transpose(1, 2).reshape(self.groups, math.prod(places), x.shape[1] * x.shape[3]), places

    def correlate(self, x: Tensor, w: Tensor, out: Sequence[int] | None = None) -> Tensor:
        columns, places = self.columns(x, w.shape[2:], out)
        kernels = w.reshape(self.groups, w.shape[0] // self.groups, columns.shape[2])
        result = dot(columns, kernels.mT, self.chunk)
        return result.permute(1, 0, 2).reshape(*places, w.shape[0]).movedim(-1, 1).contiguous()

    def transpose(self, g: Tensor, w: Tensor, space: Sequence[int]) -> Tensor:
        """The gradient of what `correlate` was given, of size `space`, from the gradient of its result."""
        reach = [d * (k - 1) for d, k in zip(self.dilation, w.shape[2:], strict=True)]
        g = _zeros_between(g, self.stride)
        before = [r - side[0] for r, side in zip(reach, self.sides, strict=True)]
        after = [s + r - have - b for s, r, have, b in zip(space, reach, g.shape[2:], before, strict=True)]
        ones = [1] * len(reach)
        same = _Geometry(ones, list(zip(before, after, strict=True)), self.dilation, self.groups, self.chunk)
        return same.correlate(g, _exchanged(w, self.groups))

    def weight(self, x: Tensor, g: Tensor, shape: Sequence[int]) -> Tensor:
        """The gradient of a weight of this shape."""
        columns, places = self.columns(x, shape[2:], g.shape[2:])
        rows = g.movedim(1, -1).reshape(math.prod(places), self.groups, shape[0] // self.groups).transpose(0, 1)
        return dot(columns.mT, rows, self.chunk).mT.reshape(shape)


def _zeros_between(x: Tensor, stride: Sequence[int]) -> Tensor:
    space = [(size - 1) * s + 1 for size, s in zip(x.shape[2:], stride, strict=True)]
    result = x.new_zeros(*x.shape[:2], *space)
    places: Any = (..., *(slice(None, None, s) for s in stride))
    result[places] = x
    return result


def _exchanged(w: Tensor, groups: int) -> Tensor:
    """[out, in / groups, *k] -> [in, out / groups, *k], flipped in space."""
    return torch.cat([part.transpose(0, 1) for part in w.chunk(groups, 0)], 0).flip(list(range(2, w.dim())))


class _Correlate(Function):
    @staticmethod
    def forward(ctx, x, w, geometry):
        ctx.save_for_backward(x, w)
        ctx.geometry = geometry
        return geometry.correlate(x, w)

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        to_x = ctx.geometry.transpose(gradient, w, x.shape[2:]) if ctx.needs_input_grad[0] else None
        to_w = ctx.geometry.weight(x, gradient, w.shape) if ctx.needs_input_grad[1] else None
        return to_x, to_w, None


class _Transpose(Function):
    @staticmethod
    def forward(ctx, x, w, geometry, space):
        ctx.save_for_backward(x, w)
        ctx.geometry = geometry
        return geometry.transpose(x, w, space)

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        to_x = ctx.geometry.correlate(gradient, w, x.shape[2:]) if ctx.needs_input_grad[0] else None
        to_w = ctx.geometry.weight(gradient, x, w.shape) if ctx.needs_input_grad[1] else None
        return to_x, to_w, None, None


def _spread(value: Any, n: int) -> list[int]:
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * n if len(values) == 1 else values


def _convolution(chunk: int, a: dict) -> Tensor:
    x, w, bias = a["input"], a["weight"], a["bias"]
    n = w.dim() - 2
    unbatched = x.dim() == n + 1
    x = x[None] if unbatched else x
    stride, dilation = _spread(a["stride"], n), _spread(a["dilation"], n)
    reach = [d * (k - 1) for d, k in zip(dilation, w.shape[2:], strict=True)]
    if isinstance(a["padding"], str):
        total = [r if a["padding"] == "same" else 0 for r in reach]
        sides = [(t // 2, t - t // 2) for t in total]
    else:
        sides = [(p, p) for p in _spread(a["padding"], n)]
    geometry = _Geometry(stride, sides, dilation, a["groups"], chunk)
    if a.get("transposed", "output_padding" in a and "transposed" not in a):
        extra = _spread(a["output_padding"], n)
        space = [
            (size - 1) * s + r + 1 - b - c + e
            for size, s, r, (b, c), e in zip(x.shape[2:], stride, reach, sides, extra, strict=True)
        ]
        result = _Transpose.apply(x, w, geometry, space)
    else:
        result = _Correlate.apply(x, w, geometry)
    result = result if bias is None else result + bias.view(-1, *[1] * n)
    return result[0] if unbatched else result


def _conv_tbc(chunk: int, a: dict) -> Tensor:
    geometry = _Geometry([1], [(a["pad"], a["pad"])], [1], 1, chunk)
    result = _Correlate.apply(a["self"].permute(1, 2, 0), a["weight"].permute(2, 1, 0), geometry)
    return result.permute(2, 0, 1) + a["bias"]


# Products.


def _linear(chunk: int, a: dict) -> Tensor:
    result = matmul(a["input"], a["weight"].mT if a["weight"].dim() > 1 else a["weight"], chunk)
    return result if a["bias"] is None else result + a["bias"]


def _add_product(left: str, right: str) -> Callable[[int, dict], Tensor]:
    return lambda chunk, a: a["beta"] * a["self"] + a["alpha"] * matmul(a[left], a[right], chunk)


def _addbmm(chunk: int, a: dict) -> Tensor:
    left, right = a["batch1"].transpose(0, 1).flatten(1), a["batch2"].flatten(0, 1)
    return a["beta"] * a["self"] + a["alpha"] * matmul(left, right, chunk)


def _vecdot(chunk: int, a: dict) -> Tensor:
    x, y = a["x"].movedim(a["dim"], -1), a["y"].movedim(a["dim"], -1)
    return matmul(x[..., None, :], y[..., None], chunk)[..., 0, 0]


def _bilinear(chunk: int, a: dict) -> Tensor:
    w = a["weight"]
    left = matmul(a["input1"], w.transpose(0, 1).flatten(1), chunk).unflatten(-1, (w.shape[0], w.shape[2]))
    result = matmul(left, a["input2"][..., None], chunk)[..., 0]
    return result if a["bias"] is None else result + a["bias"]


def _attention(chunk: int, a: dict) -> Tensor:
    q, k, v = a["query"], a["key"], a["value"]
    if a["enable_gqa"]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    scores = matmul(q, k.mT, chunk) * (1 / math.sqrt(q.shape[-1]) if a["scale"] is None else a["scale"])
    mask = a["attn_mask"]
    if a["is_causal"]:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    no_key = (scores == -math.inf).all(-1, keepdim=True)
    weights = F.dropout(scores.masked_fill(no_key, 0).softmax(-1).masked_fill(no_key, 0), a["dropout_p"])
    return matmul(weights.half().float(), v, chunk)


# Recurrent layers.


State = tuple[Tensor, ...]


def _cell(kind: str, chunk: int, x: Tensor, state: State, w: Sequence[Tensor | None]) -> State:
    """One step of a recurrent layer; `w` is weight_ih, weight_hh, bias_ih, bias_hh (and a projection)."""
    w_ih, w_hh, b_ih, b_hh, *projection = w
    assert w_ih is not None and w_hh is not None
    left, right = matmul(x, w_ih.mT, chunk), matmul(state[0], w_hh.mT, chunk)
    left = left if b_ih is None else left + b_ih
    right = right if b_hh is None else right + b_hh
    if kind == "lstm":
        i, f, g, o = (left + right).chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return (matmul(h, projection[0].mT, chunk) if projection and projection[0] is not None else h), c
    if kind == "gru":
        (r, z, n), (hr, hz, hn) = left.chunk(3, -1), right.chunk(3, -1)
        r, z = (r + hr).sigmoid(), (z + hz).sigmoid()
        n = (n + r * hn).tanh()
        return ((1 - z) * n + z * state[0],)
    return ((left + right).tanh() if kind == "rnn_tanh" else (left + right).relu(),)


def _scan(step: Callable[[Tensor, State], State], inputs: Sequence[Tensor], state: State, backwards: bool):
    """Runs a layer over time. Inputs of packed sequences get shorter; a sequence's state stays where it ended."""
    outputs = []
    if not backwards:
        ended: list[State] = []
        for x in inputs:
            if len(x) < len(state[0]):
                ended.insert(0, tuple(s[len(x) :] for s in state))
                state = tuple(s[: len(x)] for s in state)
            state = step(x, state)
            outputs.append(state[0])
        return outputs, tuple(torch.cat(parts) for parts in zip(state, *ended, strict=True))
    start, state = state, tuple(s[: len(inputs[-1])] for s in state)
    for x in reversed(inputs):
        have = len(state[0])
        state = tuple(torch.cat([s, s0[have : len(x)]]) for s, s0 in zip(state, start, strict=True))
        state = step(x, state)
        outputs.insert(0, state[0])
    return outputs, state


def _recurrent(kind: str) -> Callable[[int, dict], tuple[Tensor, ...]]:
    def form(chunk: int, a: dict) -> tuple[Tensor, ...]:
        packed = "batch_sizes" in a
        if packed:
            inputs = a["data"].split(a["batch_sizes"].tolist())
        else:
            inputs = a["input"].unbind(1 if a["batch_first"] else 0)
        start = a["hx"] if kind == "lstm" else [a["hx"]]
        directions = 2 if a["bidirectional"] else 1
        per_layer = len(a["params"]) // (a["num_layers"] * directions)
        ends = []
        for layer in range(a["num_layers"]):
            both = []
            for direction in range(directions):
                number = layer * directions + direction
                weights = list(a["params"][number * per_layer : (number + 1) * per_layer])
                if not a["has_biases"]:
                    weights[2:2] = [None, None]
                state = tuple(s[number] for s in start)
                outputs, state = _scan(partial(_cell, kind, chunk, w=weights), inputs, state, direction == 1)
                both.append(outputs)
                ends.append(state)
            inputs = [torch.cat(parts, -1) for parts in zip(*both, strict=True)]
            if a["dropout"] and a["train"] and layer < a["num_layers"] - 1:
                inputs = [F.dropout(x, a["dropout"]) for x in inputs]
        result = torch.cat(inputs) if packed else torch.stack(inputs, 1 if a["batch_first"] else 0)
        return (result, *(torch.stack(parts) for parts in zip(*ends, strict=True)))

    return form


def _single_cell(kind: str) -> Callable[[int, dict], Any]:
    def form(chunk: int, a: dict) -> Any:
        state = tuple(a["hx"]) if kind == "lstm" else (a["hx"],)
        result = _cell(kind, chunk, a["input"], state, [a["w_ih"], a["w_hh"], a["b_ih"], a["b_hh"]])
        return result if kind == "lstm" else result[0]

    return form


def _product(left: str, right: str) -> Callable[[int, dict], Tensor]:
    return lambda chunk, a: matmul(a[left], a[right], chunk)


_FORMS: dict[str, Callable[[int, dict], Any]] = {
    "mm": _product("self", "mat2"),
    "bmm": _product("self", "mat2"),
    "matmul": _product("self", "other"),
    "mv": _product("self", "vec"),
    "dot": _product("self", "tensor"),
    "vdot": _product("self", "other"),
    "linear": _linear,
    "addmm": _add_product("mat1", "mat2"),
    "addmv": _add_product("mat", "vec"),
    "addbmm": _addbmm,
    "baddbmm": _add_product("batch1", "batch2"),
    "addr": lambda chunk, a: a["beta"] * a["self"] + a["alpha"] * torch.outer(a["vec1"], a["vec2"]),
    "prelu": lambda chunk, a: F.prelu(a["self"], a["weight"]),
    "linalg_vecdot": _vecdot,
    "bilinear": _bilinear,
    "scaled_dot_product_attention": _attention,
    "conv_tbc": _conv_tbc,
    **dict.fromkeys(["conv1d", "conv2d", "conv3d", "convolution", "_convolution"], _convolution),
    **dict.fromkeys(["conv_transpose1d", "conv_transpose2d", "conv_transpose3d"], _convolution),
    **{kind: _recurrent(kind) for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    **{f"{kind}_cell": _single_cell(kind) for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}  # fmt: skip
