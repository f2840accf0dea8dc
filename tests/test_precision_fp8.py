"""FP8 linear layers against float64 arithmetic on values rounded from first principles."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from mptrain.precision import fp8
from mptrain.precision.counting import KINDS, Counter, count
from mptrain.precision.formats import E4M3, E5M2
from mptrain.precision.fp8 import Scaled, scaled, unit_of
from mptrain.precision.modes import Precision
from mptrain.precision.ran import RanDtypes

FORMATS = {"e4m3": (E4M3, torch.float8_e4m3fn), "e5m2": (E5M2, torch.float8_e5m2)}


def arithmetic(**changes):
    return Precision.load("fp8", **{k: v for k, v in changes.items() if k != "counter"}).arithmetic(
        counter=changes.get("counter")
    )


def value_of(pattern, form):
    """What a bit pattern means, from the definition of the format."""
    sign = -1.0 if pattern >> 7 else 1.0
    exponent = pattern >> form.mantissa_bits & 2**form.exponent_bits - 1
    fraction = pattern & 2**form.mantissa_bits - 1
    if exponent == 2**form.exponent_bits - 1 and not form.finite:
        return math.nan if fraction else sign * math.inf
    if form.finite and pattern & 0x7F == 0x7F:
        return math.nan
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - form.bias - form.mantissa_bits)
    return sign * (1 + fraction * 2.0**-form.mantissa_bits) * 2.0 ** (exponent - form.bias)


def grid(form):
    """The finite values that are not negative, in order; the place of each is its bit pattern."""
    return [v for pattern in range(128) if math.isfinite(v := value_of(pattern, form))]


def exactly(x, form):
    """x rounded to the nearest of the format's values, ties to the even pattern: by comparing distances in float64."""
    values = torch.tensor(grid(form), dtype=torch.float64)
    above = torch.searchsorted(values, x.abs().double()).clamp(max=len(values) - 1)
    below = (above - 1).clamp(min=0)
    low, high = x.abs().double() - values[below], values[above] - x.abs().double()
    up = (high < low) | ((high == low) & (above % 2 == 0))
    return torch.where(up, values[above], values[below]).copysign(x.double())


@pytest.mark.parametrize("name", FORMATS)
def test_every_pattern_means_what_it_should(name):
    form, dtype = FORMATS[name]
    found = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    expected = torch.tensor([value_of(p, form) for p in range(256)], dtype=torch.float64)
    assert torch.equal(found.nan_to_num(777), expected.nan_to_num(777))
    assert torch.equal(found.signbit(), expected.signbit() | (found.isnan() & found.signbit()))
    for unit in (1.0, 2.0**-126, 2.0**100):
        values = torch.arange(256, dtype=torch.uint8).view(dtype).reshape(16, 16)
        image = Scaled(values.t(), torch.tensor(unit)).image().t().reshape(-1)
        real = ~expected.isnan()
        assert torch.equal(image[real].double(), expected[real] * unit)
        assert torch.equal(image[real].signbit(), expected[real].signbit())
    assert max(grid(form)) == form.max and grid(form)[1] == form.smallest_subnormal


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_casts_are_exact(name, source):
    """Every value of the format, every tie between two, and their neighbours in the source format."""
    form, dtype = FORMATS[name]
    values = torch.tensor(grid(form), dtype=torch.float64)
    points = torch.cat([values, (values[1:] + values[:-1]) / 2]).to(source)
    infinity = torch.full((), math.inf, dtype=source)
    x = torch.cat([points, torch.nextafter(points, infinity), torch.nextafter(points, -infinity)])
    x = x[(x >= 0) & (x <= form.max)]
    x = torch.cat([x, -x, torch.tensor([2.0**-60, -(2.0**-60)], dtype=source)])
    found = x.to(dtype).double()
    assert torch.equal(found, exactly(x, form)) and torch.equal(found.signbit(), x.signbit())
    assert (found == 0).sum() > 4 and found.abs().max() == form.max


