"""The tables of a reproduction from doctored records, to the letter; verdicts computed again from seeds.csv."""

import csv
import json
import shutil
from dataclasses import fields

import numpy as np
import pytest
from scipy import stats
from test_results_table import fp16, put, summary

from mptrain.paper import Paper
from mptrain.results import claims, reproduced
from mptrain.results.claims import Verdict
from mptrain.results.first_screen import first_screen_block, here
from mptrain.results.reproduced import write_tables
from mptrain.results.runs import find_runs

PAPER = {
    "where": "table 1",
    "metric": "top-1, %",
    "runs": {
        "fp32": {"precision": "fp32", "printed": 75.92},
        "fp16": {"precision": "fp16", "scale": 1, "printed": "diverges"},
        "scaled": {"precision": "fp16", "scale": 8, "printed": 76.04},
        "bf16": {"precision": "bf16"},
    },
    "claims": [
        {"claim": "Scaled FP16 equals FP32.", "test": "equal", "run": "scaled", "headline": "table 1: a scale helps"},
        {"claim": "Unscaled FP16 is lost.", "test": "worse", "run": "fp16", "by": 0.1},
        {"claim": "Unscaled FP16 diverges.", "test": "diverges", "run": "fp16", "headline": "table 1: a scale helps"},
        {"claim": "FP16 halves memory.", "test": "ratio", "run": "scaled", "of": "memory", "below": 0.6,
         "headline": "section 3: memory is halved"},
        {"claim": "BF16 is as good.", "test": "not_worse", "run": "bf16", "headline": "article: BF16"},
        {"claim": "Scaling skips.", "test": "share", "run": "scaled", "of": "skipped", "above": 0.001,
         "headline": "figure 1: steps are skipped"},
    ],
}  # fmt: skip

FIRST_SCREEN = """\
| paper | here (interval) | verdict |
| --- | --- | --- |
| table 1: a scale helps | scaled 0.8838, fp32 0.8840 top1: difference -0.00020 (-0.00155 to 0.00115); \
fp16: 1 of 2 seeds diverged | shows; undecided |
| figure 1: steps are skipped | scaled: 0 % skipped | not at this size |
| section 3: memory is halved | scaled 60.00, fp32 120.0 MiB: ratio 0.500 | shows |
| article: BF16 | bf16: not run | not run |
"""

REPRODUCED = """\
## Paper and here

Small networks on small data: what compares with the paper is the difference between runs, not the score.  
11 runs that took 0.1 hours in all, finished 2025-01-01 to 2026-01-01, device Xeon, torch 2.14.1, commit abc1234.  

| paper (recipe) | run | paper (metric) | here (± sd, seeds) | metric here | beside FP32 here |
| --- | --- | ---: | ---: | --- | --- |
| table 1 resnet | fp32 | 75.92 top-1, % | 0.884 ± 0.002, n=3 | top1 |  |
| table 1 resnet | fp16 | diverges | 0.71 n=1 | top1 | 1/2 diverged |
| table 1 resnet | scaled | 76.04 top-1, % | 0.8838 ± 0.0017, n=3 | top1 | equal (within 0.01) |
"""

