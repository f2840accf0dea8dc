"""Verdicts from hand-written records: every test, every outcome, recomputed with plain NumPy and SciPy."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats
from test_results_table import summary

from mptrain.paper import Claim, Paper
from mptrain.results import claims
from mptrain.results.claim_words import in_words
from mptrain.results.claims import NOT_AT_THIS_SIZE, NOT_RUN, SHOWS, UNDECIDED, verdicts
from mptrain.results.quantities import quantity
from mptrain.results.statistics import estimate, paired_difference
from mptrain.watch.store import Store

OWN = ("value", "throughput", "memory_mib", "skipped", "attempted", "final_scale")
FP32, FP16 = [0.880, 0.884, 0.878], [0.879, 0.886, 0.877]


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """Writes runs {name: values by seed} and returns the verdict on one claim; None as a value is a diverged run."""
    named = {"fp32": ("fp32", "none"), "fp16": ("fp16", "1"), "scaled": ("fp16", "8")}
    block = {name: {"precision": p, **({} if s == "none" else {"scale": float(s)})} for name, (p, s) in named.items()}

    names = claims.files.names
    monkeypatch.setattr(claims.files, "names", lambda kind: ["resnet"] if kind == "recipe" else names(kind))

    def verdict(claim, files_of=None, more=None, **values):
        paper = Paper.model_validate({"where": "table 1", "runs": block, "claims": [{"claim": "So.", **claim}]})
        monkeypatch.setattr(claims, "paper_of", lambda recipe: paper)
        for name, results in values.items():
            precision, scale = named[name]
            for seed, value in enumerate(results):
                status = {"status": "diverged", "reason": "NaN"} if value is None else {}
                record = summary(precision=precision, scale=scale, seed=seed, metric={"value": value}, **status)
                record = {**record, **((more or {}).get((name, seed)) or {})}
                folder = tmp_path / f"{name}-{seed}"
                folder.mkdir()
                (folder / "summary.json").write_text(json.dumps(record))
                for file, content in (files_of or {}).get((name, seed), {}).items():
                    (folder / file).write_text(content)
        (found,) = verdicts([tmp_path])
        return found

    return verdict


@pytest.mark.parametrize(
    ("fp16", "expected"),
    [
        (FP16, SHOWS),
        ([0.860, 0.863, 0.858], NOT_AT_THIS_SIZE),  # two points below, all alike
        ([0.850, 0.900, 0.880], UNDECIDED),  # too noisy to say
        ([0.879], UNDECIDED),  # one seed
        ([0.879, None, 0.877], NOT_AT_THIS_SIZE),  # a diverged seed is not equal
    ],
)
def test_equal(judge, fp16, expected):
    found = judge({"test": "equal", "run": "fp16", "within": 0.01}, fp32=FP32, fp16=fp16)
    assert found.verdict == expected
    if len(fp16) == 3 and None not in fp16:
        shift = np.subtract(fp16, FP32)
        p = max(
            stats.ttest_1samp(shift, -0.01, alternative="greater").pvalue,
            stats.ttest_1samp(shift, 0.01, alternative="less").pvalue,
        )
        assert (found.verdict == SHOWS) == (p < 0.05)
        assert found.number == pytest.approx(shift.mean())
        low, high = stats.t.interval(0.90, 2, shift.mean(), stats.sem(shift))
        assert found.level == 90 and (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


@pytest.mark.parametrize(
    ("fp16", "fp32", "expected"),
    [
        ([0.8801, 0.8838, 0.8782], FP32, SHOWS),  # within +- 0.0031, the standard deviation of 0.880, 0.884 and 0.878
        ([0.870, 0.8741, 0.868], FP32, NOT_AT_THIS_SIZE),
        ([0.880], [0.880], UNDECIDED),  # one seed has no spread
    ],
)
def test_equal_within_the_spread_of_seeds(judge, fp16, fp32, expected):
    found = judge({"test": "equal", "run": "fp16", "within": "spread"}, fp32=fp32, fp16=fp16)
    assert found.verdict == expected
    if len(fp32) == 3:
        assert (found.region_low, found.region_high) == (pytest.approx(-np.std(FP32, ddof=1)), -found.region_low)
        shift, edge = np.subtract(fp16, fp32), np.std(fp32, ddof=1)
        above = stats.ttest_1samp(shift, -edge, alternative="greater").pvalue
        below = stats.ttest_1samp(shift, edge, alternative="less").pvalue
        assert (found.verdict == SHOWS) == (max(above, below) < 0.05)
    assert "within one standard deviation over the seeds of fp32" in found.test


@pytest.mark.parametrize("made", [True, False])
def test_seeds_of_several_recipes_are_pooled_and_all_have_to_be_there(judge, made):
    alexnet = {"recipe": "alexnet", "key": {**summary()["key"], "recipe": "alexnet"}}
    other = {(name, seed): alexnet for name in ("fp32", "fp16") for seed in (3, 4, 5)}
    claim = {"test": "equal", "run": "fp16", "within": 0.01, "recipes": ["alexnet"]}
    seeds = 6 if made else 3
    found = judge(claim, more=other, fp32=[*FP32, 0.70, 0.71, 0.72][:seeds], fp16=[*FP16, 0.701, 0.71, 0.719][:seeds])
    assert found.verdict == (SHOWS if made else UNDECIDED) and found.seeds == seeds
    assert ("not run: alexnet" in found.numbers) == (not made)
    if made:
        shift = np.subtract([*FP16, 0.701, 0.71, 0.719], [*FP32, 0.70, 0.71, 0.72])
        assert found.number == pytest.approx(shift.mean()) and "6 pairs of 2 recipes" in found.numbers


@pytest.mark.parametrize(
    ("fp16", "by", "expected"),
    [
        ([0.780, 0.784, 0.777], 0.0, SHOWS),
        ([0.780, 0.784, 0.777], 0.2, NOT_AT_THIS_SIZE),
        ([0.980, 0.984, 0.977], 0.0, NOT_AT_THIS_SIZE),  # better
        (FP16, 0.0, NOT_AT_THIS_SIZE),  # smaller than the task's margin of 0.01
        ([0.8757, 0.884, 0.8823], 0.0, NOT_AT_THIS_SIZE),  # 0 +- 0.0107 at 95 %, but +- 0.0073 at 90 %: equal by TOST
        ([0.780, 0.900, 0.800], 0.0, UNDECIDED),
        ([0.780], 0.0, UNDECIDED),
        ([None, None, None], 0.3, SHOWS),
        ([None], 0.0, UNDECIDED),
    ],
)
def test_worse(judge, fp16, by, expected):
    assert judge({"test": "worse", "run": "fp16", "by": by}, fp32=FP32, fp16=fp16).verdict == expected


def test_worse_of_a_metric_that_should_be_low(judge):
    def cer(value):
        return {"metric": {"name": "cer", "value": value, "higher_is_better": False, "margin": 0.01}}

    lower = {("fp32", 0): cer(0.3), ("fp32", 1): cer(0.31), ("fp16", 0): cer(0.4), ("fp16", 1): cer(0.41)}
    found = judge({"test": "worse", "run": "fp16"}, more=lower, fp32=[0, 0], fp16=[0, 0])
    assert found.verdict == SHOWS and found.number == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("fp16", "expected"),
    [
        ([0.980, 0.984, 0.977], SHOWS),  # better is no objection
        (FP16, SHOWS),
        ([0.780, 0.784, 0.777], NOT_AT_THIS_SIZE),
        ([0.850, 0.900, 0.880], UNDECIDED),
        ([None, 0.884, 0.878], NOT_AT_THIS_SIZE),
    ],
)
def test_not_worse(judge, fp16, expected):
    assert judge({"test": "not_worse", "run": "fp16", "within": 0.01}, fp32=FP32, fp16=fp16).verdict == expected


@pytest.mark.parametrize(
    ("fp32", "fp16", "expected"),
    [
        (FP32, [None, None], SHOWS),
        (FP32, [None, 0.1], UNDECIDED),
        (FP32, [0.1, 0.1], NOT_AT_THIS_SIZE),
        (FP32, [None], UNDECIDED),
        ([None, 0.8], [None, None], UNDECIDED),
    ],
)
def test_diverges(judge, fp32, fp16, expected):
    assert judge({"test": "diverges", "run": "fp16"}, fp32=fp32, fp16=fp16).verdict == expected


def test_share_of_what_was_counted(judge):
    def counts(flushed):
        rows = [{"layer": "a", "direction": "grad_weight", "values": 100, "zero": 20, "flushed": flushed},
                {"layer": "b", "direction": "grad_weight", "values": 100, "zero": 80, "flushed": 10},
                {"layer": "b", "direction": "forward", "values": 100, "zero": 0, "flushed": 100}]  # fmt: skip
        return {"counts.json": json.dumps(rows)}

    files = {("fp16", 0): counts(10), ("fp16", 1): counts(12), ("fp16", 2): counts(11)}
    claim = {"test": "share", "run": "fp16", "of": "counts.grad_weight.flushed", "above": 0.05}
    found = judge(claim, files_of=files, fp16=[0.8, 0.8, 0.8])
    shares = np.array([20, 22, 21]) / 100
    assert found.verdict == SHOWS and found.number == pytest.approx(shares.mean()) and found.seeds == 3
    assert found.low == pytest.approx(stats.t.interval(0.95, 2, shares.mean(), stats.sem(shares))[0])


def test_a_share_s_interval_ends_at_none(judge):
    def counts(flushed):
        return {"counts.json": json.dumps([{"direction": "forward", "values": 100, "zero": 0, "flushed": flushed}])}

    files = {("fp16", seed): counts(flushed) for seed, flushed in enumerate((0, 1, 3))}
    claim = {"test": "share", "run": "fp16", "of": "counts.forward.flushed", "above": 0.5}
    found = judge(claim, files_of=files, fp16=[0.8, 0.8, 0.8])
    assert found.low == 0 and found.high == pytest.approx(
        stats.t.interval(0.95, 2, 0.04 / 3, stats.sem([0, 0.01, 0.03]))[1]
    )


def test_ratio_is_geometric_and_memory_needs_one_seed(judge):
    memory = {("fp16", 0): {"memory": {"peak_mib": 60.0, "how": "live tensor bytes"}}}
    found = judge({"test": "ratio", "run": "fp16", "of": "memory", "below": 0.6}, more=memory, fp32=[0.8], fp16=[0.8])
    assert (found.verdict, found.number, found.seeds) == (SHOWS, 0.5, 1)


def test_ratio_between_two_values(judge):
    claim = {"test": "ratio", "run": "fp16", "of": "metric", "above": 0.98, "below": 1.02}
    found = judge(claim, fp32=FP32, fp16=FP16)
    logs = np.log(np.divide(FP16, FP32))
    assert found.verdict == SHOWS and found.number == pytest.approx(math.exp(logs.mean()))


def test_training_loss_is_that_of_the_last_tenth(judge):
    def log(last):
        lines = [{"step": step, "loss": 9.0} for step in range(18)] + [
            {"step": 18, "loss": last},
            {"step": 19, "loss": last},
        ]
        return {"metrics.jsonl": "\n".join(map(json.dumps, lines))}

    files = {("fp32", 0): log(1.0), ("fp32", 1): log(1.1), ("fp16", 0): log(2.0), ("fp16", 1): log(2.2)}
    found = judge(
        {"test": "worse", "run": "fp16", "of": "training loss"}, files_of=files, fp32=[0.8, 0.8], fp16=[0.8, 0.8]
    )
    assert found.number == pytest.approx(1.05)


def test_nothing_is_paired_across_devices_or_lengths(judge):
    other = {("fp16", seed): {"key": {**summary()["key"], "steps": 599}} for seed in range(3)}
    found = judge({"test": "equal", "run": "fp16"}, more=other, fp32=FP32, fp16=FP16)
    assert found.verdict == NOT_RUN
    assert found.numbers.endswith("of resnet that may be compared (3 differ in settings, length or device)")


def test_what_is_missing_is_said(judge, tmp_path):
    failed = {("fp16", 0): {"status": "failed", "reason": "disk full"}}
    found = judge({"test": "equal", "run": "fp16"}, more=failed, fp32=FP32, fp16=[0.8])
    assert found.verdict == NOT_RUN
    assert found.numbers == "no result of fp16 of resnet; 1 folder without a result"


def watched(folder, rows):
    """A record's watch.parquet as Watch writes it."""
    plain = {"step": 1, "layer": "a", "name": "weight", "dtype": "float32", "scale": None, "sampled": 0, "zero": 0}
    store = Store(folder / "watch.parquet")
    store.add([{**plain, **row} for row in rows])
    store.flush()


