"""Number formats against torch's own limits, and TF32 rounding against exact arithmetic."""

import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mptrain.precision.formats import BFLOAT16, FLOAT16, FLOAT32, OF_DTYPE, TF32, round_tf32


@pytest.mark.parametrize("dtype", OF_DTYPE)
def test_limits_are_torchs(dtype):
    ours, theirs = OF_DTYPE[dtype], torch.finfo(dtype)
    assert ours.max == theirs.max
    assert ours.smallest_normal == theirs.smallest_normal
    smallest = torch.tensor(ours.smallest_subnormal, dtype=torch.float64)
    assert smallest.to(dtype).double() == smallest
    tie = torch.tensor(ours.flushed_below, dtype=torch.float64 if dtype == torch.float32 else torch.float32)
    assert tie.to(dtype) == 0 and torch.nextafter(tie, torch.ones_like(tie)).to(dtype) != 0


def test_known_numbers():
    assert FLOAT16.max == 65504 and FLOAT16.smallest_normal == 2.0**-14 and FLOAT16.smallest_subnormal == 2.0**-24
    assert FLOAT16.flushed_below == 2.0**-25 and FLOAT16.bias == 15
    assert BFLOAT16.smallest_subnormal == 2.0**-133 and BFLOAT16.max > 3.38e38
    assert TF32.max < FLOAT32.max and TF32.smallest_normal == FLOAT32.smallest_normal


def exact_tf32(x: float) -> float:
    """Nearest multiple of the last place of TF32, ties away from zero."""
    if x == 0 or not math.isfinite(x):
        return x
    exponent = max(math.frexp(x)[1] - 1, -126)
    unit = Fraction(2) ** (exponent - 10)
    steps = math.floor(abs(Fraction(x)) / unit + Fraction(1, 2))
    value = float(steps * unit)
    return math.copysign(value if value <= TF32.max else math.inf, x)


@given(st.floats(width=32, allow_nan=False))
def test_tf32_rounds_to_nearest_ties_away(x):
    found = round_tf32(torch.tensor([x])).item()
    assert found == exact_tf32(x) and math.copysign(1, found) == math.copysign(1, x)


def test_tf32_special_values():
    x = torch.tensor([1 + 2.0**-11, -(1 + 2.0**-11), 1 + 3 * 2.0**-11, math.inf, -math.inf, math.nan, -0.0,
                      torch.finfo(torch.float32).max, 2.0**-149])  # fmt: skip
    found = round_tf32(x)
    assert found[:3].tolist() == [1 + 2.0**-10, -(1 + 2.0**-10), 1 + 2 * 2.0**-10]
    assert found[3:5].tolist() == [math.inf, -math.inf] and found[5].isnan()
    assert struct.pack("<f", found[6].item()) == struct.pack("<f", -0.0)
    assert found[7] == math.inf and found[8] == 0
    every_nan = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    assert round_tf32(every_nan).isnan().all()


def test_tf32_twice_is_once_and_any_layout():
    x = torch.randn(64, 33)
    assert torch.equal(round_tf32(round_tf32(x)), round_tf32(x))
    for view in (x.t(), x[:, ::2], x[:1].expand(4, 33)):
        assert torch.equal(round_tf32(view), round_tf32(view.contiguous()))
    assert round_tf32(x).dtype == torch.float32 and torch.equal(x.half().float(), x.half().float())
    assert round_tf32(torch.empty(0)).shape == (0,)