CLAIMS = """\
| paper (recipe) | claim | verdict | numbers |
| --- | --- | --- | --- |
| table 1 resnet | Scaled FP16 equals FP32. | shows | scaled 0.8838 ± 0.0017 (n=3); fp32 0.8840 ± 0.0020 (n=3); \
difference over 3 pairs: -0.0002, 90 % interval -0.0015 to 0.0011; 2 folders without a result |
| table 1 resnet | Unscaled FP16 is lost. | undecided | fp16 0.7100 (n=1), 1/2 diverged; fp32 0.8840 ± 0.0020 (n=3); \
loss over 1 pair: 0.1740 |
| table 1 resnet | Unscaled FP16 diverges. | undecided | fp16 0.7100 (n=1), 1/2 diverged; fp32 0.8840 ± 0.0020 (n=3) |
| table 1 resnet | FP16 halves memory. | shows | scaled 60.00 MiB (n=3); fp32 120.0 MiB (n=3); \
ratio over 3 pairs: 0.5000; 2 folders without a result |
| table 1 resnet | BF16 is as good. | not run | no result of bf16 of resnet that may be compared \
(3 differ in settings, length or device) |
| table 1 resnet | Scaling skips. | not at this size | scaled 0 ± 0 (n=3); mean over 3 seeds: 0, 95 % interval 0 to 0; \
2 folders without a result |
"""


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """The folder of tables made from records that are finished, diverged, failed, NaN, and of unequal length."""
    monkeypatch.chdir(tmp_path)
    known = Paper.model_validate(PAPER)
    monkeypatch.setattr(claims, "paper_of", lambda recipe: known)
    monkeypatch.setattr(reproduced, "paper_of", lambda recipe: known)
    runs = tmp_path / "runs"
    half = {"memory": {"peak_mib": 60.0}}
    for seed, (one, other) in enumerate(((0.884, 0.883), (0.882, 0.8826), (0.886, 0.8858))):
        put(runs / f"fp32-{seed}", summary(seed=seed, metric={"value": one}))
        put(runs / f"scaled-{seed}", fp16(seed=seed, metric={"value": other}, **half))
        longer = {"key": {"steps": 601}, "finished": "2025-01-01T00:00:00+00:00"}
        put(runs / f"bf16-{seed}", summary(precision="bf16", seed=seed, metric={"value": 0.88}, **longer))
    put(runs / "nan", fp16(seed=3, metric={"value": None}))
    put(runs / "fp16-0", fp16(scale="1", metric={"value": 0.71}))
    put(runs / "fp16-1", fp16(scale="1", seed=1, status="diverged", reason="NaN", metric={"value": None}))
    put(runs / "failed", fp16(seed=4, status="failed", reason="disk full"))
    put(runs / "unfinished", None)
    put(runs / "odd", json.dumps(["no", "summary"]))
    write_tables(tmp_path / "tables", *find_runs([runs]), ["resnet"])
    return tmp_path / "tables"


def text(path):
    return path.read_text(encoding="utf-8").replace("\\", "")


def test_paper_and_here_to_the_letter(tables):
    assert text(tables / "reproduced.md") == REPRODUCED


def test_claims_to_the_letter(tables):
    found = text(tables / "claims.md")
    assert found[found.index("| paper") :] == CLAIMS


def test_without_a_baseline_nothing_is_claimed(tables, tmp_path):
    for seed in range(3):
        shutil.rmtree(tmp_path / "runs" / f"fp32-{seed}")
    write_tables(tables, *find_runs([tmp_path / "runs"]), ["resnet"])
    found = text(tables / "reproduced.md")
    assert "| table 1 resnet | fp32 | 75.92 top-1, % | not run |  |  |" in found
    assert (
        "| table 1 resnet | scaled | 76.04 top-1, % | 0.8838 ± 0.0017, n=3 | top1 | undecided (no shared seed) |"
        in found
    )
    lines = text(tables / "claims.md").splitlines()
    lost = "not run | no result of fp32 of resnet"
    assert f"| table 1 resnet | Scaled FP16 equals FP32. | {lost}; 2 folders without a result |" in lines
    assert f"| table 1 resnet | Unscaled FP16 diverges. | {lost} |" in lines


def test_first_screen_to_the_letter(tables):
    found = text(tables / "first_screen.md")
    assert found[found.index("| paper") :] == FIRST_SCREEN