GOLDEN = [  # largest value, exponent of the unit for E4M3, for E5M2
    (448.0, 0, -7), (57344.0, 7, 0), (448.0 * (1 + 2**-23), 1, -6), (1.0, -8, -15), (1.75, -8, -15),
    (1.7500001, -7, -14), (2.0, -7, -14), (65504.0, 8, 1), (3.4e38, 120, 113), (2.0**-118, -126, -126),
    (2.0**-117, -125, -126), (1e-45, -126, -126),
]  # fmt: skip


@pytest.mark.parametrize("largest, to_e4m3, to_e5m2", GOLDEN)
def test_units(largest, to_e4m3, to_e5m2):
    x = torch.tensor([[0.0, -largest], [largest / 2, 0.0]])
    assert unit_of(x, E4M3).item() == 2.0**to_e4m3 and unit_of(x, E5M2).item() == 2.0**to_e5m2
    assert unit_of(x.t()[1:], E4M3).item() == 2.0**to_e4m3


def test_units_are_the_smallest_that_fit():
    torch.manual_seed(0)
    for largest in (torch.rand(300) * 200 - 100).exp2().tolist():
        for form, top in ((E4M3, 9), (E5M2, 16)):
            mantissa, exponent = math.frexp(largest)
            expected = 2.0 ** max(exponent - top + (mantissa > 0.875), -126)
            assert unit_of(torch.tensor([largest]), form).item() == expected
            assert largest / expected <= form.max and (largest / expected > form.max / 2 or expected == 2.0**-126)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_nan_in_whole(bad):
    x = torch.ones(3, 16)
    x[1, 2] = bad
    assert unit_of(x, E4M3).isnan() and scaled(x, E5M2).image().isnan().all()
    w, b = nn.Parameter(torch.ones(16, 16)), nn.Parameter(torch.ones(16))
    with arithmetic():
        y = F.linear(x, w, b)
        healthy = F.linear(torch.ones(3, 16), w, b)
    assert y.isnan().all() and torch.equal(healthy, torch.full((3, 16), 17.0).bfloat16())
    gradient = torch.ones(3, 16, dtype=torch.bfloat16)
    gradient[0, 0] = bad
    healthy.backward(gradient)
    assert w.grad.isnan().all() and not b.grad.isfinite().all()


