"""The report's figures: every number follows from the records, and drawing adds nothing that could act."""

import builtins
import json
import math
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from mptrain.errors import UserError
from mptrain.results.csvfile import write_csv
from mptrain.results.report import charts
from mptrain.results.report.curves import binned, curves, logs, read_log, thinned, turns
from mptrain.results.report.heatmap import heatmap, shortened
from mptrain.results.report.inside import Losses
from mptrain.results.report.memory import MIB, Memory, estimated, memory_part, recorded
from mptrain.results.report.page import script


def written(folder, lines):
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    return str(folder)


def group(*rows):
    return SimpleNamespace(rows=list(rows))


def row(folders, seeds, precision="fp16", scale="dynamic"):
    return SimpleNamespace(
        precision=precision, scale=scale, backend="emulated", folders=" | ".join(folders), seeds=seeds, metric="top1",
        recipe="tiny",
    )  # fmt: skip


def texts(figure):
    return [[cell.main for cell in line] for line in figure.cells]


def test_a_log_is_read_without_what_is_malformed_in_it(tmp_path):
    folder = written(tmp_path, [
        {"step": 10, "loss": 2.0, "scale": 8.0},
        {"step": 11, "loss": None, "scale": 4.0, "skipped": True},
        {"step": 20, "loss": {"generator": 1.0, "<b>": "x"}, "scale": -1},
        {"step": "30", "loss": 1.0},
        {"step": 20, "eval": {"top1": 0.5, "other": 1.0}},
        {"alarm": {}},
        '{"step": 40, "loss": 1.0, "sca',
    ])  # fmt: skip
    log = read_log(folder, "0", "top1")
    assert log.values == {"loss": {10: 2.0}, "loss of generator": {20: 1.0}, "top1": {20: 0.5}}
    assert log.scale == {10: 8.0, 11: 4.0} and log.skipped == [11] and log.last == 20


def test_windows_are_means_and_end_at_their_last_step():
    assert binned({1: 1.0, 2: 3.0, 3: 5.0, 7: 9.0}, 2, 7) == {2: 2.0, 4: 5.0, 7: 9.0}
    assert binned({10: 1.0}, 1, 10) == {10: 1.0}
    assert thinned(list(range(10)), 4) == [0, 3, 6, 9] and thinned([1, 2], 4) == [1, 2] and thinned([], 4) == []
    assert turns({1: 8.0, 2: 8.0, 3: 4.0, 4: 4.0}) == [(1, 8.0), (3, 4.0), (4, 4.0)]


def test_a_curve_has_the_mean_and_range_of_its_seeds_and_a_table_of_them(tmp_path):
    folders = [
        written(tmp_path / str(seed), [{"step": s, "loss": s * (1 + seed)} for s in (10, 20)]) for seed in (0, 1)
    ]
    other = written(tmp_path / "fp32", [{"step": 10, "loss": 5.0}])
    given = group(row(folders, "0 1"), row([other], "0", "fp32", "none"))
    [figure] = curves("tiny", given, logs(given))
    assert figure.name == "tiny-loss" and "mean of 1 to 2 seeds" in figure.caption
    assert [column.heading for column in figure.columns] == ["step", "fp16, scale dynamic", "fp32, scale none"]
    assert texts(figure) == [["10", "15", "5"], ["20", "30", ""]]
    assert [line[1].detail for line in figure.cells] == ["10..20", "20..40"]


def test_a_long_log_is_averaged_and_says_so(tmp_path):
    folder = written(tmp_path, [{"step": s, "loss": 100.0 / s} for s in range(1, 601)])
    given = group(row([folder], "0"))
    [figure] = curves("tiny", given, logs(given))
    assert "means over 10 steps, logarithmic axis" in figure.caption
    assert texts(figure)[0] == ["30", f"{sum(100 / s for s in range(21, 31)) / 10:.4g}"] and len(figure.cells) == 20


def test_scales_are_drawn_where_they_moved_or_skipped(tmp_path):
    lines = [{"step": s, "scale": v, **({"skipped": True} if s in (2, 3) else {})}
             for s, v in ((1, 8.0), (2, 4.0), (3, 2.0), (4, 2.0))]  # fmt: skip
    given = group(row([written(tmp_path / "a", lines)], "3"), row([written(tmp_path / "b", lines[3:])], "3", scale="2"))
    [figure] = curves("tiny", given, logs(given))
    assert texts(figure) == [["fp16, scale dynamic", "2", "8", "2", "8", "2", "2, 3"]]
    assert figure.name == "tiny-scale"


def test_a_heatmap_has_the_shares_it_was_given():
    losses = Losses(["conv", "fc"], [5, 10], {("conv", 5): 0.25, ("fc", 5): 0.0, ("fc", 10): 0.0001}, True)
    [figure] = heatmap("tiny", "tiny, fp16", losses)
    assert texts(figure) == [["conv", "25.0%", ""], ["fc", "0.0%", "<0.1%"]] and "counted exactly" in figure.caption
    assert heatmap("tiny", "", Losses([], [], {}, True)) == []
    assert shortened(["fc", "a" * 30 + ".conv1"]) == {"fc": "fc", "a" * 30 + ".conv1": "…" + "a" * 21 + ".conv1"}
    twins = ["x" + "a" * 30, "y" + "a" * 30]
    assert shortened(twins) == dict(zip(twins, twins, strict=True))


