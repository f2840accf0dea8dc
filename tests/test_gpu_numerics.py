"""On a CUDA GPU: native kernels against the emulation, element by element, and against CUDA autocast's policy."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mptrain import files
from mptrain.precision import hardware
from mptrain.precision.modes import Precision
from mptrain.precision.ran import RanDtypes

pytestmark = pytest.mark.gpu
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
ULP = {"fp16": 2.0**-10, "bf16": 2.0**-7}


def native(name):
    precision = Precision.load(name)
    if precision.backend("cuda") != "native":
        pytest.skip(f"this GPU has no {name} units")
    return precision.arithmetic("cuda")


def emulated(name):
    return Precision.load(name, kernels="emulated").arithmetic("cuda")


def randn(*size):
    return torch.randn(*size, device="cuda")


PRODUCTS = {
    "linear": (F.linear, (64, 512), (96, 512)),
    "matmul": (torch.matmul, (3, 64, 512), (512, 96)),
    "bmm": (torch.bmm, (4, 33, 257), (4, 257, 65)),
    "addmm": (torch.addmm, (64, 96), (64, 512), (512, 96)),
    "baddbmm": (torch.baddbmm, (4, 33, 65), (4, 33, 257), (4, 257, 65)),
    "mv": (torch.mv, (64, 512), (512,)),
    "conv1d": (F.conv1d, (4, 16, 65), (24, 16, 5)),
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1), (4, 16, 17, 17), (24, 16, 3, 3)),
    "conv3d": (F.conv3d, (2, 8, 7, 7, 7), (16, 8, 3, 3, 3)),
    "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w, stride=2), (4, 16, 9, 9), (16, 24, 4, 4)),
}


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_are_the_fp32_sum_rounded_once(product, name):
    """Native and emulated results both lie within one rounding, and the error of an FP32 sum, of the exact one."""
    function, *sizes = PRODUCTS[product]
    torch.manual_seed(0)
    exact = [randn(*size).to(DTYPES[name]).double().requires_grad_() for size in sizes]
    expected = function(*exact)
    gradient = torch.randn_like(expected).to(DTYPES[name])
    expected.backward(gradient.double())
    size_of_sum = function(*(t.detach().abs() for t in exact))
    for region in (native(name), emulated(name)):
        inputs = [t.detach().float().requires_grad_() for t in exact]
        with hardware.tf32(False):
            with region:
                result = function(*inputs)
            result.backward(gradient)
        assert result.dtype == DTYPES[name]
        room = ULP[name] * expected.abs() + 2.0**-17 * size_of_sum
        assert bool(((result.double() - expected).abs() <= room).all())
        for t, reference in zip(inputs, exact, strict=True):
            assert t.grad.dtype == torch.float32
            assert torch.equal(t.grad, t.grad.to(DTYPES[name]).float())  # was rounded to 16 bits
            error = (t.grad.double() - reference.grad).norm() / reference.grad.norm()
            assert error < ULP[name]


def test_native_and_emulated_differ_in_few_elements_and_by_one_step():
    torch.manual_seed(0)
    x, w = randn(512, 1024), randn(512, 1024)
    results = []
    for region in (native("fp16"), emulated("fp16")):
        with hardware.tf32(False), region:
            results.append(F.linear(x, w))
    a, b = (r.view(torch.int16).int() for r in results)  # neighbours differ by 1 among numbers of one sign
    apart = (a - b).abs()[results[0].sign() == results[1].sign()]
    assert (apart > 0).float().mean() < 0.05
    large = (results[0].abs() > 1)[results[0].sign() == results[1].sign()]
    assert apart[large].max() <= 1


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("name", DTYPES)
def test_recurrent_layers_of_cudnn(kind, name):
    torch.manual_seed(0)
    layer, x = kind(64, 96, num_layers=2, batch_first=True).cuda(), randn(8, 12, 64)
    found = []
    for region in (native(name), emulated(name)):
        layer.zero_grad()
        with hardware.tf32(False):
            with region, RanDtypes() as ran:
                output, _ = layer(x)
            output.float().square().mean().backward()
        assert output.dtype == DTYPES[name]
        assert DTYPES[name] in {torch.float16, torch.bfloat16} and str(DTYPES[name])[6:] in ran.table()["matmul"]
        found.append((output.float(), [p.grad.clone() for p in layer.parameters()]))
    (a, grads_a), (b, grads_b) = found
    torch.testing.assert_close(a, b, atol=16 * ULP[name], rtol=0)  # cuDNN rounds the states inside
    for p, q in zip(grads_a, grads_b, strict=True):
        assert (p - q).norm() / q.norm() < 32 * ULP[name]


@pytest.mark.parametrize("name", files.names("precision"))
def test_recurrent_weights_are_where_cudnn_wants_them(name):
    """It would remark on it otherwise, whatever format they are kept in; so it is while they are evaluated in FP32."""
    precision, layer = Precision.load(name), nn.LSTM(32, 32, num_layers=2).cuda()
    weights, x = precision.prepare(layer), randn(5, 4, 32)
    with hardware.tf32(False):
        with precision.arithmetic("cuda"):
            output, _ = layer(x)
        output.float().sum().backward()
        with weights.evaluating(fp32=True), torch.no_grad():
            exact, _ = layer(x)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in layer.parameters())
    assert exact.dtype == torch.float32
    torch.testing.assert_close(output.float(), exact, atol=2.0**-5, rtol=0)


@pytest.mark.parametrize("operation", ["matmul", "conv", "rnn"])
def test_tf32_is_really_off_and_really_on(operation):
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no TF32")
    torch.manual_seed(0)
    modules = {
        "matmul": (nn.Linear(1024, 256, bias=False), randn(128, 1024)),
        "conv": (nn.Conv2d(64, 64, 3, bias=False), randn(8, 64, 16, 16)),
        "rnn": (nn.LSTM(512, 512), randn(8, 16, 512)),
    }
    module, x = modules[operation]
    with torch.no_grad():
        exact = module.double().cuda()(x.double())
        module = module.float()
        errors = {}
        for allowed in (False, True):
            with hardware.tf32(allowed):
                result = module(x)
            first, reference = (r[0] if isinstance(r, tuple) else r for r in (result, exact))
            errors[allowed] = float((first.double() - reference).norm() / reference.norm())
    assert errors[False] < 1e-5
    assert errors[True] > 5e-5


def test_tf32_is_what_the_emulation_makes_of_it():
    torch.manual_seed(0)
    x, w = randn(256, 512), randn(128, 512)
    with hardware.tf32(True), native("tf32"):
        on_the_device = F.linear(x, w)
    with hardware.tf32(False), emulated("tf32"):
        by_us = F.linear(x, w)
    exact = F.linear(x.double(), w.double())
    error = (by_us.double() - exact).norm()
    assert 0.5 < (on_the_device.double() - exact).norm() / error < 2.5  # hardware may cut where we round
    assert (on_the_device - by_us).norm() < 3 * error


# The policy, by torch's own test cases for CUDA autocast.


def split(case):
    name, arguments, *rest = case
    return name, arguments, rest[0] if rest and isinstance(rest[0], dict) else {}


def dtypes(function, arguments, options, region):
    with region:
        result = function(*arguments, **options)
    return [t.dtype for t in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(t, torch.Tensor)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["fp16"])
def test_every_operation_runs_in_the_format_of_native_autocast(name):
    pytest.importorskip("expecttest")
    from torch.testing._internal.autocast_test_lists import AutocastTestLists

    here, on_cpu = (AutocastTestLists(torch.device(device)) for device in ("cuda", "cpu"))
    modules = {"torch": torch, "nn": torch._C._nn, "linalg": torch._C._linalg}
    lists = [f"{m}_{kind}" for m in modules for kind in ("fp16", "fp32") if hasattr(here, f"{m}_{kind}")]
    lists += ["torch_need_autocast_promote", "torch_expect_builtin_promote"]
    checked, wrong = 0, []
    for attribute in lists:
        module = modules[attribute.partition("_")[0]]
        for case, twin in zip(getattr(here, attribute), getattr(on_cpu, attribute), strict=True):
            operation, arguments, options = split(case)
            if operation == "einsum" or not hasattr(module, operation):
                continue
            function = getattr(module, operation)
            expected = dtypes(function, arguments, options, torch.autocast("cuda", DTYPES[name]))
            regions = {"native": native(name), "emulated": emulated(name)}
            found = {k: dtypes(function, arguments, options, region) for k, region in regions.items()}
            if not operation.startswith("cudnn_"):
                found["on a CPU"] = dtypes(function, split(twin)[1], options, Precision.load(name).arithmetic("cpu"))
            wrong += [(operation, where, got, expected) for where, got in found.items() if got != expected]
            checked += 1
    assert checked > 80
    assert not wrong