@pytest.mark.parametrize("form", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scaled_rounds_once(form, dtype):
    torch.manual_seed(0)
    for factor in (1.0, 1e-4, 3e3):
        x = (torch.randn(64, 32) * torch.exp2(torch.randn(64, 32) * 5) * factor).clamp(-6e4, 6e4).to(dtype)
        found = scaled(x, form)
        unit = found.unit.double()
        expected = exactly(x.double() / unit, form) * unit
        assert torch.equal(found.image().double(), expected)
        assert found.image().dtype == torch.float32 and found.values.element_size() == 1
        assert torch.equal(scaled(found.image(), form).image(), found.image())
    zeros = scaled(torch.tensor([0.0, -0.0], dtype=dtype), form).image()
    assert torch.equal(zeros.signbit(), torch.tensor([False, True])) and not zeros.any()


def test_another_unit_changes_only_the_lower_end():
    torch.manual_seed(0)
    x = torch.randn(1000)
    whole = torch.cat([x, torch.tensor([1e3])])
    unit = unit_of(whole, E4M3)
    high = x.abs() >= E4M3.smallest_normal * unit
    assert unit > unit_of(x, E4M3) and 0 < high.sum() < 1000
    alone, beside = scaled(x, E4M3).image(), scaled(whole, E4M3).image()[:-1]
    assert torch.equal(alone[high], beside[high]) and not torch.equal(alone, beside)


def double(x, form):
    """FP8 from first principles, in float64."""
    largest = x.double().abs().max().item()
    mantissa, exponent = math.frexp(largest)
    unit = 2.0 ** (exponent - (9 if form is E4M3 else 16) + (mantissa > 0.875))
    return exactly(x.double() / unit, form) * unit


def close(found, expected):
    """Rounded to BF16 from a sum in FP32: the nearest BF16 number, or the one beside it where the sum's own rounding
    decides, which is rare."""
    nearest = expected.float().bfloat16()
    assert found.shape == nearest.shape
    off = found.double() != nearest.double()
    assert off.double().mean() < 0.01
    assert torch.allclose(found.double(), expected, rtol=2.0**-8 * 1.01, atol=1e-6)


@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 64), (2, 1, 17, 64)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("incoming", [torch.float32, torch.bfloat16])
def test_linear_against_float64(shape, bias, incoming):
    torch.manual_seed(1)
    x = torch.randn(shape).to(incoming).requires_grad_()
    w, b = nn.Parameter(torch.randn(48, 64) / 8), nn.Parameter(torch.randn(48)) if bias else None
    with arithmetic():
        y = F.linear(x, w, b)
    assert y.dtype == torch.bfloat16
    x8, w8 = double(x.detach(), E4M3).reshape(-1, 64), double(w.detach(), E4M3)
    close(y.detach().reshape(-1, 48), x8 @ w8.t() + (0 if b is None else b.detach().bfloat16().double()))
    g = torch.randn(y.shape).bfloat16() * 1e-3
    y.backward(g)
    g8 = double(g, E5M2).reshape(-1, 48)
    assert x.grad.dtype == incoming and w.grad.dtype == torch.float32
    close(x.grad.reshape(-1, 64), g8 @ w8)
    close(w.grad, g8.t() @ x8)
    if bias:
        close(b.grad, g.double().reshape(-1, 48).sum(0))
        assert b.grad.dtype == torch.float32


@pytest.mark.parametrize("asked", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_only_the_gradients_that_are_asked_for(asked):
    torch.manual_seed(0)
    values = torch.randn(4, 16), torch.randn(32, 16), torch.randn(32)
    every = [v.clone().requires_grad_() for v in values]
    some = [v.clone().requires_grad_(n in asked) for n, v in enumerate(values)]
    for inputs in (every, some):
        with arithmetic():
            y = F.linear(*inputs)
        y.float().square().sum().backward()
    for n, (a, b) in enumerate(zip(every, some, strict=True)):
        assert (b.grad is None) == (n not in asked)
        assert b.grad is None or torch.equal(a.grad, b.grad)


def test_no_gradients_no_graph_and_keywords():
    x, w = torch.randn(4, 16), nn.Parameter(torch.randn(16, 16))
    with arithmetic():
        y = F.linear(x, w)
        with torch.no_grad():
            same = torch._C._nn.linear(bias=None, weight=w, input=x)
    assert y.requires_grad and not same.requires_grad and torch.equal(y, same)


@pytest.mark.parametrize("rows", [1, 16, 23])
def test_native_kernel_gives_the_same(rows):
    """torch's scaled matmul, which also runs on CPUs, by the code that GPUs run."""
    torch.manual_seed(2)
    results = []
    leaves = torch.randn(rows, 64), torch.randn(48, 64), torch.randn(48)
    for native in (False, True):
        x, w, b = (t.clone().requires_grad_() for t in leaves)
        torch.manual_seed(3)
        with arithmetic():
            y = fp8.linear(x, w, b, native, arithmetic().off, None)
        y.backward(torch.randn(rows, 48).bfloat16())
        results.append((y.detach(), x.grad, w.grad, b.grad))
    for emulated, found in zip(*results, strict=True):
        assert emulated.dtype == found.dtype
        close(found, emulated.double())


def test_native_operands_are_laid_out_as_cublas_wants_them(monkeypatch):
    seen = []

    def kernel(a, b, **options):
        seen.append((a, b, options))
        return torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)

    monkeypatch.setattr(torch, "_scaled_mm", kernel)
    x, w = torch.randn(7, 5, 32, requires_grad=True), nn.Parameter(torch.randn(16, 32))
    fp8.linear(x.transpose(0, 1), w, None, True, arithmetic().off, None).sum().backward()
    formats = [(a.dtype, b.dtype) for a, b, _ in seen]
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    assert formats == [(e4m3, e4m3), (e5m2, e4m3), (e5m2, e4m3)]
    assert [(*a.shape, b.shape[1]) for a, b, _ in seen] == [(35, 32, 16), (35, 16, 32), (16, 48, 32)]
    for a, b, options in seen:
        assert a.is_contiguous() and b.t().is_contiguous()
        assert a.shape[1] % 16 == 0 and b.shape[0] % 16 == 0 and b.shape[1] % 16 == 0
        assert options["out_dtype"] == torch.bfloat16 and options["use_fast_accum"] is False
        assert all(options[s].numel() == 1 and options[s].dtype == torch.float32 for s in ("scale_a", "scale_b"))
    assert not seen[2][0][:, 35:].float().any() and not seen[2][1][35:].float().any()


