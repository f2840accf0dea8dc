"""The tables of a reproduction from doctored records, to the letter; verdicts computed again from seeds.csv."""

import csv
import json

import numpy as np
import pytest
from scipy import stats
from test_results_table import fp16, put, summary

from mptrain.paper import Paper
from mptrain.results import claims, reproduced
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
        {"claim": "Scaled FP16 equals FP32.", "test": "equal", "run": "scaled"},
        {"claim": "Unscaled FP16 is lost.", "test": "worse", "run": "fp16", "by": 0.1},
        {"claim": "Unscaled FP16 diverges.", "test": "diverges", "run": "fp16"},
        {"claim": "FP16 halves memory.", "test": "ratio", "run": "scaled", "of": "memory", "below": 0.6},
        {"claim": "BF16 is as good.", "test": "not_worse", "run": "bf16"},
    ],
}

REPRODUCED = """\
## Paper and here

Small networks on small data: what compares with the paper is the difference between runs, not the score.  
11 runs that took 0.1 hours in all, finished 2025-01-01 to 2026-01-01, device Xeon, torch 2.14.1, commit abc1234.  

| paper (recipe) | run | paper (metric) | here (± sd, seeds) | metric here | beside FP32 here |
| --- | --- | ---: | ---: | --- | --- |
| table 1 resnet | fp32 | 75.92 top-1, % | 0.884 ± 0.002, n=3 | top1 |  |
| table 1 resnet | fp16 | diverges top-1, % | 0.71 n=1 | top1 | 1/2 diverged |
| table 1 resnet | scaled | 76.04 top-1, % | 0.8838 ± 0.0017, n=3 | top1 | equal (within 0.01) |
"""

CLAIMS = """\
| paper (recipe) | claim | verdict | numbers |
| --- | --- | --- | --- |
| table 1 resnet | Scaled FP16 equals FP32. | shows | scaled 0.8838 ± 0.0017 (n=3); fp32 0.8840 ± 0.0020 (n=3); \
difference over 3 pairs: -0.0002, 90 % interval -0.0015 to 0.0011; 1 folder without a result |
| table 1 resnet | Unscaled FP16 is lost. | undecided | fp16 0.7100 (n=1), 1/2 diverged; fp32 0.8840 ± 0.0020 (n=3); \
loss over 1 pair: 0.1740 |
| table 1 resnet | Unscaled FP16 diverges. | undecided | fp16 0.7100 (n=1), 1/2 diverged; fp32 0.8840 ± 0.0020 (n=3) |
| table 1 resnet | FP16 halves memory. | shows | scaled 60.00 ± 0 (n=3); fp32 120.0 ± 0 (n=3); \
ratio over 3 pairs: 0.5000; 1 folder without a result |
| table 1 resnet | BF16 is as good. | not run | no result of bf16 of resnet that may be compared \
(3 differ in settings, length or device) |
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
