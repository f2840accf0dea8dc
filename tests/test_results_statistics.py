"""Statistics of the table against hand-computed values, scipy, and the rules that hold for every data set."""

import math
import statistics

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from mptrain.results.statistics import (
    Difference,
    InconsistentStatistics,
    Spread,
    decimals,
    paired_difference,
    spread,
    verdict,
)

numbers = st.floats(-1e100, 1e100)


def test_spread_by_hand():
    found = spread([1.0, 2.0, 6.0])
    assert (found.n, found.mean, found.minimum, found.median, found.maximum) == (3, 3.0, 1.0, 2.0, 6.0)
    assert found.sd == math.sqrt(7)  # (4 + 1 + 9) / 2
    assert spread([0.5]) == Spread(1, 0.5, None, 0.5, 0.5, 0.5)


def test_mean_of_equal_values_is_that_value():
    assert spread([0.1, 0.1, 0.1]).mean == 0.1  # a naive sum gives 0.10000000000000002


@given(st.lists(numbers, min_size=1, max_size=20))
def test_spread_obeys_its_own_rules(values):
    found = spread(values)
    assert min(values) <= found.mean <= max(values)
    assert (found.minimum, found.maximum) == (min(values), max(values))


def test_impossible_published_statistics_are_refused():
    with pytest.raises(InconsistentStatistics, match="mean - median"):
        Spread(15, 0.26795, 0.00136, 0.262, 0.26529, 0.271)
    with pytest.raises(InconsistentStatistics, match="min <= mean"):
        Spread(2, 3.0, 1.0, 1.0, 2.0, 2.0)
    with pytest.raises(InconsistentStatistics, match="low <= difference"):
        Difference(3, 1.0, 2.0, 3.0, None)


def test_paired_difference_by_hand():
    # differences 1, 2, 3: mean 2, sd 1, error 1/sqrt(3), t(2, 97.5 %) = 4.302652729911275
    found = paired_difference({0: 2.0, 1: 4.0, 2: 6.0}, {0: 1.0, 1: 2.0, 2: 3.0}, margin=0.5)
    assert (found.pairs, found.mean) == (3, 2.0)
    assert found.low == pytest.approx(2 - 4.302652729911275 / math.sqrt(3), rel=1e-9)
    assert found.high == pytest.approx(2 + 4.302652729911275 / math.sqrt(3), rel=1e-9)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=12),
    st.floats(1e-3, 0.5),
)
def test_interval_and_tost_agree_with_scipy(pairs, margin):
    values = {seed: pair[0] for seed, pair in enumerate(pairs)}
    baseline = {seed: pair[1] for seed, pair in enumerate(pairs)}
    deltas = [a - b for a, b in pairs]
    found = paired_difference(values, baseline, margin)
    assume(statistics.stdev(deltas) > 1e-6)  # scipy has no interval for equal differences
    interval = stats.ttest_1samp(deltas, 0).confidence_interval(0.95)
    assert found.low == pytest.approx(interval.low, rel=1e-6, abs=1e-9)
    assert found.high == pytest.approx(interval.high, rel=1e-6, abs=1e-9)
    below = stats.ttest_1samp(deltas, margin, alternative="less").pvalue
    above = stats.ttest_1samp(deltas, -margin, alternative="greater").pvalue
    assert found.equivalence_p == pytest.approx(max(below, above), rel=1e-6, abs=1e-9)


def test_only_shared_seeds_are_paired():
    assert paired_difference({0: 1.0, 1: 5.0}, {1: 4.0, 2: 9.0}, 0.1) == Difference(1, 1.0, None, None, None)
    assert paired_difference({0: 1.0}, {1: 1.0}, 0.1) is None


def test_equal_differences_have_an_interval_of_a_point():
    assert paired_difference({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0}, 0.0) == Difference(2, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("deltas", "higher_is_better", "words"),
    [
        ([0.001, -0.001, 0.0005], True, "equal (within 0.01)"),
        ([-0.05, -0.051, -0.049], True, "worse by 0.0500"),
        ([-0.05, -0.051, -0.049], False, "better by 0.0500"),
        ([0.05, 0.051, 0.049], True, "better by 0.0500"),
        ([0.05, -0.05, 0.02], True, "undecided"),
        ([0.0], True, "undecided (n=1 seed)"),
        ([], True, "undecided (no shared seed)"),
        ([0.0, 0.0], True, "equal (within 0.01)"),
        ([0.02, 0.02], False, "worse by 0.0200"),
    ],
)
def test_verdict(deltas, higher_is_better, words):
    baseline = dict.fromkeys(range(len(deltas)), 0.0)
    difference = paired_difference(dict(enumerate(deltas)), baseline, 0.01)
    assert verdict(difference, 0.01, higher_is_better, 4) == words


def test_a_shown_difference_is_never_printed_as_zero():
    assert verdict(Difference(2, -3e-7, -4e-7, -2e-7, 1.0), 0.0, True, 4) == "worse by 3e-07"


def test_decimals_show_the_margin_with_two_more():
    assert [decimals(margin) for margin in (0.01, 0.005, 0.5, 1.0, 25.0, 0.0, None)] == [4, 5, 3, 2, 1, 4, 4]
