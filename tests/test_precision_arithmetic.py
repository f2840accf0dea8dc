"""Every product equals the FP32 result rounded once, forward and backward, bit for bit."""

import copy
import importlib
import subprocess
import sys
import tempfile
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from mptrain.precision import hardware
from mptrain.precision.formats import round_tf32
from mptrain.precision.modes import Precision

DTYPE = {"fp16": torch.float16, "bf16": torch.bfloat16}


def arithmetic(name="fp16", **changes):
    if name == "bf16":
        changes["kernels"] = "emulated"
    return Precision.load(name, **changes).arithmetic()


def randn(*size, grad=True):
    return torch.randn(*size).requires_grad_(grad)


def flat(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in flat(item)] if isinstance(value, (tuple, list)) else []


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def gradients_like(outputs):
    return [torch.randn(o.shape).to(o.dtype) for o in outputs]


def check(operation, *inputs, name="fp16"):
    """Inputs are FP32 leaves; compares with the FP32 operation on rounded inputs, its results and gradients rounded."""
    dtype = DTYPE[name]
    with arithmetic(name):
        outputs = [o for o in flat(operation(*inputs)) if o.is_floating_point()]
    images = [t.detach().to(dtype).float().requires_grad_() if t.is_floating_point() else t for t in inputs]
    expected = [o for o in flat(operation(*images)) if o.is_floating_point()]
    gradients = [g.to(dtype) for g in gradients_like(expected)]
    assert [o.dtype for o in outputs] == [dtype] * len(expected)
    for o, e in zip(outputs, expected, strict=True):
        assert same(o, e.detach().to(dtype))
    torch.autograd.backward(outputs, gradients)
    torch.autograd.backward(expected, [g.float() for g in gradients])
    for t, image in zip(inputs, images, strict=True):
        if t.is_floating_point():
            assert same(t.grad, image.grad.to(dtype).float())


def check_module(module, *inputs, name="fp16"):
    """The same for a module that is one operation."""
    parameters = dict(module.named_parameters())

    def call(*values):
        replaced = dict(zip(parameters, values[: len(parameters)], strict=True))
        return torch.func.functional_call(module, replaced, values[len(parameters) :])

    check(call, *parameters.values(), *inputs, name=name)


PRODUCTS = {
    "mm": (torch.mm, (5, 7), (7, 3)),
    "matmul": (torch.matmul, (5, 7), (7, 3)),
    "matmul vector": (torch.matmul, (7,), (7, 3)),
    "matmul by vector": (torch.matmul, (5, 7), (7,)),
    "matmul dot": (torch.matmul, (7,), (7,)),
    "matmul 3x2": (torch.matmul, (4, 5, 7), (7, 3)),
    "matmul 2x3": (torch.matmul, (5, 7), (4, 7, 3)),
    "matmul broadcast": (torch.matmul, (2, 1, 5, 7), (4, 7, 3)),
    "bmm": (torch.bmm, (4, 5, 7), (4, 7, 3)),
    "mv": (torch.mv, (5, 7), (7,)),
    "vecdot": (torch.linalg.vecdot, (5, 7), (5, 7)),
    "addmm": (torch.addmm, (5, 3), (5, 7), (7, 3)),
    "addmm scaled": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.0), (3,), (5, 7), (7, 3)),
    "addmv": (lambda c, a, b: torch.addmv(c, a, b, beta=0.5, alpha=3), (5,), (5, 7), (7,)),
    "addbmm": (lambda c, a, b: torch.addbmm(c, a, b, beta=2, alpha=0.25), (5, 3), (4, 5, 7), (4, 7, 3)),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b, beta=2, alpha=0.25), (4, 5, 3), (4, 5, 7), (4, 7, 3)),
    "addr": (torch.addr, (5, 3), (5,), (3,)),
    "prelu": (F.prelu, (5, 3), (3,)),
    "linear": (F.linear, (5, 7), (3, 7), (3,)),
    "linear without bias": (F.linear, (5, 7), (3, 7)),
    "linear 1d": (F.linear, (7,), (3, 7), (3,)),
    "linear 3d": (F.linear, (2, 5, 7), (3, 7), (3,)),
    "linear of nothing": (F.linear, (0, 7), (3, 7), (3,)),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), (4, 5, 7), (4, 7, 3)),
    "conv1d": (F.conv1d, (2, 4, 9), (6, 4, 3), (6,)),
    "conv1d same": (lambda x, w: F.conv1d(x, w, padding="same"), (2, 4, 9), (6, 4, 4)),
    "conv1d valid unbatched": (lambda x, w, b: F.conv1d(x, w, b, padding="valid"), (4, 9), (6, 4, 3), (6,)),
    "conv2d": (F.conv2d, (2, 4, 9, 8), (6, 4, 3, 3), (6,)),
    "conv2d unbatched": (F.conv2d, (4, 9, 8), (6, 4, 3, 3)),
    "conv2d strided": (lambda x, w, b: F.conv2d(x, w, b, 2, (1, 2)), (2, 4, 9, 8), (6, 4, 3, 2), (6,)),
    "conv2d dilated": (lambda x, w: F.conv2d(x, w, dilation=(2, 3), padding=2), (2, 4, 9, 8), (6, 4, 3, 2)),
    "conv2d same": (lambda x, w, b: F.conv2d(x, w, b, padding="same"), (2, 4, 9, 8), (6, 4, 4, 3), (6,)),
    "conv2d grouped": (lambda x, w, b: F.conv2d(x, w, b, groups=2), (2, 4, 9, 8), (6, 2, 3, 3), (6,)),
    "conv2d depthwise": (lambda x, w: F.conv2d(x, w, groups=4, padding=1), (2, 4, 9, 8), (8, 1, 3, 3)),
    "conv3d": (lambda x, w, b: F.conv3d(x, w, b, 2, 1), (2, 3, 5, 6, 7), (4, 3, 2, 3, 3), (4,)),
    "conv3d same": (lambda x, w: F.conv3d(x, w, padding="same"), (2, 3, 4, 4, 4), (4, 3, 3, 3, 3)),
    "conv_tbc": (lambda x, w, b: torch.conv_tbc(x, w, b, 1), (9, 2, 4), (3, 4, 5), (5,)),
    "conv_transpose1d": (lambda x, w, b: F.conv_transpose1d(x, w, b, 2, 1, 1), (2, 4, 5), (4, 3, 3), (3,)),
    "conv_transpose2d": (lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1), (2, 4, 5, 4), (4, 3, 4, 4), (3,)),
    "conv_transpose2d grouped": (lambda x, w: F.conv_transpose2d(x, w, groups=2), (2, 4, 5, 4), (4, 3, 3, 3)),
    "conv_transpose3d": (F.conv_transpose3d, (1, 2, 3, 3, 3), (2, 3, 2, 2, 2), (3,)),
    "convolution": (
        lambda x, w, b: torch.convolution(x, w, b, (1, 1), (1, 1), (1, 1), False, (0, 0), 1),
        (2, 4, 5, 5), (6, 4, 3, 3), (6,),
    ),
    "attention": (F.scaled_dot_product_attention, (2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8)),
    "attention causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
        (2, 3, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8),
    ),
    "attention masked": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        (2, 3, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8), (5, 5),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("case", PRODUCTS)
