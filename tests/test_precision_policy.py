"""Which operation runs in which format: against the installed torch's own CUDA lists and its own test cases."""

import re
from pathlib import Path

import pytest
import torch
from torch.testing._internal.autocast_test_lists import AutocastTestLists

from mptrain.precision import dispatch, policy
from mptrain.precision.modes import Precision

OURS = (
    policy.LOWER_PRECISION
    | policy.LOWER_PRECISION_CUDNN
    | policy.FP32
    | policy.FP32_SET_OPT_DTYPE
    | frozenset(policy.FP32_APPEND_DTYPE)
    | policy.PROMOTE
    | frozenset(policy.BANNED)
)
RECENT = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)
NEWER = {"rms_norm", "linalg_matrix_sqrth"}
"""on the list since 2.12 and 2.14"""


def test_lists_are_what_torch_registers_for_cuda():
    registered = {name for name in dispatch.of_torch("cuda") if "imname" not in name and "names_" not in name}
    assert registered <= OURS
    assert OURS - registered <= (set() if RECENT else NEWER)


@pytest.mark.skipif(not RECENT, reason="the lists are those of torch 2.14")
@pytest.mark.parametrize(
    "macro, ours",
    [
        ("LOWER_PRECISION_FP", policy.LOWER_PRECISION),
        ("FP32", policy.FP32),
        ("FP32_SET_OPT_DTYPE", policy.FP32_SET_OPT_DTYPE),
        ("PROMOTE", policy.PROMOTE),
    ],
)
def test_lists_are_the_headers_macros(macro, ours):
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    body = re.search(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)+.*)\n", header).group(1)
    found = {".".join(re.split(r",\s*", names)) for names in re.findall(r"_\(([^)]*)\)", body)}
    assert found - ours <= {"linalg_matrix_sqrth"} and ours - found <= {"linalg_matrix_sqrth"}


def test_every_operation_is_in_one_class():
    classes = [
        policy.LOWER_PRECISION, policy.LOWER_PRECISION_CUDNN, policy.FP32, policy.FP32_SET_OPT_DTYPE,
        frozenset(policy.FP32_APPEND_DTYPE), policy.PROMOTE, frozenset(policy.BANNED), policy.RECURRENT,
        policy.CONV_PADDING,
    ]  # fmt: skip
    assert sum(map(len, classes)) == len(frozenset().union(*classes))
    assert policy.LOWER_PRECISION | policy.RECURRENT | policy.CONV_PADDING | {"dot", "vdot"} >= policy.TENSOR_CORE


# torch's own cases for CUDA autocast, run on this CPU under our arithmetic.

torch.manual_seed(0)
LISTS = AutocastTestLists(torch.device("cpu"))


def cast(value, dtype):
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return type(value)(cast(v, dtype) for v in value) if isinstance(value, (list, tuple)) else value


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
    return all(same(x, y) for x, y in zip(a, b, strict=True)) if isinstance(a, (list, tuple)) else a == b


def functions(name, module, arguments):
    found = [getattr(module, name)] if module is not None and hasattr(module, name) else []
    if hasattr(torch.Tensor, name) and isinstance(arguments[0], torch.Tensor):
        found.append(getattr(torch.Tensor, name))
    return found


def split(case):
    name, arguments, *rest = case
    return name, arguments, rest[0] if rest and isinstance(rest[0], dict) else {}


def cases(*lists):
    return [
        pytest.param(module, case, id=f"{case[0]}-{i}")
        for attribute, module in lists
        for i, case in enumerate(getattr(LISTS, attribute))
        if not case[0].startswith("cudnn_") and case[0] != "einsum"
    ]


def arithmetic(name="fp16"):
    return Precision.load(name).arithmetic()


LOW = cases(("torch_fp16", torch), ("nn_fp16", torch._C._nn), ("linalg_fp16", torch._C._linalg), ("methods_fp16", None))
HIGH = cases(("torch_fp32", torch), ("nn_fp32", torch._C._nn), ("methods_fp32", None))
PROMOTED = cases(("torch_need_autocast_promote", torch))
BUILTIN = cases(("torch_expect_builtin_promote", torch), ("methods_expect_builtin_promote", None))
PIECES = ("chain_matmul", "linalg_multi_dot")
"""composites, whose pieces are rounded one by one"""


def tensors(value):
    return [value] if isinstance(value, torch.Tensor) else list(value)


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("module, case", LOW)
def test_lower_precision(module, case):
    name, arguments, options = split(case)
    for function in functions(name, module, arguments):
        with arithmetic():
            result = function(*arguments, **options)
        assert {t.dtype for t in tensors(result)} == {torch.float16}
        expected = function(*cast(cast(arguments, torch.float16), torch.float32), **options)
        if name in PIECES:
            torch.testing.assert_close(result.float(), expected, rtol=2e-3, atol=2e-2)
        else:
            assert same(result, cast(expected, torch.float16))
        with arithmetic("bf16"):
            assert {t.dtype for t in tensors(function(*arguments, **options))} == {torch.bfloat16}