def test_pictures_are_the_same_every_time_and_hold_shapes_and_texts_only():
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    hostile = "</svg><script>alert(1)</script>&\" onload='x'"
    points = [{"run": hostile, "step": s, "mean": 1.0 + s, "low": 1.0, "high": 9.0} for s in range(4)]
    first, again = (charts.inline(charts.lines(points, hostile, False), "a") for _ in range(2))
    assert first == again
    root = ElementTree.fromstring(first)
    for element in root.iter():
        assert element.tag in charts.KEPT_TAGS
        assert set(element.attrib) <= charts.KEPT_ATTRIBUTES | {"aria-hidden"}, element.attrib
    assert "alert(1)" in "".join(root.itertext()) and "<script" not in first and "http" not in first
    other = charts.inline(charts.lines(points, "y", True), "b")
    ids = [{e.get("id") for e in ElementTree.fromstring(text).iter() if e.get("id")} for text in (first, other)]
    assert not ids[0] & ids[1]


def test_each_kind_of_picture_can_be_drawn_and_saved(tmp_path):
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    scale = [{"run": "r", "seed": "r 0", "step": s, "scale": 2.0**s} for s in range(3)]
    shares = [{"layer": "fc", "step": s, "share": 0.5} for s in range(3)]
    bars = [{"run": "r", "kind": k, "value": 1.5, "place": i} for i, k in enumerate(("weights", "activations"))]
    drawn = [
        charts.steps(scale, scale[:1]),
        charts.heat(shares, ["fc"], "lost"),
        charts.bars(bars, ["r"], ["weights", "activations"], "MiB"),
    ]
    for chart in drawn:
        assert charts.inline(chart, "x").startswith("<svg viewBox=")
    saved = charts.files_of(drawn[0])
    assert saved["png"].startswith(b"\x89PNG") and saved["svg"].startswith(b"<svg")
    heights = [float(e.get("height", "nan")) for e in ElementTree.fromstring(saved["svg"]).iter() if e.get("height")]
    assert not any(map(math.isnan, heights))


def test_a_missing_library_is_told_with_what_to_type(monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **named):
        if name == "altair":
            raise ModuleNotFoundError("No module named 'altair'", name="altair")
        return real(name, *rest, **named)

    charts.altair.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"altair is not installed; type: pip install 'mptrain\[report\]'"):
        charts.lines([], "loss", False)
    charts.altair.cache_clear()


def memory(recipe, precision, batch_size, own, *sizes):
    return Memory(recipe, precision, batch_size, own, *(size * MIB for size in sizes))


def test_the_committed_memory_is_whole_and_mixed_precision_takes_less_of_activations():
    lines = estimated()
    recipes = {line.recipe for line in lines}
    assert len(recipes) >= 6 and write_csv(lines, Memory) == script("memory.csv")
    for recipe in recipes:
        own = {line.precision: line for line in lines if line.recipe == recipe and line.own_batch}
        assert own.keys() == {"fp32", "fp16", "fp16_master"}
        assert own["fp16"].activations < own["fp32"].activations
        assert own["fp16"].weights == own["fp32"].weights > own["fp16_master"].weights >= own["fp32"].weights / 2
        assert all(size >= 0 for line in own.values() for size in line.kinds.values())


def test_memory_by_kind_is_a_share_of_fp32_and_the_page_gets_every_batch(monkeypatch):
    lines = [
        memory("a", "fp32", 2, False, 1, 0, 1, 2, 2, 0, 0),
        memory("a", "fp32", 8, True, 1, 0, 1, 2, 4, 0, 2),
        memory("a", "fp16", 8, True, 1, 0, 1, 2, 0, 0, 1),
    ]
    monkeypatch.setattr(charts, "inline", lambda chart, name: "<svg/>")
    monkeypatch.setattr(charts, "bars", lambda points, rows, kinds, title: points)
    part, [figure] = memory_part(lines)
    assert texts(figure)[1] == ["a", "1.00", "0.00", "1.00", "2.00", "0.00", "0.00", "1.00", "5.00", "0.50x"]
    assert sum(point["value"] for point in figure.chart() if point["run"] == "a, fp16") == 0.5
    data = json.loads(part.html.partition('id="memory-data">')[2].partition("</script>")[0])
    [network] = data["networks"]
    assert network["own"] == 1 and [batch["size"] for batch in network["batches"]] == [2, 8]
    assert network["batches"][0]["bytes"] == {"fp32": [MIB, 0, MIB, 2 * MIB, 2 * MIB, 0, 0]}


def test_memory_that_a_record_tells_apart_is_drawn_of_the_largest_run(tmp_path):
    for seed, size in ((0, 1.0), (1, 2.0)):
        written(tmp_path / str(seed), [])
        kinds = {"weights": size, "activations": 3.0}
        (tmp_path / str(seed) / "summary.json").write_text(json.dumps({"memory": {"kinds_mib": kinds}}))
    for name, content in (
        ("odd", {"memory": {"kinds_mib": {"weights": "<b>"}}}),
        ("old", {"memory": {"peak_mib": 1.0}}),
    ):
        written(tmp_path / name, [])
        (tmp_path / name / "summary.json").write_text(json.dumps(content))
    given = group(row([str(tmp_path / "0"), str(tmp_path / "1")], "0 1"), row([str(tmp_path / "odd")], "0", "bf16"))
    [figure] = recorded("tiny", given)
    assert texts(figure) == [["fp16, scale dynamic", "2.00", "0.00", "0.00", "0.00", "3.00", "0.00", "0.00", "5.00"]]
    assert recorded("tiny", group(row([str(tmp_path / "old")], "0"))) == []