LAYOUTS = {
    "as it is": lambda t: t,
    "transposed": lambda t: t.t().contiguous().t(),
    "strided": lambda t: t.repeat(1, 2)[:, ::2],
    "one for all": lambda t: t[:1, :1].expand(t.shape),
    "apart": lambda t: t.repeat_interleave(2, 0)[::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 2, 35, 48])
def test_a_gpu_takes_every_layout(layout, rows):
    """On tensors without numbers that lie on a GPU, checked by torch's own rules for its scaled matmul."""
    turn = LAYOUTS[layout]
    with FakeTensorMode(), torch.device("cuda"):
        x, w, g = (turn(torch.randn(*size, dtype=torch.bfloat16)) for size in ((rows, 32), (64, 32), (rows, 64)))
        x8, w8, g8 = scaled(x, E4M3), scaled(w, E4M3), scaled(g, E5M2)
        assert all(t.unit.device.type == "cuda" and t.unit.dtype == torch.float32 for t in (x8, w8, g8))
        found = [
            fp8._native(x8, w8, torch.randn(64, dtype=torch.bfloat16)),
            fp8._native(g8, fp8._turned(w8), None),
            fp8._native(fp8._turned(g8), fp8._turned(x8), None),
        ]
    assert [(*y.shape, y.dtype, y.device.type) for y in found] == [
        (rows, 64, torch.bfloat16, "cuda"),
        (rows, 32, torch.bfloat16, "cuda"),
        (64, 32, torch.bfloat16, "cuda"),
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_any_layout_have_their_values(layout):
    values = LAYOUTS[layout](torch.randn(7, 32)).to(torch.float8_e4m3fn)
    rows = fp8._by_rows(values)
    assert rows.stride() == (32, 1) and torch.equal(rows.float(), values.float())
    assert fp8._by_rows(rows) is rows


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gpu_computes_every_layout(layout):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 kernels need capability 8.9")
    x, w = LAYOUTS[layout](torch.randn(48, 64, device="cuda")), torch.randn(32, 64, device="cuda")
    with Precision.load("fp8").arithmetic("cuda"):
        found, expected = (F.linear(t.requires_grad_(), LAYOUTS[layout](w)) for t in (x, x.detach().contiguous()))
    assert torch.equal(found, expected)
    for y in (found, expected):
        y.backward(LAYOUTS[layout](torch.ones_like(y)))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 1000])