def test_einsum():
    x, y = torch.randn(2, 3, 4, 5), torch.randn(2, 6, 4, 5)
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        with arithmetic(name):
            result = torch.einsum("bkhd,bqhd->bqkh", x, y)
        assert result.dtype == dtype
        expected = torch.einsum("bkhd,bqhd->bqkh", x.to(dtype).float(), y.to(dtype).float())
        torch.testing.assert_close(result.float(), expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("module, case", HIGH)
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_fp32(module, case, name):
    operation, arguments, options = split(case)
    low = torch.float16 if name == "fp16" else torch.bfloat16
    arguments = cast(arguments, low) if name == "bf16" else arguments
    for function in functions(operation, module, arguments):
        with arithmetic(name):
            result = function(*arguments, **options)
        assert result.dtype == torch.float32
        assert same(result, function(*cast(arguments, torch.float32), **options))


@pytest.mark.filterwarnings("ignore:Using torch.cross without specifying the dim")
@pytest.mark.parametrize("module, case", PROMOTED)
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_promote(module, case, name):
    operation, arguments, options = split(case)
    low = torch.float16 if name == "fp16" else torch.bfloat16
    mixed = tuple(
        a.to(low) if isinstance(a, torch.Tensor) and a.dtype == torch.float16 else
        (tuple(a) if isinstance(a, tuple) else a) for a in arguments
    )  # fmt: skip
    for function in functions(operation, module, arguments):
        with arithmetic(name):
            result = function(*mixed, **options)
            narrow = function(*cast(mixed, low), **options)
        assert result.dtype == torch.float32
        assert same(result, function(*cast(mixed, torch.float32), **options))
        assert narrow.dtype == low
        if operation == "grid_sampler":  # torch's own 16-bit kernel, which rounds its coordinates
            continue
        expected = function(*cast(cast(mixed, low), torch.float32), **options)
        torch.testing.assert_close(narrow.float(), expected, rtol=2**-7 if name == "bf16" else 2**-10, atol=2**-7)


@pytest.mark.parametrize("module, case", BUILTIN)
def test_builtin_promotion_is_untouched(module, case):
    name, arguments, dtype = case
    for function in functions(name, module, arguments):
        with arithmetic():
            result = function(*arguments)
        assert not isinstance(result, torch.Tensor) or result.dtype == dtype
        assert same(result, function(*arguments))


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_banned(name):
    operation, arguments, module = LISTS.banned[0]
    with arithmetic(name), pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
        getattr(module, operation)(*arguments)
    with arithmetic(name), torch.autocast("cpu", enabled=False):
        assert getattr(module, operation)(*arguments).dtype == torch.float32


def test_asked_dtypes_are_given():
    x = torch.randn(4, 4).half()
    with arithmetic():
        assert x.sum(dtype=torch.float16).dtype == torch.float16
        assert x.softmax(0, torch.float64).dtype == torch.float64
        assert torch.cumsum(x, 0, dtype=torch.float16).dtype == torch.float16
        assert x.double().sum().dtype == torch.float64 and x.long().sum().dtype == torch.int64
        assert torch.mm(x.double(), x.double()).dtype == torch.float64
        assert x.double().norm().dtype == torch.float64
        assert x.norm(p=2, dim=1, keepdim=True).shape == (4, 1)


UNLISTED = {
    "relu": lambda x: x.relu(), "mul": lambda x: x * x, "add": lambda x: x + 1, "mean": lambda x: x.mean(),
    "max_pool2d": lambda x: torch.nn.functional.max_pool2d(x, 2), "cat": lambda x: torch.cat([x, x]),
    "avg_pool2d": lambda x: torch.nn.functional.avg_pool2d(x, 2), "stack": lambda x: torch.stack([x, x]),
    "avg_pool3d": lambda x: torch.nn.functional.avg_pool3d(x, 2), "gelu": torch.nn.functional.gelu,
    "max_pool3d": lambda x: torch.nn.functional.max_pool3d(x, 2), "tanh": torch.tanh, "sigmoid": torch.sigmoid,
    "adaptive_avg_pool2d": lambda x: torch.nn.functional.adaptive_avg_pool2d(x, 2),
    "adaptive_avg_pool3d": lambda x: torch.nn.functional.adaptive_avg_pool3d(x, 2),
    "reflection_pad": lambda x: torch.nn.functional.pad(x, (1, 1, 1, 1), mode="reflect"),
    "replication_pad": lambda x: torch.nn.functional.pad(x, (1, 1, 1, 1), mode="replicate"),
    "batch_norm": lambda x: torch.nn.functional.batch_norm(x, None, None, training=True),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5), "embedding": lambda x: x[0, 0][torch.tensor([0, 1])],
    "quantile": lambda x: x.float().quantile(0.5).to(x.dtype), "trace": lambda x: x[0, 0].trace(),
    "grid_sample": lambda x: torch.nn.functional.grid_sample(
        x, torch.zeros(2, 2, 2, 2, dtype=x.dtype), align_corners=False),
}  # fmt: skip


@pytest.mark.parametrize("name", UNLISTED)
def test_unlisted_operations_keep_their_format(name):
    x = torch.randn(2, 3, 4, 4)
    for precision, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        low = x.to(dtype).requires_grad_()
        with arithmetic(precision):
            result = UNLISTED[name](low)
        assert result.dtype == dtype
        result.float().sum().backward()
        assert low.grad.dtype == dtype
        with arithmetic(precision):
            assert UNLISTED[name](x).dtype == torch.float32


def test_operations_kept_in_fp32_by_name():
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    linear = torch.nn.functional.linear(x, w)
    for name in ("fp16", "bf16", "fp16_acc16"):
        with Precision.load(name, keep_fp32=["linear", "einsum", "conv2d", "lstm", "dot"]).arithmetic():
            assert torch.equal(torch.nn.functional.linear(x, w), linear)
            assert torch.nn.functional.linear(x.half(), w).dtype == torch.float32
            assert torch.einsum("ij,jk->ik", x, w).dtype == torch.float32
            assert torch.nn.functional.conv2d(x[None], w[None, None], padding=2).dtype == torch.float32
            assert torch.nn.functional.conv2d(x[None], w[None, None, :3, :3], padding="same").dtype == torch.float32
            assert torch.nn.LSTM(4, 4)(x)[0].dtype == torch.float32
            assert torch.dot(x[0].half(), x[0].half()).dtype == torch.float32
            assert torch.mm(x, w).dtype in (torch.float16, torch.bfloat16)
