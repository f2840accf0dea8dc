"""Each alarm's rule, on rows made by hand."""

import numpy as np
import pytest

from mptrain.watch import underflow
from mptrain.watch.alarms import Alarms, adam_overshoot, replay, rising, slope
from mptrain.watch.store import REAL, WHOLE


def row(step=1, layer="a", kind="output", name="", exponents=(10,), first=0, **values):
    empty = dict.fromkeys((*WHOLE, *REAL))
    counts = {"zero": 0, "nan": 0, "inf": 0, "count": sum(exponents), "sampled": sum(exponents), "order": 0}
    return {**empty, **counts, "step": step, "layer": layer, "kind": kind, "name": name, "dtype": "float16",
            "first_exponent": first, "exponents": list(exponents), "min": -1.0, "max": 1.0, **values}  # fmt: skip


def counted(layer, flushed, step=1, kind="grad_weight", **values):
    return row(step, layer, kind, "products", (), count=1000, sampled=1000, zero=200, flushed=flushed, **values)


def rules(*rows):
    return {alarm.rule: alarm for alarm in Alarms().look(rows)}


def test_five_percent_of_what_was_not_zero():
    assert "underflow" not in rules(row(), counted("a", 39))
    found = rules(row(), counted("a", 40), counted("b", 0))["underflow"]
    assert found.layers == ("a",) and "1 of 2 layers (50%)" in found.evidence and "5.0%" in found.evidence


def test_a_sample_stands_for_the_whole_of_its_tensor():
    large = {**counted("a", 40), "count": 9000}  # 40 of 800 nonzero, nine times as many in all
    small = counted("b", 0)
    assert underflow.flushed_share([large, small]) == pytest.approx(9 * 40 / (9 * 800 + 800))
    assert rules(row(), large, small)["underflow"].layers == ("a",)


def test_advice_reads_the_histogram():
    low = row(kind="grad_weight", name="weight", first=-20, exponents=(5,), scale=128.0)
    high = row(kind="grad_weight", name="weight", first=13, exponents=(5,), scale=128.0)
    assert underflow.advice([low]) == "raise the loss scale: the largest gradient leaves room for 1.09951e+12 (now 128)"
    assert underflow.advice([low, high]).startswith("move to BF16")


def test_a_rise_is_tested_and_a_flat_share_is_healthy():
    up, flat, late, little = Alarms(), Alarms(), Alarms(), Alarms()
    for i in range(12):
        up.look([counted("a", 2 + 2 * i, step=10 * i + 1)])
        flat.look([counted("a", 16 + i % 2, step=10 * i + 1)])
        late.look([counted("a", 2 + 2 * i, step=10 * i + 1001)])
        little.look([counted("a", 6 + i % 2, step=10 * i + 1)])
    assert [a.rule for a in up.found] == ["rising underflow"]
    assert little.verdict() == "healthy"
    assert flat.verdict() == "no alarm (2.1% of the gradients are rounded to zero)"
    assert late.verdict() == "no alarm (3.0% of the gradients are rounded to zero)"


def test_mann_kendall():
    # n = 5, all pairs concordant: one of the 5! orders
    assert rising([1, 2, 3, 4, 5]) == pytest.approx(1 / 120)
    # one pair swapped: 4 further orders have as many concordant pairs
    assert rising([1, 2, 3, 5, 4]) == pytest.approx(5 / 120)
    assert rising([5, 4, 3, 2, 1]) == rising([1, 1, 1]) == 1.0
    assert slope([(1, 0.0), (11, 1.0), (21, 2.0), (31, 3.0), (41, 90.0)]) == pytest.approx(0.1)


def test_noise_is_no_trend():
    random = np.random.default_rng(0)
    assert sum(rising(random.random(20)) < 0.01 for _ in range(300)) <= 8  # 3 are expected


def test_no_scale_holds_more_than_forty_binades():
    wide = dict(kind="grad_weight", name="weight", first=-30)
    assert "too wide for FP16" not in rules(row(**wide, exponents=[10] * 40))
    assert "41 powers" in rules(row(**wide, exponents=[10] * 41))["too wide for FP16"].evidence


def test_what_fp16_cannot_hold_is_seen_before_it_is_rounded():
    gradient = row(kind="grad_weight", name="weight", first=-24, exponents=[10] * 40)
    products = {**counted("a", 90), "first_exponent": -40, "exponents": [1] * 56}
    assert "56 powers" in rules(gradient, products)["too wide for FP16"].evidence


def test_bf16_has_the_range_of_fp32():
    wide = row(kind="grad_weight", name="weight", first=-60, exponents=[10] * 60, dtype="float32")
    large = row(max=1e6, dtype="bfloat16")
    assert not rules(wide, large)
    assert set(rules(wide, row(max=1e6, dtype="float32"))) == {"too wide for FP16", "activations near overflow"}