@pytest.mark.parametrize("name", DTYPE)
def test_product_is_rounded_once(case, name):
    torch.manual_seed(0)
    operation, *sizes = PRODUCTS[case]
    check(operation, *(randn(*size) for size in sizes), name=name)


MODULES = {
    "LSTM": (lambda: nn.LSTM(4, 5), (6, 3, 4)),
    "LSTM deep": (lambda: nn.LSTM(4, 5, 2, bidirectional=True, batch_first=True), (3, 6, 4)),
    "LSTM projected": (lambda: nn.LSTM(4, 5, 2, proj_size=3), (6, 3, 4)),
    "LSTM without bias": (lambda: nn.LSTM(4, 5, bias=False), (6, 3, 4)),
    "GRU": (lambda: nn.GRU(4, 5, 2, bidirectional=True), (6, 3, 4)),
    "RNN tanh": (lambda: nn.RNN(4, 5, 2), (6, 3, 4)),
    "RNN relu": (lambda: nn.RNN(4, 5, nonlinearity="relu", bidirectional=True), (6, 3, 4)),
    "LSTM unbatched": (lambda: nn.LSTM(4, 5), (6, 4)),
    "LSTM cell": (lambda: nn.LSTMCell(4, 5), (3, 4)),
    "GRU cell": (lambda: nn.GRUCell(4, 5), (3, 4)),
    "RNN cell": (lambda: nn.RNNCell(4, 5), (3, 4)),
    "RNN relu cell": (lambda: nn.RNNCell(4, 5, nonlinearity="relu"), (3, 4)),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("case", MODULES)
def test_module_is_rounded_once(case):
    torch.manual_seed(0)
    make, size = MODULES[case]
    check_module(make(), randn(*size))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_with_given_state(kind):
    torch.manual_seed(0)
    module = kind(4, 5, 2)
    state = [randn(2, 3, 5) for _ in range(2 if kind is nn.LSTM else 1)]
    names = list(dict(module.named_parameters()))

    def call(x, *rest):
        state, values = rest[: len(rest) - len(names)], rest[len(rest) - len(names) :]
        given = tuple(state) if kind is nn.LSTM else state[0]
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (x, given))

    check(call, randn(6, 3, 4), *state, *module.parameters())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_packed(kind):
    torch.manual_seed(0)
    module = kind(4, 5, 2, bidirectional=True)
    names = list(dict(module.named_parameters()))

    def call(x, *values):
        packed = pack_padded_sequence(x, [6, 4, 1])
        output, state = torch.func.functional_call(module, dict(zip(names, values, strict=True)), (packed,))
        return output.data, *flat(state)

    check(call, randn(6, 3, 4), *module.parameters())