def test_three_verdicts_by_hand_from_the_seeds(tables):
    with open(tables / "seeds.csv", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    with open(tables / "claims.csv", encoding="utf-8") as file:
        verdict = {line["claim"]: line for line in csv.DictReader(file)}

    def column(run, name):
        return np.array([float(line[name]) for line in lines if line["run"] == run and line[name]])

    shift = column("scaled", "value") - column("fp32", "value")
    above = stats.ttest_1samp(shift, -0.01, alternative="greater").pvalue
    below = stats.ttest_1samp(shift, 0.01, alternative="less").pvalue
    assert max(above, below) < 0.05 and verdict["Scaled FP16 equals FP32."]["verdict"] == "shows"
    assert float(verdict["Scaled FP16 equals FP32."]["number"]) == pytest.approx(shift.mean())

    ratio = np.exp(np.log(column("scaled", "memory_mib") / column("fp32", "memory_mib")).mean())
    assert ratio < 0.6 and verdict["FP16 halves memory."]["verdict"] == "shows"
    assert float(verdict["FP16 halves memory."]["number"]) == pytest.approx(ratio)

    status = [line["status"] for line in lines if line["run"] == "fp16"]
    assert 0 < status.count("diverged") < len(status) and verdict["Unscaled FP16 diverges."]["verdict"] == "undecided"


def verdict_of(**changes):
    """A line of claims.csv; shares of an interval of 95 % over three seeds unless changed."""
    line = {f.name: None for f in fields(Verdict)} | {"headline": "x", "run": "a", "against": "b", "verdict": "shows"}
    return Verdict(**{**line, "seeds": 3, "what": "share", "number": 0.12345, "low": 0.1, "high": 0.2, "metric": "",
                      **changes})  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantity": "watch.grad_weight.tiny"}, "a: 12.3 % (10.0 % to 20.0 %) below 2^-24"),
        ({"quantity": "counts.grad_input.flushed", "what": "ratio", "mean": 0.1, "mean_against": 0.81},
         "a 10.0 %, b 81.0 % flushed: ratio 0.123 (0.100 to 0.200)"),
        ({"quantity": "memory.weights", "what": "ratio", "number": 1.5, "low": 1.5, "high": 1.5, "mean": 6.0,
          "mean_against": 4.0}, "a 6.000, b 4.000 MiB of weights: ratio 1.500"),
        ({"quantity": "metric", "metric": "top1", "what": "difference", "seeds": 18},
         "a against b, 18 pairs of several recipes, top1: difference 0.123 (0.100 to 0.200)"),
        ({"quantity": "metric", "metric": "top1", "what": "loss", "seeds": 1, "low": None, "high": None, "mean": 0.5,
          "mean_against": 0.6}, "a 0.5000, b 0.6000 top1: loss 0.123 (n=1)"),
        ({"what": "", "number": None, "diverged": 2, "made": 3}, "a: 2 of 3 seeds diverged"),
        ({"verdict": "not run"}, "a: not run"),
    ],
)  # fmt: skip
def test_what_came_out_here_in_words(changes, words):
    assert here(verdict_of(**changes)) == words


def test_every_quantity_of_a_claim_stands_in_the_seeds(tables):
    with open(tables / "seeds.csv", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert {line["run"]: json.loads(line["quantities"]) for line in lines} == {
        "fp32": {"memory": 120.0}, "fp16": {}, "scaled": {"memory": 60.0, "skipped": 0.0}, "bf16": {}}  # fmt: skip


def test_recipes_that_share_a_line_are_named():
    members = [verdict_of(recipe=name, quantity="skipped", headline="figure 3") for name in ("ssd", "ssd_positives")]
    (line,) = first_screen_block(members, "made").cells
    assert line[1].main.startswith("ssd a: 12.3 %") and "; ssd_positives a: 12.3 %" in line[1].main


def test_lines_of_the_first_screen_are_ordered_as_in_the_paper():
    headlines = ["stability article: x", "section 3", "figure 2", "table 2", "table 1"]
    block = first_screen_block([verdict_of(headline=each, quantity="skipped") for each in ["", *headlines]], "made")
    assert [cells[0].main for cells in block.cells] == ["table 1", "table 2", "figure 2", "section 3", headlines[0]]
