"""Every share and count from first principles, on tensors made by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mptrain.precision.blocks import every
from mptrain.watch.histogram import Histogram
from mptrain.watch.statistics import describe, measure, read
from mptrain.watch.sweep import ordinary_ends

TIE = 2.0**-25
HAND = [-0.0, 0.0, 1e-9, -1e-9, TIE, -TIE, TIE * (1 + 2.0**-20), 2.0**-24, 3e-5, 2.0**-14, 1.0, -1.5, 65504.0, 65519.0,
        65520.0, 1e6, 2.0**-149, math.inf, -math.inf, math.nan]  # fmt: skip


def test_every_count_of_a_tensor_made_by_hand():
    s = describe(torch.tensor(HAND))
    assert (s.count, s.sampled, s.zero, s.nan, s.inf) == (20, 20, 2, 1, 2)
    assert s.below == 5  # two of 1e-9, both ties, and the smallest FP32 number
    assert s.subnormal == 8  # those, the number just above the tie, 2^-24 and 3e-5
    assert s.above == 2  # 65520 and 1e6; 65519 rounds down
    assert s.histogram.exponents == {-127: 1, -30: 2, -25: 3, -24: 1, -16: 1, -14: 1, 0: 2, 15: 3, 19: 1}
    assert s.histogram.zero == 2
    finite = torch.tensor([x for x in HAND if math.isfinite(x)], dtype=torch.float64)
    assert (s.min, s.max) == (-1.5, 1e6)
    assert s.norm == pytest.approx(finite.norm().item(), rel=1e-6)
    assert s.mean == pytest.approx(finite.mean().item(), rel=1e-6)
    assert s.abs_mean == pytest.approx(finite.abs().mean().item(), rel=1e-6)
    assert s.std == pytest.approx(finite.std(correction=0).item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_formats_are_seen_exactly(dtype):
    x = torch.tensor([2.0**-24, -(2.0**-15), 0.0, 3.0], dtype=dtype)
    s = describe(x)
    assert s.histogram.exponents == {-24: 1, -15: 1, 1: 1} and s.zero == 1 and s.subnormal == 2 and s.below == 0


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1.0, 1e25])
def test_moments_at_any_magnitude(size):
    x = (torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.3) * size
    x = x.float()
    s, exact = describe(x), x.double()
    assert s.norm == pytest.approx(exact.norm().item(), rel=1e-5)
    assert s.mean == pytest.approx(exact.mean().item(), rel=1e-5)
    assert s.std == pytest.approx(exact.std(correction=0).item(), rel=1e-5)


def test_the_deviation_of_many_equal_numbers_beside_one_that_is_not_finite():
    x = torch.full((700_000,), 0.1)
    x[0], x[1:200_000] = torch.inf, -4.0
    assert describe(x).std == pytest.approx(x[1:].double().std(correction=0).item(), rel=1e-6)


def test_nothing_finite_and_nothing_at_all():
    s = describe(torch.tensor([math.nan, math.inf]))
    assert s.norm is None and s.min is None and s.mean is None and (s.nan, s.inf) == (1, 1)
    assert describe(torch.zeros(0)).count == 0
    zeros = describe(torch.tensor([0.0, -0.0]))
    assert (zeros.zero, zeros.norm, zeros.std, zeros.histogram.exponents) == (2, 0.0, 0.0, {})


def test_magnitudes_are_unscaled_and_shares_judge_the_scaled_tensor():
    x = torch.tensor([3e-9, 1e-3])
    small, large = describe(x), describe(x * 1024, scale=1024.0)
    assert small.norm == pytest.approx(large.norm) and small.max == pytest.approx(large.max)
    assert (small.below, large.below) == (1, 0)


values = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(values, max_size=30), st.lists(values, max_size=30))
def test_merged_parts_are_the_whole(a, b):
    first, second = describe(torch.tensor(a)), describe(torch.tensor(b))
    whole, merged = describe(torch.tensor(a + b)), first + second
    for name in ("count", "sampled", "zero", "nan", "inf", "subnormal", "below", "above", "histogram", "min", "max"):
        assert getattr(merged, name) == getattr(whole, name), name
    for name in ("norm", "mean", "abs_mean", "std"):
        if getattr(whole, name) is not None:
            assert getattr(merged, name) == pytest.approx(getattr(whole, name), rel=1e-4, abs=(whole.norm or 0) * 1e-4)


@settings(max_examples=60, deadline=None)
@given(st.lists(values, min_size=1, max_size=50))
def test_the_histogram_is_that_of_the_logarithm(x):
    counts = {}
    for v in x:
        if math.isfinite(v) and v != 0:
            e = max(-127, math.frexp(v)[1] - 1)
            counts[e] = counts.get(e, 0) + 1
    assert describe(torch.tensor(x, dtype=torch.float32)).histogram.exponents == counts


def test_what_fp16_does_at_every_scale_is_read_from_the_histogram():
    x = torch.randn(4000, generator=torch.Generator().manual_seed(1)) * torch.logspace(-12, 0, 4000)
    histogram = describe(x).histogram
    for k in range(0, 25, 4):
        low = (x * 2.0**k).half()
        assert histogram.flushed(2.0**k) == ((x != 0) & (low == 0)).sum().item() / 4000
        assert histogram.overflowed(2.0**k) == pytest.approx(low.isinf().sum().item() / 4000, abs=3 / 4000)


def test_spread_and_scale_of_a_histogram():
    h = Histogram({-30: 1, -20: 998, 10: 1})
    assert h.binades() == 41 and h.binades(apart=0.002) == 31
    assert h.best_scale() == 8.0  # 2^11 becomes 2^14, a quarter of the limit
    assert Histogram().binades() == 0
    assert Histogram.from_bins(*h.bins(), zero=0) == h


def test_a_sample_keeps_the_extremes_and_the_norm():
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    x[12_345], x[54_322] = 77.0, -99.0
    s = describe(x, sample=1000)
    assert (s.count, s.min, s.max) == (100_000, -99.0, 77.0) and 900 <= s.sampled <= 1000
    assert s.norm == pytest.approx(x.norm().item(), rel=1e-6)
    assert len(every(x, 1000)) == s.sampled


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_norm_of_millions_is_that_of_float64(dtype):
    x = torch.linspace(0.5, 4.0, 3_000_001).to(dtype)
    assert describe(x, sample=1000).norm == pytest.approx(x.double().norm().item(), rel=2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("place", "value"), [(5, 0.0), (5, math.nan), (5, -math.inf), (slice(9, None), 1e-20), (slice(None), 0.0)]
)
def test_a_sample_of_any_format_has_the_ends_and_the_norm_of_all(dtype, place, value):
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[place] = value
    s, whole = describe(x, sample=1000), describe(x)
    assert (s.count, s.min, s.max) == (whole.count, whole.min, whole.max) and 900 <= s.sampled <= 1000
    assert s.norm == pytest.approx(whole.norm, rel=1e-5)
    seen = describe(every(x, 1000))
    assert (s.zero, s.nan, s.inf, s.below, s.histogram) == (seen.zero, seen.nan, seen.inf, seen.below, seen.histogram)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=16), min_size=1, max_size=6), st.sampled_from([torch.float16, torch.bfloat16]))
def test_the_ends_of_sixteen_bits_are_found_among_their_bits(x, dtype):
    values = torch.tensor(x).to(dtype)
    found = ordinary_ends(values)
    if values.isfinite().all() and (values == 0).all() | (1e-15 < values.abs().max() < 1e15):
        assert found == (values.min().item(), values.max().item())
    else:
        assert found is None


def test_layouts():
    x = torch.randn(2, 3, 4, 5)
    same = [x, x.to(memory_format=torch.channels_last), x.transpose(0, 2), x[:, :, :, ::1]]
    assert len({describe(t).histogram.bins()[0] for t in same}) == 1
    assert all(describe(t).histogram == describe(x).histogram for t in same)
    assert describe(torch.ones(3).expand(4, 3)).count == 12
    table = torch.zeros(9, 1, requires_grad=True)
    F.embedding(torch.tensor([1, 1]), table, sparse=True).backward(torch.tensor([[2.0], [3.0]]))
    assert describe(table.grad).max == 5.0 and describe(table.grad).count == 1


def test_many_are_read_at_once():
    rows = [measure(torch.full((i + 1,), float(i))) for i in range(5)]
    assert [s.max for s in read(rows)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert read([]) == []