def test_a_gpu_gives_what_is_emulated(rows):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 kernels need capability 8.9")
    torch.manual_seed(2)
    leaves = torch.randn(rows, 256), torch.randn(512, 256) / 16, torch.randn(512)
    gradient = torch.randn(rows, 512).bfloat16()
    results = []
    for device in ("cpu", "cuda"):
        x, w, b = (t.to(device).requires_grad_() for t in leaves)
        with Precision.load("fp8").arithmetic(device), RanDtypes() as ran:
            y = F.linear(x, w, b)
        y.backward(gradient.to(device))
        assert ran.table()["matmul"] == "float8_e4m3fn"
        results.append([t.cpu() for t in (y.detach(), x.grad, w.grad, b.grad)])
    for emulated, found in zip(*results, strict=True):
        # within a BF16 ulp of the largest: tensor cores keep fewer bits in a sum than FP32 has
        assert torch.allclose(found.float(), emulated.float(), rtol=2.0**-7, atol=2.0**-8 * emulated.abs().max().item())
        assert found.dtype == emulated.dtype


def test_sizes_that_do_not_fit_stay_in_bfloat16():
    bf16, eight = Precision.load("bf16").arithmetic(), arithmetic()
    for x, w in (((3, 16), (15, 16)), ((3, 24), (16, 24)), ((0, 16), (16, 16))):
        x, w = torch.randn(x), torch.randn(w)
        with eight, RanDtypes() as ran:
            y = F.linear(x, w)
        with bf16:
            expected = F.linear(x, w)
        assert torch.equal(y, expected) and y.dtype == torch.bfloat16
        assert ran.table()["matmul"] in ("bfloat16", "none ran")


def test_everything_else_is_as_under_bf16():
    torch.manual_seed(0)
    x, w = torch.randn(2, 16, 8, 8), torch.randn(16, 16, 3, 3)
    q = torch.randn(2, 4, 16, 16)
    operations = {
        "conv": lambda: F.conv2d(x, w),
        "attention": lambda: F.scaled_dot_product_attention(q, q, q),
        "matmul": lambda: q @ q,
        "softmax": lambda: q.softmax(-1),
        "norm": lambda: F.layer_norm(q, (16,)),
        "exp": lambda: q.exp(),
    }
    for operation in operations.values():
        results = []
        for precision in ("bf16", "fp8"):
            with Precision.load(precision).arithmetic():
                results.append(operation())
        assert results[0].dtype == results[1].dtype and torch.equal(*results)


def saved_bytes(precision, model, x):
    found = {}

    def pack(t):
        if not any(t is p for p in model.parameters()):
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), Precision.load(precision).arithmetic():
        y = model(x)
    return sum(found.values()), y


def test_half_of_what_bf16_keeps_for_backward():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    x = torch.randn(100, 64)
    eight, y = saved_bytes("fp8", model, x)
    sixteen, z = saved_bytes("bf16", model, x)
    assert eight == 4 * (64 * 100 + 4) + 3 * (64 * 64 + 4)  # the first layer's input needs no gradient
    assert eight < 0.55 * sixteen
    assert torch.allclose(y.float(), z.float(), atol=0.1)


def test_a_weight_is_rounded_once_in_a_region(monkeypatch):
    w = nn.Parameter(torch.randn(16, 16))
    x = torch.randn(2, 16)
    rounded = []
    plain = fp8.scaled
    monkeypatch.setattr(fp8, "scaled", lambda t, *rest: rounded.append(t.shape) or plain(t, *rest))
    with arithmetic():
        y = F.linear(F.linear(x, w), w)
        with torch.no_grad():
            w.mul_(2)
        z = F.linear(F.linear(x, w), w)
    assert rounded.count(w.shape) == 2 and torch.allclose(z.float(), 4 * y.float(), rtol=0.02, atol=0.05)
    with arithmetic():
        F.linear(x, w)
    assert rounded.count(w.shape) == 3


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_changes_no_bit(use_reentrant):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    x = torch.randn(8, 32, requires_grad=True)
    found = []
    for call in (model, lambda x: checkpoint(model, x, use_reentrant=use_reentrant)):
        model.zero_grad()
        x.grad = None
        counter = Counter()
        with arithmetic(counter=counter):
            y = call(x)
        (y.float() ** 2).sum().backward()
        found.append(([y.detach(), x.grad.clone(), *(p.grad.clone() for p in model.parameters())], counter.table()))
    for a, b in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(a, b)
    assert found[0][1] == found[1][1]


