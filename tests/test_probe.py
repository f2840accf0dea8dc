"""The verb: what it prints, what it stores, what it refuses."""

import csv
import json

import pytest

from mptrain.errors import UserError
from mptrain.probe import probe


def test_it_prints_and_stores_the_same(tmp_path, capsys):
    out = tmp_path / "probe"
    line = ["+recipe=resnet", "data=synthetic", "batch_size=8", "steps=1", "device=cpu", f"out={out}", "progress=false"]
    assert probe(line) == 0
    shown = capsys.readouterr().out
    stored = json.loads((out / "probe.json").read_text())
    assert stored["steps"] == 1 and len(stored["census"][0]["flushed"]) == 25
    # the mean over 8 pictures: the largest gradient is that of the class that was given the least
    assert 8 <= stored["terms"]["model output 1"] < 12
    assert stored["formats"]["fp16"]["matmul"] == "float16" and stored["formats"]["fp32"]["matmul"] == "float32"
    assert f"precision={stored['recommended']['precision']}" in shown and "exact zeros among" in shown
    with (out / "probe.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(stored["census"])
    assert float(table[0]["flushed_2^3"]) == stored["census"][0]["flushed"]["2^3"]


def test_it_looks_at_fp32_only(tmp_path):
    with pytest.raises(UserError, match="leave out precision="):
        probe(["+recipe=resnet", "precision=fp16", f"out={tmp_path}"])