LAYOUTS = {
    "transposed": lambda: randn(7, 5, grad=False).t(),
    "sliced": lambda: randn(5, 14, grad=False)[:, ::2],
    "offset": lambda: randn(9, 9, grad=False)[3:8, 1:8],
    "expanded": lambda: randn(1, 7, grad=False).expand(5, 7),
    "column": lambda: randn(5, 1, grad=False).expand(5, 7),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_operands(layout):
    torch.manual_seed(0)
    check(torch.mm, LAYOUTS[layout]().requires_grad_(), randn(7, 3))
    check(lambda a, b: torch.mm(b, a), LAYOUTS[layout]().requires_grad_(), randn(4, 5))
    check(F.linear, LAYOUTS[layout]().requires_grad_(), LAYOUTS[layout]().requires_grad_())


def test_channels_last():
    torch.manual_seed(0)
    x = torch.randn(2, 4, 9, 8).to(memory_format=torch.channels_last).requires_grad_()
    w = torch.randn(6, 4, 3, 3).to(memory_format=torch.channels_last).requires_grad_()
    check(lambda x, w, b: F.conv2d(x, w, b, padding=1), x, w, randn(6))
    with arithmetic():
        assert F.conv2d(x, w).is_contiguous(memory_format=torch.channels_last)


def once(operation, *operands):
    """The definition, through autograd."""
    return operation(*(t.half().float() for t in operands)).half()


def test_multi_head_attention_product_by_product():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2)
    x = randn(5, 3, 8)
    with arithmetic():
        output, weights = module(x, x, x)
    w, b = (t.detach().clone().requires_grad_() for t in (module.in_proj_weight, module.in_proj_bias))
    ow, ob = (t.detach().clone().requires_grad_() for t in (module.out_proj.weight, module.out_proj.bias))
    y = x.detach().clone().requires_grad_()
    q, k, v = (t.reshape(5, 6, 4).transpose(0, 1) for t in once(F.linear, y, w, b).chunk(3, -1))
    scores = once(torch.bmm, q * (1 / 4**0.5), k.transpose(-2, -1)).float()
    attention = scores.softmax(-1)
    heads = once(torch.bmm, attention, v).transpose(0, 1).reshape(15, 8)
    expected = once(F.linear, heads, ow, ob).reshape(5, 3, 8)
    assert torch.equal(output, expected)
    assert same(weights, attention.reshape(3, 2, 5, 5).mean(1))
    gradient = torch.randn(5, 3, 8).half()
    output.backward(gradient)
    expected.backward(gradient)
    for ours, reference in ((x, y), (module.in_proj_weight, w), (module.in_proj_bias, b)):
        assert torch.equal(ours.grad, reference.grad)
    assert torch.equal(module.out_proj.weight.grad, ow.grad)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("name", ["fp16", "tf32", "bf16", "fp16_acc16"])