def test_backward_inside_the_region_is_the_same():
    torch.manual_seed(0)
    x, w = torch.randn(8, 32), nn.Parameter(torch.randn(16, 32))
    gradients = []
    for inside in (True, False):
        w.grad = None
        with arithmetic():
            loss = F.linear(x, w).float().square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        gradients.append(w.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("shape", [(8, 32), (2, 4, 32), (32,)])
def test_results_can_be_changed_in_place(shape):
    torch.manual_seed(0)
    x, w, b = torch.randn(shape, requires_grad=True), nn.Parameter(torch.randn(16, 32)), nn.Parameter(torch.randn(16))
    found = []
    for relu in (F.relu, F.relu_):
        x.grad = w.grad = b.grad = None
        with arithmetic():
            y = relu(F.linear(x.clone(), w, b))
        y.float().square().sum().backward()
        found.append([y.detach(), x.grad, w.grad, b.grad])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_inputs_can_be_changed_in_place():
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(16, 32))
    gradients = []
    for change in (False, True):
        w.grad, x = None, torch.ones(8, 32)
        with arithmetic():
            y = F.linear(x, w)
        if change:
            x.zero_()  # what backward needs of it is kept apart
        y.sum().backward()
        gradients.append(w.grad)
    assert torch.equal(*gradients)


def test_differentiating_twice_is_refused():
    x, w = torch.randn(8, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    with arithmetic():
        y = F.linear(x, w).float().square().sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


def test_counts_are_those_of_the_casts():
    torch.manual_seed(0)
    layer, counter = nn.Linear(32, 16), Counter()
    x = (torch.randn(40, 32) * torch.exp2(torch.randn(40, 32) * 6)).requires_grad_()
    handles = counter.watch([("", nn.Sequential(layer))])
    with arithmetic(counter=counter):
        y = layer(x)
    g = (torch.randn(40, 16) * torch.exp2(torch.randn(40, 16) * 9)).bfloat16()
    y.backward(g)
    table = {row["direction"]: row for row in counter.table()}
    for handle in handles:
        handle.remove()
    assert list(table) == ["input", "weight", "grad_output"] and {row["layer"] for row in counter.table()} == {"0"}
    for direction, t, form in (("input", x, E4M3), ("weight", layer.weight, E4M3), ("grad_output", g, E5M2)):
        t = t.detach().double()
        size = double(t, form).abs() / unit_of(t.float(), form)
        assert table[direction]["values"] == t.numel() and table[direction]["zero"] == 0
        assert table[direction]["flushed"] == int((size == 0).sum())
        assert table[direction]["subnormal"] == int(((size > 0) & (size < form.smallest_normal)).sum())
        assert table[direction]["overflowed"] == table[direction]["nonfinite"] == 0
    assert table["input"]["flushed"] > 0 and table["input"]["subnormal"] > 0 and table["grad_output"]["flushed"] > 0


@pytest.mark.parametrize("name", FORMATS)
def test_kinds_by_hand(name):
    form, dtype = FORMATS[name]
    tie = form.flushed_below
    before = torch.tensor([0.0, -0.0, tie, -tie, tie * 1.01, form.smallest_normal / 2, form.smallest_normal, form.max,
                           math.nan])  # fmt: skip
    expected = {"values": 9, "zero": 2, "flushed": 2, "subnormal": 2, "nonfinite": 1}
    assert count(before, before.to(dtype)).tolist() == [expected.get(kind, 0) for kind in KINDS]


def test_scaled_is_a_tensor_again():
    values = torch.tensor([1.5, -448.0]).to(torch.float8_e4m3fn)
    assert Scaled(values, torch.tensor(4.0)).image().tolist() == [6.0, -1792.0]