def test_shares_of_a_watched_run(tmp_path):
    gradient = {"kind": "grad_weight", "first_exponent": -26}
    watched(tmp_path, [
        # 2^-26, two of 2^-25, three of 2^-24 and ten zeros of 16 seen values of 32; counted twice
        {**gradient, "count": 32, "sampled": 16, "zero": 10, "exponents": [1, 2, 3]},
        # under a scale of 8 what was 2^-24 is 2^-21, so that five of six are too small
        {**gradient, "count": 6, "sampled": 6, "scale": 8.0, "first_exponent": -23, "exponents": [2, 3, 1]},
        {**gradient, "name": "products", "count": 99, "sampled": 99, "zero": 99, "exponents": []},
        # of 20 seen weights of 40, 15 have a gradient and 3 are too large for their update
        {"kind": "weight", "name": "w", "count": 40, "sampled": 20, "small_updates": 3, "exponents": [16]},
        {"kind": "weight", "name": "v", "count": 10, "sampled": 10, "small_updates": None, "exponents": [10]},
        {"kind": "grad_weight", "name": "w", "count": 40, "sampled": 20, "zero": 5, "first_exponent": -9,
         "exponents": [15]},
    ])  # fmt: skip
    run = SimpleNamespace(folder=str(tmp_path))

    def of(name):
        return quantity(SimpleNamespace(**vars(run), **dict.fromkeys(OWN, 0)), name)

    assert of("watch.grad_weight.tiny") == (2 * 3 + 5) / (2 * 6 + 6 + 2 * 15)
    assert of("watch.grad_weight.zero") == (20 + 10) / (38 + 40)
    assert of("watch.updates.small") == 3 / 15
    assert of("watch.grad_output.tiny") is None
    (tmp_path / "watch.parquet" / "000000002.parquet").write_text("rubbish")
    assert of("watch.updates.small") == 3 / 15