def test_activations_within_a_factor_of_four():
    assert "activations near overflow" not in rules(row(max=16375.0))
    assert rules(row(min=-16376.0))["activations near overflow"].layers == ("a",)
    assert "activations near overflow" in rules(row(inf=1))


def test_buffers_and_lost_updates():
    assert rules(row(kind="buffer", name="running_var", nan=1))["buffers not finite"].layers == ("a",)
    weight = dict(kind="weight", name="weight", exponents=(100,))
    assert rules(row(**weight, lost=50))["updates lost to rounding"].layers == ("a",)
    assert not rules(row(**weight, lost=49))


def scales(*values):
    found = Alarms(floor=1.0)
    for i, scale in enumerate(values):
        found.look([row(step=10 * i + 1, scale=scale)])
    return [alarm.rule for alarm in found.found]


def test_scale():
    assert scales(65536.0, 4096.0, 4096.0, 4096.0, 8192.0) == []  # finding its place
    assert scales(64.0, 8.0, 1.0, 1.0, 1.0) == ["scale at its floor"]
    assert scales(*[2.0**20] * 6, 2.0**9) == ["scale collapsed"]
    assert scales(1.0, 1.0, 1.0, 1.0, 1.0) == []  # static


def test_the_scale_alarm_names_the_layers_that_overflowed_and_since_when():
    found = Alarms(floor=1.0)
    bad = dict(layer="c", kind="grad_weight", name="weight")
    for step, scale, inf in [(10, 64.0, 0), (20, 8.0, 1), (30, 1.0, 0), (40, 1.0, 0), (50, 1.0, 0)]:
        found.look([row(step, scale=scale, **bad, inf=inf), row(step, "d", "grad_weight", "weight", scale=scale)])
    (alarm,) = found.found
    assert (alarm.rule, alarm.step, alarm.layers) == ("scale at its floor", 50, ("c",))
    assert "since step 30" in alarm.evidence and "BF16" in alarm.advice


def test_zero_gradients_under_adam():
    found = Alarms()
    moment = dict(kind="moment", name="weight.exp_avg_sq")
    for step, zero in [(1, 0), (10, 10), (20, 10), (30, 10)]:
        gradient = row(step, kind="grad_weight", name="weight", exponents=(10 - zero,), zero=zero, sampled=10)
        found.look([row(step, **moment), gradient])
    assert [a.rule for a in found.found] == ["gradients are zero"]
    assert "for 21 steps" in found.found[0].evidence


def test_a_spell_of_zeros_is_told_again_when_it_is_ten_times_as_long():
    found, told = Alarms(), []
    moment = dict(kind="moment", name="weight.exp_avg_sq")
    for step in range(1, 4002):
        zero = 10 * (step > 1)
        gradient = row(step, kind="grad_weight", name="weight", exponents=(10 - zero,), zero=zero, sampled=10)
        told += found.look([row(step, **moment), gradient])
    assert [(alarm.step, alarm.grade) for alarm in told] == [(4, 0), (101, 1), (1001, 2)]
    assert "for 1000 steps" in told[2].evidence and "peaks at 1.58" in told[2].evidence
    assert found.verdict() == "gradients are zero"


def test_the_overshoot_is_that_of_the_optimizer_s_own_betas():
    found = Alarms(betas={("a", "weight"): (0.5, 0.9)})
    moment = dict(kind="moment", name="weight.exp_avg_sq")
    for step, zero in [(1, 0), (10, 10), (20, 10), (30, 10)]:
        gradient = row(step, kind="grad_weight", name="weight", exponents=(10 - zero,), zero=zero, sampled=10)
        found.look([row(step, **moment), gradient])
    m, v, peak = 0.5**21, 0.9**21, 1.0
    for _ in range(100):
        m, v = 0.5 * m + 0.5, 0.9 * v + 0.1
        peak = max(peak, m / v**0.5)
    assert f"peaks at {peak:.2f} times" in found.found[0].evidence and peak > 1.4


@pytest.mark.parametrize(("steps", "peak"), [(100, 1.07), (1000, 1.6), (3000, 3.5), (10000, 6.6)])
def test_what_adam_does_after_a_spell_of_zeros(steps, peak):
    assert adam_overshoot(steps) == pytest.approx(peak, rel=0.03)


def test_an_alarm_is_told_once_and_a_table_can_be_read_again():
    found = Alarms()
    first = [row(1, max=2e4)]
    assert len(found.look(first)) == 1 and not found.look([row(2, max=3e4)])
    assert len(found.look([row(3, layer="b", max=3e4)])) == 1
    assert replay(first).found == found.found[:1]