def test_transformers_evaluate_as_they_train(name):
    """Without gradients torch's layers take fast paths that round otherwise; CUDA autocast does without, so do we."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    networks = [nn.MultiheadAttention(8, 2, batch_first=True), nn.TransformerEncoder(layer, 2)]
    attention, encoder = (network.eval() for network in networks)
    x, padding = randn(2, 5, 8, grad=False), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    for call in (lambda: attention(x, x, x, need_weights=False)[0], lambda: encoder(x, src_key_padding_mask=padding)):
        with torch.no_grad():
            plain = call()
            with arithmetic(name):
                evaluated = call()
            assert torch.equal(call(), plain)
        with arithmetic(name):
            trained = call()
        assert same(evaluated[0], trained[0]) and same(evaluated[1, :3], trained[1, :3])
        assert not torch.equal(evaluated[0].float(), plain[0])
    torch.jit.script(attention)


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
def test_einsum_and_chains_fall_apart_into_rounded_products():
    torch.manual_seed(0)
    a, b, c = randn(5, 7), randn(7, 3), randn(3, 4)
    with arithmetic():
        assert torch.equal(torch.einsum("ij,jk->ik", a, b), once(torch.mm, a, b))
        assert torch.equal(torch.linalg.multi_dot([a, b, c]), once(torch.mm, once(torch.mm, a, b), c))
        assert torch.equal(torch.chain_matmul(a, b, c), once(torch.mm, once(torch.mm, a, b), c))
        assert torch.equal(torch.tensordot(a.half(), b.half(), 1), once(torch.mm, a, b))
        assert torch.equal(torch.dot(a[0].half(), b[:, 0].half()), once(torch.dot, a[0], b[:, 0]))
        w = randn(3, 7, 4)
        assert torch.equal(F.bilinear(a.half(), c[:1].expand(5, 4).half(), w.half()),
                           once(F.bilinear, a, c[:1].expand(5, 4), w))  # fmt: skip


def test_weight_used_twice_adds_its_gradients_in_half():
    torch.manual_seed(0)
    x, w = randn(5, 7), randn(7, 7)
    with arithmetic():
        y = torch.mm(torch.mm(x, w), w)
    gradient = torch.randn(5, 7).half()
    y.backward(gradient)
    x16, w16 = x.detach().half(), w.detach().half()
    h16 = torch.mm(x16.float(), w16.float()).half()
    second = torch.mm(h16.float().t(), gradient.float()).half()
    back = torch.mm(gradient.float(), w16.float().t()).half()
    first = torch.mm(x16.float().t(), back.float()).half()
    assert torch.equal(w.grad, (first + second).float())
    assert torch.equal(x.grad, torch.mm(back.float(), w16.float().t()).half().float())


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(inplace=True), nn.Conv2d(6, 4, 3, padding=1), nn.ReLU(inplace=True),
        nn.Flatten(), nn.Linear(144, 10), nn.ReLU(inplace=True), nn.Linear(10, 3),
    )  # fmt: skip


def run(model, x, call=lambda model, x: model(x), **options):
    model.zero_grad()
    x.grad = None
    with arithmetic(**options):
        y = call(model, x)
    loss = (y.float() ** 2).sum()
    loss.backward()
    return [y.detach(), x.grad.clone(), *(p.grad.clone() for p in model.parameters())]


def test_in_place_relu_after_every_product():
    model, x = network(), randn(2, 3, 8, 8)
    w1, b1, w2, b2, w3, b3, w4, b4 = (p.detach().clone().requires_grad_() for p in model.parameters())
    y = x.detach().clone().requires_grad_()
    h = once(F.conv2d, y, w1, b1).relu()
    h = once(lambda x, w, b: F.conv2d(x, w, b, padding=1), h, w2, b2).relu().flatten(1)
    h = once(F.linear, once(F.linear, h, w3, b3).relu(), w4, b4)
    (h.float() ** 2).sum().backward()
    ours = run(model, x)
    for a, b in zip(ours, [h, y.grad, *(w.grad for w in (w1, b1, w2, b2, w3, b3, w4, b4))], strict=True):
        assert torch.equal(a, b)


CHECKPOINTS = {
    "reentrant": lambda m, x: checkpoint(m, x, use_reentrant=True),
    "not reentrant": lambda m, x: checkpoint(m, x, use_reentrant=False),
    "nested reentrant": lambda m, x: checkpoint(
        lambda x: checkpoint(m, x.clone(), use_reentrant=True), x, use_reentrant=True
    ),
    "nested": lambda m, x: checkpoint(
        lambda x: m[5:](checkpoint(m[:5], x, use_reentrant=False)), x, use_reentrant=False
    ),
    "piece by piece": lambda m, x: checkpoint(m[4:], checkpoint(m[:4], x, use_reentrant=False), use_reentrant=True),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of the inner one, by torch's design
@pytest.mark.parametrize("how", CHECKPOINTS)
@pytest.mark.parametrize("name", ["fp16", "tf32", "fp16_acc16", "bf16"])
def test_gradient_checkpointing_changes_nothing(how, name):
    model, x = network(), randn(2, 3, 8, 8)
    plain = run(model, x, name=name)
    for a, b in zip(plain, run(model, x, CHECKPOINTS[how], name=name), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_a_weight_used_twice(use_reentrant):
    shared, x = nn.Linear(7, 7), randn(5, 7)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), shared)
    plain = run(model, x)
    for a, b in zip(plain, run(model, x, lambda m, x: checkpoint(m, x, use_reentrant=use_reentrant)), strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        shared.weight.data = shared.weight * 2  # no version counter tells of this
    changed = run(model, x)
    fresh = nn.Linear(7, 7)
    fresh.load_state_dict(shared.state_dict())
    again = run(nn.Sequential(fresh, nn.Tanh(), fresh, nn.Tanh(), fresh), x)
    for a, b in zip(changed, again, strict=True):
        assert torch.equal(a, b)


def test_checkpointing_drops_what_it_should():
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), randn(256, 64)
    held = []

    def count_pack(t):
        held.append(t.numel())
        return t

    with arithmetic(), torch.autograd.graph.saved_tensors_hooks(count_pack, lambda t: t):
        checkpoint(model, x, use_reentrant=False)
    assert sum(held) <= x.numel()


def test_foreign_checkpoint_is_recomputed_by_torch():
    model, x = network(), randn(2, 3, 8, 8)
    run(model, x)
    for use_reentrant in (True, False):
        results = []
        for call in (model, lambda x, r=use_reentrant: checkpoint(model, x, use_reentrant=r)):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = (call(x).float() ** 2).sum()
            loss.backward()
            results.append([p.grad.clone() for p in model.parameters()])
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


def test_without_gradients():
    model, x = network(), randn(2, 3, 8, 8)
    expected = run(model, x)[0]
    for context in (torch.no_grad, torch.inference_mode):
        with context(), arithmetic():
            assert torch.equal(model(x), expected)
    with torch.inference_mode():
        other = x + 0
    with arithmetic(), torch.no_grad():
        assert torch.equal(model(other), expected)


def test_region_nests_and_ends():
    x, w = randn(5, 7), randn(7, 3)
    half, tf32, full = arithmetic(), arithmetic("tf32"), arithmetic("fp32")
    dtypes = []
    with half:
        dtypes.append(torch.mm(x, w).dtype)
        with half, tf32:
            dtypes.append(torch.mm(x, w).dtype)
            assert torch.equal(torch.mm(x, w), torch.mm(round_tf32(x), round_tf32(w)))
            with full:
                assert torch.equal(torch.mm(x, w), x @ w) and not torch.is_autocast_enabled("cpu")
            with torch.autocast("cpu", enabled=False):
                dtypes.append(torch.mm(x, w).dtype)
        dtypes.append(torch.mm(x, w).dtype)
        with torch.autocast("cpu", torch.bfloat16):
            dtypes.append(torch.mm(x, w).dtype)
        dtypes.append(torch.mm(x, w).dtype)
    dtypes.append(torch.mm(x, w).dtype)
    f16, f32, b16 = torch.float16, torch.float32, torch.bfloat16
    assert dtypes == [f16, f32, f32, f16, b16, f16, f32]


def test_error_inside_a_region_leaves_everything_as_before():
    from mptrain.precision import dispatch

    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    x = randn(5, 7)
    for what in (lambda: torch.mm(x, x), lambda: (_ for _ in ()).throw(KeyError("mine"))):
        with pytest.raises((RuntimeError, KeyError)), arithmetic():
            torch.mm(x, x.t())
            what()
    after = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    assert before == after
    assert dispatch.state.regions == [] and dispatch.state.casts == {} and dispatch.rounding() is None
    assert torch.equal(x @ x.t(), torch.mm(x, x.t())) and torch.mm(x, x.t()).dtype == torch.float32


def test_weight_changed_inside_a_region_is_cast_again():
    x, w = randn(5, 7), randn(7, 3)
    with arithmetic():
        torch.mm(x, w)
        with torch.no_grad():
            w.mul_(3)
        assert torch.equal(torch.mm(x, w), once(torch.mm, x, w))


def test_two_threads_share_an_arithmetic():
    model, shared = network(), arithmetic()
    inputs = [randn(2, 3, 8, 8, grad=False) for _ in range(2)]
    with shared:
        expected = [model(x) for x in inputs]
    found, plain, wrong = [None, None], [None, None], []
    barrier = threading.Barrier(2)

    def work(i):
        try:
            for _ in range(20):
                barrier.wait()
                with shared:
                    found[i] = model(inputs[i])
                    barrier.wait()
                plain[i] = model(inputs[i])
                if not torch.equal(found[i], expected[i]) or plain[i].dtype != torch.float32:
                    wrong.append(i)
        except Exception as error:
            wrong.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)

    def forward(self, x):
        return F.scaled_dot_product_attention(self.q(x), x, x, attn_mask=self.q.weight[:5, :5])


INSIDE = {
    "network": (network, (2, 3, 8, 8)),
    "GRU": (lambda: nn.GRU(4, 5, 2), (6, 3, 4)),
    "RNN": (lambda: nn.RNN(4, 5, bidirectional=True), (6, 3, 4)),
    "LSTM": (lambda: nn.LSTM(4, 5), (6, 3, 4)),
    "attention": (Attention, (2, 2, 5, 8)),
}


@pytest.mark.parametrize("case", INSIDE)
@pytest.mark.parametrize("name", ["fp16", "tf32", "fp16_acc16", "bf16"])
@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_backward_inside_the_region(case, name, use_reentrant):
    make, size = INSIDE[case]
    model, x = make(), randn(*size)

    def call(x):
        if use_reentrant is None:
            return flat(model(x))[0]
        return checkpoint(lambda x: flat(model(x))[0], x, use_reentrant=use_reentrant)

    outside = run(model, x, lambda model, x: call(x), name=name)
    model.zero_grad()
    x.grad = None
    with arithmetic(name):
        y = call(x)
        (y.float() ** 2).sum().backward()
    for a, b in zip(outside, [y, x.grad, *(p.grad for p in model.parameters())], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_region_inside_what_is_checkpointed(use_reentrant):
    model, x = network(), randn(2, 3, 8, 8)
    plain = run(model, x)
    model.zero_grad()
    x.grad = None
    region = arithmetic()

    def call(x):
        with region:
            return model(x)

    y = checkpoint(call, x, use_reentrant=use_reentrant)
    (y.float() ** 2).sum().backward()
    for a, b in zip(plain, [y, x.grad, *(p.grad for p in model.parameters())], strict=True):
        assert torch.equal(a, b)


def test_gradients_of_gradients():
    """A gradient penalty, as some GANs train with."""

    def penalty(operation, x, w):
        y = operation(x, w).tanh()
        (gradient,) = torch.autograd.grad(y.float().sum(), x, create_graph=True)
        ((gradient.float().norm() - 1) ** 2).backward()
        return [x.grad, w.grad]

    torch.manual_seed(0)
    x, w = torch.randn(5, 3), torch.randn(4, 3)
    fresh = lambda: (x.clone().requires_grad_(), w.clone().requires_grad_())  # noqa: E731
    exact = penalty(F.linear, *fresh())

    def inside(name):
        def operation(x, w):
            with arithmetic(name):
                return F.linear(x, w)

        return operation

    by_definition = penalty(lambda x, w: once(F.linear, x, w), *fresh())
    for ours, expected in zip(penalty(inside("fp16"), *fresh()), by_definition, strict=True):
        assert torch.equal(ours, expected)
    for name, tolerance in (("fp16", 1e-2), ("tf32", 1e-2), ("fp16_acc16", 2e-2)):
        for ours, expected in zip(penalty(inside(name), *fresh()), exact, strict=True):
            assert (ours - expected).norm() < tolerance * expected.norm()


def test_torch_func():
    torch.manual_seed(0)
    x, w = torch.randn(5, 3), torch.randn(4, 3)

    def loss(w, x):
        return (F.linear(x, w).float() ** 2).sum()

    with arithmetic():
        found = torch.func.grad(loss)(w, x)
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(w, x)
    v = w.clone().requires_grad_()
    (once(F.linear, x, v).float() ** 2).sum().backward()
    assert torch.equal(found, v.grad)
    torch.testing.assert_close(each.sum(0), v.grad, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("network", [nn.Linear(3, 4), nn.Conv2d(2, 3, 3), nn.Conv1d(2, 3, 2, bias=False)])
def test_gradients_of_each_sample(network, where):
    """vmap(grad) against one sample after the other; what differs is the order of FP32 sums."""
    torch.manual_seed(0)
    x = torch.randn(5, *{nn.Linear: (3,), nn.Conv2d: (1, 2, 6, 6), nn.Conv1d: (2, 5)}[type(network)])
    parameters = {name: p.detach() for name, p in network.named_parameters()}
    region = arithmetic() if where == "inside" else nullcontext()

    def loss(parameters, x):
        with arithmetic():
            y = torch.func.functional_call(network, parameters, (x,))
        return (y.float() ** 2).sum()

    with region:
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
        alone = [torch.func.grad(loss)(parameters, sample) for sample in x]
    for name, found in each.items():
        torch.testing.assert_close(found, torch.stack([a[name] for a in alone]), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["fp16", "bf16", "tf32", "fp16_acc16", "fp8"])
def test_a_compiler_may_not_leave_out_roundings(name):
    torch._dynamo.reset()
    network, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU()), torch.randn(16, 16)
    refused = pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="torch.compile leaves out roundings")
    with arithmetic(name), refused:
        torch.compile(network, backend="aot_eager")(x)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(network, backend="aot_eager")(x), network(x))
    torch._dynamo.reset()


class TestSavedTensors:
    def test_only_sixteen_bit_tensors_are_kept(self):
        x, w = randn(64, 64), randn(64, 64)
        for make in (lambda t: t, lambda t: t.t(), lambda t: t[:1].expand(64, 64), lambda t: t[:, ::2].mT):
            kept = []
            with arithmetic():
                y = torch.mm(make(x), w[: make(x).shape[1]])
            for saved in ("_saved_self", "_saved_mat2"):
                node = y.grad_fn.next_functions[0][0]
                kept.append(getattr(node, "_raw" + saved))
            assert all(isinstance(k, torch._C._autograd.SavedTensor) for k in kept)
            del y

    def test_bytes_between_forward_and_backward(self):
        from torch.distributed._tools.mem_tracker import MemTracker

        def kept(name):
            model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(8)))
            x = randn(1024, 128, grad=False)
            tracker = MemTracker()
            tracker.track_external(model, x)
            with tracker:
                with arithmetic(name):
                    y = model(x)
                held = tracker.get_tracker_snapshot("current")
            del y
            return next(total["Total"] for place, total in held.items() if place.type == "cpu")

        parameters, inputs = 8 * 128 * 128 * 4, 1024 * 128 * 4
        half = kept("fp16") - parameters - inputs
        # nine activations and the weights of all layers but the first in FP16, nothing in FP32
        assert half == (9 * 1024 * 128 + 7 * 128 * 128) * 2
        assert kept("fp32") - parameters - inputs == 8 * 1024 * 128 * 4

    def test_in_place_change_is_an_error_as_in_torch(self):
        x, w = randn(5, 7), randn(7, 3)
        with arithmetic():
            h = torch.mm(x, w)
            y = torch.mm(h, randn(3, 3))
            h.relu_()
        with pytest.raises(RuntimeError, match="changed in place"):
            y.sum().backward()
        with arithmetic("tf32"):
            h = x * 1
            y = torch.mm(h, w)
            h.mul_(2)
        with pytest.raises(RuntimeError, match="changed in place"):
            y.sum().backward()

    def test_hooks_of_others_get_the_sixteen_bit_tensor(self):
        seen = []
        x, w = randn(5, 7), randn(7, 3)
        with (
            arithmetic(),
            torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.dtype) or t, lambda t: t),
        ):
            y = torch.mm(x, w)
        assert seen == [torch.float16, torch.float16]
        y.sum().backward()
        with arithmetic(), torch.autograd.graph.save_on_cpu():
            z = torch.mm(x, w)
        plain = x.grad.clone()
        x.grad = None
        z.sum().backward()
        assert torch.equal(plain, x.grad)


class TestTF32:
    OPERATIONS = {
        "mm": (torch.mm, (5, 70), (70, 3), None),
        "bmm": (torch.bmm, (4, 5, 70), (4, 70, 3), None),
        "matmul": (torch.matmul, (4, 5, 70), (70, 3), None),
        "linear": (F.linear, (5, 70), (3, 70), (3,)),
        "linear 3d": (F.linear, (2, 5, 70), (3, 70), (3,)),
        "conv1d": (F.conv1d, (2, 4, 9), (6, 4, 3), (6,)),
        "conv2d": (lambda x, w, b: F.conv2d(x, w, b, 2, 1), (2, 4, 9, 8), (6, 4, 3, 3), (6,)),
        "conv2d same": (lambda x, w, b: F.conv2d(x, w, b, padding="same"), (2, 4, 9, 8), (6, 4, 3, 3), (6,)),
        "conv2d unbatched": (F.conv2d, (4, 9, 8), (6, 4, 3, 3), (6,)),
        "conv3d": (F.conv3d, (1, 3, 4, 5, 6), (2, 3, 3, 3, 3), (2,)),
        "conv_transpose2d": (F.conv_transpose2d, (2, 4, 5, 4), (4, 3, 3, 3), (3,)),
        "addmm": (lambda a, b, c: torch.addmm(c, a, b, beta=0.5, alpha=2), (5, 70), (70, 3), (3,)),
        "baddbmm": (lambda a, b, c: torch.baddbmm(c, a, b, beta=2), (4, 5, 70), (4, 70, 3), (4, 5, 3)),
        "addbmm": (lambda a, b, c: torch.addbmm(c, a, b), (4, 5, 70), (4, 70, 3), (5, 3)),
        "addmv": (lambda a, b, c: torch.addmv(c, a, b), (5, 70), (70,), (5,)),
    }

    @pytest.mark.parametrize("case", OPERATIONS)
    def test_operands_are_rounded_and_nothing_else(self, case):
        torch.manual_seed(0)
        operation, *sizes = self.OPERATIONS[case]
        inputs = [randn(*size) for size in sizes if size is not None]
        with arithmetic("tf32"):
            y = operation(*inputs)
        images = [round_tf32(t.detach()).requires_grad_() for t in inputs[:2]]
        bias = [t.detach().clone().requires_grad_() for t in inputs[2:]]
        expected = operation(*images, *bias)
        assert torch.equal(y, expected)
        gradient = torch.randn_like(y)
        y.backward(gradient)
        to_bias = torch.autograd.grad(expected, bias, gradient, retain_graph=True) if bias else []
        to_operands = torch.autograd.grad(expected, images, round_tf32(gradient))
        for t, g in zip(inputs[:2], to_operands, strict=True):
            assert torch.equal(t.grad, g)
        for t, g in zip(inputs[2:], to_bias, strict=True):
            torch.testing.assert_close(t.grad, g, rtol=1e-5, atol=1e-5)
            if not case.startswith("conv"):
                assert torch.equal(t.grad, g)

    def test_recurrent_biases_and_cell_are_not_operands(self):
        torch.manual_seed(0)
        module = nn.LSTM(4, 5)
        x, h, c = randn(6, 3, 4), randn(1, 3, 5), randn(1, 3, 5)
        with arithmetic("tf32"):
            y, _ = module(x, (h, c))
        rounded = copy.deepcopy(module)
        with torch.no_grad():
            for p in rounded.parameters():
                if p.dim() > 1:
                    p.copy_(round_tf32(p))
            expected, _ = rounded(round_tf32(x), (round_tf32(h), c))
        assert y.dtype == torch.float32 and torch.equal(y, expected)

    def test_nothing_else_is_touched(self):
        x = randn(5, 7)
        with arithmetic("tf32"):
            assert torch.equal(x.softmax(-1), F.softmax(x.detach(), -1))
            assert torch.equal((x * x + x).exp(), (x.detach() * x.detach() + x.detach()).exp())
            assert torch.equal(F.mse_loss(x, x * 2), F.mse_loss(x.detach(), x.detach() * 2))
            y = F.conv1d(x[None], randn(4, 5, 1)).relu_()
        assert y.dtype == torch.float32
        y.sum().backward()

    def test_operations_kept_in_fp32(self):
        x, w = randn(5, 70), randn(3, 70)
        linear, matmul = F.linear(x, w), x @ w.t()
        with arithmetic("tf32", keep_fp32=["linear"]):
            assert torch.equal(F.linear(x, w), linear)
            assert not torch.equal(x @ w.t(), matmul)


class TestForeignAutocast:
    """torch's own autocast in a process where our kernels are installed."""

    def results(self):
        torch.manual_seed(0)
        model, lstm, gru = network(), nn.LSTM(4, 5), nn.GRU(4, 5)
        x, s = torch.randn(2, 3, 8, 8), torch.randn(6, 3, 4)
        found = []
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
            found += [y, y.softmax(-1), y.exp(), y.sum(), y.float().pow(2), F.layer_norm(y, (3,))]
            found += [lstm(s)[0], gru(s)[0], F.mse_loss(y, torch.zeros_like(y)), torch.cat([y, y.float()])]
            found += [torch.einsum("ij,kj->ik", y, y), F.interpolate(x, scale_factor=2), torch.fft.fft(s).abs()]
            found += [torch.logsumexp(y, 0), F.binary_cross_entropy(y.float().sigmoid(), torch.ones(2, 3))]
        found += [p for p in torch.autograd.grad(found[0].float().sum() + found[6].float().sum(),
                                                 [*model.parameters(), *lstm.parameters()])]  # fmt: skip
        with torch.autocast("cpu", torch.float16):
            found += [model[0](x), torch.mm(s[0], s[0].t())]
        return found

    def test_before_after_and_inside(self):
        code = (
            "import sys, torch; torch.set_num_threads(1); sys.path.insert(0, 'tests')\n"
            "import test_precision_arithmetic as t\n"
            "f = t.TestForeignAutocast().results(); from mptrain.precision import dispatch\n"
            "assert not dispatch._installed; torch.save([r.detach() for r in f], sys.argv[1])"
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "before.pt"
            subprocess.run([sys.executable, "-c", code, str(path)], check=True, cwd=Path(__file__).parent.parent)
            before = torch.load(path)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with arithmetic():
                torch.mm(randn(3, 3), randn(3, 3))
            importlib.import_module("torch._decomp")  # registers Python versions of composite operations
            after = self.results()
            with arithmetic("fp16"), torch.autocast("cpu", enabled=False), arithmetic("fp32"):
                inside = self.results()
        finally:
            torch.set_num_threads(threads)
        for a, b, c in zip(before, after, inside, strict=True):
            assert same(a, b.detach()) and same(a, c.detach())


@pytest.mark.skipif(not hardware.cpu_has_bfloat16(), reason="this CPU has no BF16 kernels")
@pytest.mark.parametrize("product", ["mm", "matmul", "bmm", "linear", "conv1d", "conv2d", "conv_transpose2d"])
def test_native_bf16_is_the_kernel_on_cast_inputs(product):
    """Bit for bit, forward and backward, whoever does the casting; a parameter used twice is cast once."""
    function = getattr(torch, product, None) or getattr(F, product)
    sizes = {"bmm": ((2, 5, 7), (2, 7, 3)), "linear": ((5, 7), (3, 7)), "conv1d": ((2, 3, 9), (4, 3, 3))}
    sizes |= {"conv2d": ((2, 3, 9, 9), (4, 3, 3, 3)), "conv_transpose2d": ((2, 3, 5, 5), (3, 4, 3, 3))}
    first, second = sizes.get(product, ((5, 7), (7, 3)))
    x, y, w = randn(*first), randn(*first), randn(*second)
    with Precision.load("bf16").arithmetic():
        a, b = function(x, w), function(y * 2, w)
    images = [t.detach().requires_grad_() for t in (x, y, w)]
    low = images[2].bfloat16()
    expected = [function(images[0].bfloat16(), low), function((images[1] * 2).bfloat16(), low)]
    assert same(a, expected[0]) and same(b, expected[1])
    gradient = torch.randn(a.shape).bfloat16()
    torch.autograd.backward([a, b], [gradient, -gradient])
    torch.autograd.backward(expected, [gradient, -gradient])
    assert all(same(t.grad, image.grad) for t, image in zip((x, y, w), images, strict=True))


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_cross_entropy_takes_logarithms_in_the_format_of_the_logits(name):
    """As under CUDA autocast, where log_softmax is asked for a dtype there; the rest is FP32."""
    labels, weight = torch.randint(5, (8,)), torch.rand(5)
    for options in ({}, {"label_smoothing": 0.1}, {"weight": weight}, {"reduction": "none"}):
        logits = randn(8, 5)
        with Precision.load(name).arithmetic():
            result = F.cross_entropy(logits, labels, **options)
        assert same(result, F.cross_entropy(logits, labels, **options))
    low = logits.detach().to(DTYPE[name]).requires_grad_()
    with Precision.load(name).arithmetic():
        result = F.cross_entropy(low, labels, weight=weight)
    logarithms = F.log_softmax(low.float(), 1).to(DTYPE[name]).float()
    assert same(result, F.nll_loss(logarithms, labels, weight=weight))
    result.backward()
    again = low.detach().requires_grad_()
    F.nll_loss(F.log_softmax(again.float(), 1).to(DTYPE[name]).float(), labels, weight=weight).backward()
    assert same(low.grad, again.grad)