@pytest.mark.parametrize(
    ("written", "name", "value"),
    [
        ({"watch": "underflow, rising underflow"}, "alarms.underflow", 1.0),
        ({"watch": "rising underflow"}, "alarms.underflow", 0.0),
        ({"watch": "healthy"}, "alarms.underflow", 0.0),
        ({}, "alarms.underflow", None),
        ({"memory": {"weights_mib": 6.0}}, "memory.weights", 6.0),
        ({"memory": {"weights_mib": "6"}}, "memory.weights", None),
        ({"memory": {}}, "memory.weights", None),
    ],
)
def test_numbers_of_a_summary(tmp_path, written, name, value):
    (tmp_path / "summary.json").write_text(json.dumps(written))
    assert quantity(SimpleNamespace(folder=str(tmp_path), **dict.fromkeys(OWN, 0)), name) == value


@pytest.mark.parametrize(
    "text", ["", "[1", "[[[[", '{"a": 1}', '[{"direction": 3, "values": "x"}]', '[{"direction": "forward"}]']
)
def test_rubbish_in_a_folder_is_no_number(judge, text):
    files = {("fp16", seed): {"counts.json": text, "metrics.jsonl": text, "config.yaml": text} for seed in (0, 1)}
    claim = {"test": "share", "run": "fp16", "of": "counts.forward.flushed", "above": 0.5}
    assert judge(claim, files_of=files, fp16=[0.8, 0.8]).verdict == UNDECIDED


def test_intervals_agree_with_the_table_s_tost():
    for margin in (0.004, 0.006, 0.01):
        told = estimate(list(np.subtract(FP16, FP32)))
        inside = -margin < told.narrow[0] and told.narrow[1] < margin
        difference = paired_difference(dict(enumerate(FP16)), dict(enumerate(FP32)), margin)
        assert inside == (difference.equivalence_p < 0.05)
        assert told.wide == (pytest.approx(difference.low), pytest.approx(difference.high))


def test_claim_in_words():
    claim = Claim(claim="So.", test="ratio", run="fp16", of="memory", below=0.6)
    assert in_words(claim) == "memory of fp16 over that of fp32 is below 0.6 (paired by seed)"
