"""The table from hand-written records: what is compared, what is listed, and the words of every output."""

import csv
import io
import json
import os
import random
import resource
import subprocess
import sys
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mptrain.errors import UserError
from mptrain.results.between import Pair, pair_up
from mptrain.results.cells import arithmetic
from mptrain.results.compare import compare
from mptrain.results.csvfile import read_csv, write_csv
from mptrain.results.row import Row, table_of
from mptrain.results.runs import Excluded, Run, find_runs
from mptrain.results.shared import side_by_side
from mptrain.results.statistics import InconsistentStatistics
from mptrain.results.summary import LARGEST_SUMMARY
from mptrain.results.table import build_table
from mptrain.results.terminal import print_document
from mptrain.results.words import document_of


def summary(**changes):
    """A finished FP32 run; mappings among the changes are merged into those of the record."""
    record = {
        "schema": 1,
        "status": "finished",
        "reason": None,
        "recipe": "resnet",
        "precision": "fp32",
        "scale": "none",
        "seed": 0,
        "device": "cpu",
        "backend": "native",
        "dtypes": {"matmul": "float32", "softmax": "float32", "norm": "float32", "loss": "float32"},
        "metric": {"name": "top1", "value": 0.884, "higher_is_better": True, "margin": 0.01},
        "metrics": {"loss": 0.4},
        "throughput": {"value": 2000.0, "unit": "images/s", "warmup": 5, "steps": 600},
        "memory": {"peak_mib": 120.0, "how": "live tensor bytes"},
        "steps": {"attempted": 600, "applied": 600, "skipped": 0},
        "final_scale": None,
        "data": {"name": "fashion", "kind": "real"},
        "environment": {
            "torch": "2.14.1",
            "device_name": "Xeon",
            "commit": "abc1234",
            "tf32": {"matmul": "ieee", "conv": "ieee", "rnn": "ieee"},
        },
        "eval_precision": "fp32",
        "finished": "2026-01-01T00:01:00+00:00",
        "wall_s": 31.2,
        "key": {
            "recipe": "resnet",
            "data": "fashion",
            "steps": 600,
            "batch_size": 128,
            "accumulate": 1,
            "settings": "5e77",
            "device": "cpu",
            "torch": "2.14.1",
        },
    }
    for name, value in changes.items():
        record[name] = {**record[name], **value} if isinstance(record.get(name), dict) else value
    return {"precision_label": record["precision"], **record}


def fp16(**changes):
    """A finished FP16 run on the emulating backend."""
    dtypes = {"matmul": "float16", **changes.pop("dtypes", {})}
    return summary(**{"precision": "fp16", "scale": "8", "backend": "emulated", "dtypes": dtypes, **changes})


def put(folder, record):
    """Write a run folder; None leaves it unfinished, a text is written as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("recipe: resnet\n")
    if record is not None:
        text = record if isinstance(record, str) else json.dumps(record)
        (folder / "summary.json").write_text(text, encoding="utf-8")


def table(*records, baseline="fp32", folder):
    for number, record in enumerate(records):
        put(folder / f"{number:03}", record)
    return build_table(*find_runs([folder]), baseline)


def row(found, precision, scale="none"):
    (wanted,) = [
        each for each in found.rows if (each.section, each.precision, each.scale) == ("result", precision, scale)
    ]
    return wanted


def printed(found, width=120):
    out = io.StringIO()
    print_document(document_of(found), out, width)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


MIXED = """\
resnet on fashion (real data), 600 steps, batch 64
device cpu Xeon, torch 2.14.1, commit abc1234, settings 5e77
top1 (higher is better) evaluated in fp32; throughput in images/s; peak memory in MiB (live tensor bytes); dtypes of
matmul/softmax/norm/loss
precision      seeds       top1     minus fp32  verdict        throughput  memory     skipped  arithmetic
scale          status      ± sd  95 % interval  paired seeds        ratio   ratio  last scale  dtypes
──────────────────────────────────────────────────────────────────────────────────────────────────────────────
fp16           1         0.8700                 no baseline          2000   120.0       0/600  emulated
scale 8        finished                                               n/a     n/a              f16/f32/f32/f32
  - no FP32 baseline with this key: delta empty (runs/batch64)

resnet on fashion (real data), 600 steps, batch 128
device cpu Xeon, torch 2.14.1, commit abc1234, settings 5e77
top1 (higher is better) evaluated in fp32; throughput in images/s; peak memory in MiB (live tensor bytes); dtypes of
matmul/softmax/norm/loss
precision      seeds       top1     minus fp32  verdict        throughput  memory     skipped  arithmetic
scale          status      ± sd  95 % interval  paired seeds        ratio   ratio  last scale  dtypes
──────────────────────────────────────────────────────────────────────────────────────────────────────────────
fp32           1         0.8840                 baseline             2000   120.0       0/600  native
scale none     finished                                             1.00x   1.00x              f32/f32/f32/f32
fp16           1         0.8830        -0.0010  undecided            1500   60.00       2/600  emulated
scale 8        finished                         (n=1 seed)          0.75x   0.50x           8  f16/f32/f32/f32

Kept apart
  - resnet: batch_size 64 and 128 are not compared with each other

Not in the table
  - failed: runs/crashed (recipe resnet, precision fp16, scale 8, seed 0): CUDA out of memory
  - no metric: runs/nan (recipe resnet, precision fp16, scale 8, seed 2): finished, but its top1 is not a number
  - duplicate: runs/ok16 (recipe resnet, precision fp16, scale 8, seed 0): finished before runs/ok16-again, the same run
  again
"""


def test_mixed_folder_gives_exactly_this_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    runs = tmp_path / "runs"
    put(runs / "ok32", summary())
    put(runs / "ok16", fp16(metric={"value": 0.1}))
    later = {"finished": "2026-01-02T00:00:00+00:00", "metric": {"value": 0.883}, "throughput": {"value": 1500.0}}
    put(runs / "ok16-again", fp16(memory={"peak_mib": 60.0}, steps={"skipped": 2}, final_scale=8.0, **later))
    put(runs / "crashed", fp16(status="failed", reason="CUDA out of memory", metric={"value": None}))
    put(runs / "batch64", fp16(metric={"value": 0.87}, key={"batch_size": 64}))
    put(runs / "nan", fp16(seed=2, metric={"value": None}))
    assert compare(["runs"]) == 0
    assert "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines()) == MIXED


def test_every_field_of_a_run_comes_from_its_record(tmp_path):
    record = fp16(
        status="diverged", reason="step 9", precision_label="fp16 keep_fp32=[fc]", scale="dynamic interval=100", seed=3,
        device="cuda", dtypes={"softmax": "float64", "norm": "bfloat16"}, final_scale=0.5,
        metric={"name": "fid", "value": 1.5, "higher_is_better": False, "margin": 0.25},
        throughput={"value": 7.5, "unit": "tokens/s"}, memory={"peak_mib": 3.5, "how": "cuda"},
        steps={"attempted": 60, "applied": 50, "skipped": 10}, data={"kind": "composite"}, eval_precision="bf16",
        environment={"torch": "2.0", "device_name": "H200", "commit": "fff"},
    )  # fmt: skip
    put(tmp_path / "a", record)
    ((run,), ()) = find_runs([tmp_path])
    expected = Run(
        folder=str(tmp_path / "a"), source=str(tmp_path), status="diverged", reason="step 9", recipe="resnet",
        precision="fp16", precision_label="fp16 keep_fp32=[fc]", scale="dynamic interval=100", seed=3, device="cuda",
        backend="emulated", dtypes=record["dtypes"], metric="fid", value=1.5, higher_is_better=False, margin=0.25,
        throughput=7.5, throughput_unit="tokens/s", memory_mib=3.5, memory_how="cuda", attempted=60, skipped=10,
        final_scale=0.5, data="fashion", data_kind="composite", device_name="H200", torch="2.0", commit="fff",
        eval_precision="bf16", finished=run.finished, key=record["key"],
    )  # fmt: skip
    assert run == expected
    assert run.finished.isoformat() == record["finished"]


def test_seeds_are_averaged_and_paired(tmp_path):
    base, half = [0.880, 0.884, 0.891], [0.879, 0.886, 0.889]
    records = [summary(seed=seed, metric={"value": value}) for seed, value in enumerate(base)]
    records += [fp16(seed=seed, metric={"value": value}, steps={"skipped": 1}) for seed, value in enumerate(half)]
    found = row(table(*records, folder=tmp_path), "fp16", "8")
    assert found.seeds == "0 1 2" and (found.finished, found.pairs, found.median) == (3, 3, 0.886)
    assert found.mean == pytest.approx(sum(half) / 3) and found.sd == pytest.approx(0.005131601, abs=1e-9)
    assert found.difference == pytest.approx(-0.001 / 3)
    # sd of (-0.001, 0.002, -0.002) is 0.0020816660, times t(2) 4.30265273 / sqrt(3)
    assert found.difference_high - found.difference == pytest.approx(0.00517115, abs=1e-8)
    assert (found.skipped, found.attempted) == (3, 1800)
    assert found.verdict == "equal (within 0.01)"


@pytest.mark.parametrize(
    ("values", "text"), [([0.88], ""), ([0.88, 0.9], "0.8800..0.9000"), ([0.88, 0.9, 0.89], "± 0.0100")]
)
def test_spread_is_the_range_for_two_seeds_and_the_sd_for_more(tmp_path, values, text):
    records = [summary(seed=seed, metric={"value": value}) for seed, value in enumerate(values)]
    (block,) = document_of(table(*records, folder=tmp_path)).blocks
    assert block.cells[0][2].detail == text


def test_rows_are_ordered_by_precision_then_scale(tmp_path):
    labels = [
        ("fp32", "none"),
        ("tf32", "none"),
        ("bf16", "none"),
        ("bf16_pure", "none"),
        ("fp16", "none"),
        ("fp16", "8"),
    ]
    labels += [("fp16", "128"), ("fp16", "layerwise"), ("fp16", "dynamic"), ("fp16_nomaster", "8"), ("fp8", "dynamic")]
    records = [summary(precision=precision, scale=scale) for precision, scale in labels]
    random.Random(0).shuffle(records)
    assert [(each.precision, each.scale) for each in table(*records, folder=tmp_path).rows] == labels


@pytest.mark.parametrize(
    "change",
    [{"key": {"batch_size": 64}}, {"key": {"new_setting": 1}}, {"metric": {"margin": 0.5}}, {"eval_precision": "fp16"}]
    + [{"environment": {"device_name": "H200"}}, {"data": {"kind": "synthetic"}}],
)
def test_nothing_is_compared_across_a_difference(tmp_path, change):
    found = table(summary(), fp16(**change), folder=tmp_path)
    assert len(found.groups) == 2
    assert (row(found, "fp16", "8").verdict, row(found, "fp16", "8").difference) == ("no baseline", None)


def test_native_and_emulated_seeds_are_not_averaged(tmp_path):
    found = table(summary(), fp16(seed=0), fp16(seed=1, backend="native"), folder=tmp_path)
    assert [(each.backend, each.seeds) for each in found.rows[1:]] == [("emulated", "0"), ("native", "1")]


def test_of_duplicates_the_one_that_finished_last_is_kept(tmp_path):
    later = summary(metric={"value": 0.9}, finished="2026-01-01T00:30:00-01:00")  # 01:30 UTC
    found = table(later, summary(finished="2026-01-01T01:00:00+00:00"), summary(finished="2026-01-01"), folder=tmp_path)
    assert [(each.mean, each.status) for each in found.rows] == [
        (0.9, "finished"),
        (None, "duplicate"),
        (None, "duplicate"),
    ]


def test_memory_is_the_largest_peak_and_throughput_the_mean(tmp_path):
    records = [
        summary(seed=n, memory={"peak_mib": size}, throughput={"value": size})
        for n, size in enumerate((8.0, 12.0, 7.0))
    ]
    (found,) = table(*records, folder=tmp_path).rows
    assert (found.memory_mib, found.throughput) == (12.0, 9.0)


@pytest.mark.parametrize("change", [{"scale": "8"}, {"precision_label": "fp32 keep_fp32=[x]"}])
def test_a_changed_fp32_run_is_no_baseline(tmp_path, change):
    found = table(summary(**change), fp16(), folder=tmp_path)
    assert {each.verdict for each in found.rows} == {"no baseline"}


def test_fp32_with_tf32_on_is_not_fp32(tmp_path):
    changes = {"device": "cuda", "key": {"device": "H200"}, "environment": {"tf32": {"matmul": "ieee", "conv": "tf32"}}}
    (found,) = table(summary(**changes), folder=tmp_path).rows
    assert (found.section, found.status, found.reason) == (
        "excluded",
        "not fp32",
        "called fp32, but TF32 was on for conv",
    )


def test_divergence_is_a_result_and_survivors_do_not_speak_for_it(tmp_path):
    lost = {"status": "diverged", "metric": {"value": None}}
    records = [
        summary(seed=0),
        summary(seed=1),
        fp16(seed=0),
        fp16(seed=1),
        fp16(seed=2, reason="step 7: conv1", **lost),
    ]
    found = table(*records, fp16(scale="dynamic", reason="step 9", **lost), folder=tmp_path)
    some, every = row(found, "fp16", "8"), row(found, "fp16", "dynamic")
    assert (some.status, some.reason, some.mean) == ("1/3 diverged", "seed 2: step 7: conv1", 0.884)
    assert some.verdict == "1/3 diverged, the others: equal (within 0.01)"
    assert (every.status, every.mean, every.verdict, every.finished) == ("diverged", None, "diverged", 0)
    text = printed(found)
    assert "fp16, scale 8: 1/3 diverged: seed 2: step 7: conv1" in text
    assert "fp16, scale dynamic: diverged: seed 0: step 9" in text


def test_a_diverged_baseline_leaves_the_others_undecided(tmp_path):
    found = table(summary(status="diverged", metric={"value": None}), fp16(), folder=tmp_path)
    assert row(found, "fp16", "8").verdict == "undecided (the baseline diverged)"
    assert row(found, "fp16", "8").throughput_ratio is None


@pytest.mark.parametrize("missing", [None, 0, 0.0, -1.0])
def test_missing_throughput_and_memory_are_not_available(tmp_path, missing):
    base = summary(throughput={"value": missing}, memory={"peak_mib": missing})
    found = table(base, fp16(), folder=tmp_path)
    first, second = found.rows
    assert (first.throughput, first.memory_mib, second.throughput_ratio, second.memory_ratio) == (None,) * 4
    assert [cell.main for cell in document_of(found).blocks[0].cells[0][5:7]] == ["n/a", "n/a"]


def test_memory_measured_in_two_ways_has_no_ratio(tmp_path):
    found = table(summary(), fp16(memory={"how": "torch.cuda.max_memory_allocated"}), folder=tmp_path)
    assert row(found, "fp16", "8").memory_ratio is None


@pytest.mark.parametrize(
    ("device", "minute", "beside", "ratios"),
    [
        ("cpu", 1, [0, 0], [1.0, 0.9]),  # one after the other
        ("cpu", 0, [1, 1], [None, None]),
        ("cuda", 0, [0, 0], [1.0, 0.9]),  # each had its own GPU
    ],
)
def test_runs_that_shared_their_cpus_have_no_throughput_ratio(tmp_path, device, minute, beside, ratios):
    def at(minutes):
        return f"2026-01-01T00:{minutes:02}:30+00:00"

    first = summary(device=device, started=at(0), finished=at(1))
    second = fp16(device=device, started=at(minute), finished=at(minute + 1), throughput={"value": 1800.0})
    found = table(first, second, folder=tmp_path)
    (group,) = found.groups
    assert [row.beside for row in group.rows] == beside
    assert [row.throughput_ratio for row in group.rows] == ratios
    told = "2 of 2 runs shared their CPUs with another run: their throughput has no ratio"
    assert (told in document_of(found).blocks[0].notes) == (sum(beside) == 2)


def test_side_by_side_is_told_of_long_runs_around_short_ones(tmp_path):
    def run(name, start, end):
        at = [f"2026-01-01T00:{minute:02}:00+00:00" for minute in (start, end)]
        put(tmp_path / name, summary(seed=start, started=at[0], finished=at[1]))

    run("long", 0, 9), run("within", 2, 3), run("also", 5, 6), run("after", 9, 12), run("alone", 20, 21)
    assert {folder.rpartition("/")[2] for folder in side_by_side(find_runs([tmp_path])[0])} == {
        "long",
        "within",
        "also",
    }


def test_another_baseline(tmp_path):
    records = [summary(), fp16(metric={"value": 0.9}), summary(precision="bf16", metric={"value": 0.8})]
    found = table(*records, baseline="bf16", folder=tmp_path)
    assert row(found, "bf16").verdict == "baseline"
    assert row(found, "fp16", "8").difference == pytest.approx(0.1)
    assert row(found, "fp32").difference == pytest.approx(0.084)
    assert "minus bf16" in printed(found)


def test_a_baseline_nobody_ran_is_a_mistake(tmp_path, capsys):
    put(tmp_path / "a", summary())
    assert compare([str(tmp_path), "--baseline", "fp31"]) == 1
    said = "mptrain: No run has precision fp31; there are fp32. Type: mptrain compare --baseline fp32.\n"
    assert capsys.readouterr().err == said


def test_seeds_without_partner_are_said(tmp_path):
    found = table(summary(seed=0), fp16(seed=0), fp16(seed=1), folder=tmp_path)
    assert (row(found, "fp16", "8").finished, row(found, "fp16", "8").pairs) == (2, 1)
    assert "fp16, scale 8: compared over the 1 of its 2 seeds that fp32 has" in printed(found)


def test_a_precision_that_did_not_take_effect_is_said(tmp_path):
    assert "fp16, scale 8: its matrix products ran in float32" in printed(
        table(fp16(dtypes={"matmul": "float32"}), folder=tmp_path)
    )


def test_dtypes_are_shortened_but_never_made_up(tmp_path):
    record = fp16(dtypes={"matmul": "float16 and float32", "softmax": "none ran"})
    del record["dtypes"]["loss"]
    (found,) = table(record, folder=tmp_path).rows
    assert found.matmul == "float16 and float32"
    assert arithmetic(found).detail == "f16+f32/-/f32/unknown"


def test_unfinished_unreadable_and_strange_runs_are_listed(tmp_path):
    put(tmp_path / "going", None)
    put(tmp_path / "cut", json.dumps(summary())[:100])
    put(tmp_path / "bare", json.dumps(summary(metric={"value": float("nan")})))
    put(tmp_path / "newer", summary(schema=2))
    put(tmp_path / "huge", " " * (LARGEST_SUMMARY + 1))
    put(tmp_path / "deep", "[" * 200_000)
    put(tmp_path / "text", summary(seed="0"))
    put(tmp_path / "lost", {name: value for name, value in summary().items() if name != "steps"})
    put(tmp_path / "odd", summary(steps={"attempted": 1, "skipped": 2}))
    put(tmp_path / "other", summary(key={"recipe": "ssd"}))
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "summary.json").symlink_to(tmp_path / "going" / "config.yaml")
    os.mkfifo(tmp_path / "linked" / "config.yaml")
    runs, excluded = find_runs([tmp_path])
    found = {Path(each.folder).name: (each.status, each.reason) for each in excluded}
    assert runs == []
    assert found["going"] == ("unfinished", "no summary.json: still running or interrupted")
    assert found["bare"] == ("unreadable", "summary.json: is not strict JSON: it holds a bare NaN; null is meant")
    assert found["newer"] == ("unreadable", "summary.json: has schema 2; this version of mptrain reads schema 1")
    assert found["huge"] == ("unreadable", "summary.json: has 5.0 MB; a summary has at most 5 MB")
    assert found["text"] == ("unreadable", 'summary.json: seed should be a whole number, got "0"')
    assert found["lost"] == ("unreadable", "summary.json: lacks steps (an object)")
    assert found["odd"] == ("unreadable", "summary.json: has 2 skipped of 1 attempted steps")
    assert found["other"] == ("unreadable", "summary.json: names recipe 'resnet' but key.recipe 'ssd'")
    assert found["linked"][1] == "summary.json: is a link or another special file; only plain files are read"
    assert {"cut", "deep"} <= found.keys() and len(found) == 11


def test_links_checkpoints_and_hidden_folders_are_not_searched(tmp_path):
    put(tmp_path / "outside", summary())
    put(tmp_path / "runs" / "a", summary())
    put(tmp_path / "runs" / "a" / ".hydra", None)
    put(tmp_path / "runs" / "a" / "checkpoints", None)
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "runs" / "a" / "loop").symlink_to(tmp_path / "runs")
    runs, excluded = find_runs([tmp_path / "runs", tmp_path / "runs" / "a"])
    assert [run.folder for run in runs] == [str(tmp_path / "runs" / "a")] and excluded == []


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
json_values = st.recursive(
    values, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner)
)
paths = st.sampled_from(
    [(name,) for name in summary()]
    + [(name, inner) for name, value in summary().items() if isinstance(value, dict) for inner in value]
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(changes=st.lists(st.tuples(paths, json_values), max_size=4), raw=st.none() | st.binary(max_size=60))
def test_garbage_never_crashes_and_is_never_lost(tmp_path, changes, raw):
    record = json.loads(json.dumps(fp16()))
    for path, value in changes:
        inner = record
        for name in path[:-1]:
            inner = inner[name] if isinstance(inner.get(name), dict) else {}
        inner[path[-1]] = value
    put(tmp_path / "bad", json.dumps(record))
    if raw is not None:
        (tmp_path / "bad" / "summary.json").write_bytes(raw)
    found = table(summary(), folder=tmp_path)
    assert sum(str(tmp_path / "bad") in each.folders.split(" | ") for each in found.rows) == 1
    assert "\x1b" not in printed(found, 80)
    assert read_csv(write_csv(found.rows, Row), Row) == found.rows


FILL = {"str": 'a "b", \'=1+1|<b>', "int | None": 7, "float | None": 0.1 + 0.2, "bool | None": True}


def test_every_field_of_a_row_survives_the_csv():
    names = {field.name: str(getattr(field.type, "__name__", field.type)) for field in fields(Row)}
    full = Row(**{name: FILL[kind] for name, kind in names.items()})
    empty = replace(full, **{name: None for name, kind in names.items() if kind.endswith("None")})
    for start in ("=", "+", "-", "@", "'", "''", ""):
        odd = replace(full, **{name: start for name, kind in names.items() if kind == "str"})
        assert read_csv(write_csv([full, empty, odd], Row), Row) == [full, empty, odd]
    assert write_csv([replace(full, recipe="=cmd()")], Row).splitlines()[1].count("'=cmd()") == 1


def test_a_row_with_an_impossible_statistic_cannot_be_made(tmp_path):
    (good,) = table(summary(), folder=tmp_path).rows
    for wrong in ({"mean": 0.9}, {"median": 0.5}, {"throughput": 0.0}, {"skipped": 601}, {"memory_ratio": -1.0}):
        with pytest.raises(InconsistentStatistics):
            replace(good, **wrong)


def test_csv_alone_gives_the_same_words(tmp_path):
    put(tmp_path / "bad", "{")
    found = table(summary(), fp16(), fp16(key={"steps": 9}), folder=tmp_path)
    again = table_of(read_csv(write_csv(found.rows, Row), Row))
    assert document_of(again) == document_of(found)


EVIL = "[bold]x[/bold] <script>alert(1)</script> |a|b| [l](u) *i* \x1b[31m \u202e & \ud800"


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = set(), ""

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)

    def handle_data(self, data):
        self.text += data


def test_text_from_records_is_only_text(tmp_path, capsys):
    put(tmp_path / "<b>[red]", fp16(status="failed", reason=EVIL))
    put(tmp_path / "lost", fp16(status="diverged", reason=EVIL, precision_label=EVIL, metric={"value": None}))
    files = {kind: tmp_path / f"out.{kind}" for kind in ("csv", "md", "html")}
    assert compare([str(tmp_path), *(word for kind, file in files.items() for word in (f"--{kind}", str(file)))]) == 0
    shown = "[bold]x[/bold] <script>alert(1)</script> |a|b| [l](u) *i* [31m &"
    page = _Tags()
    page.feed(files["html"].read_text())
    assert shown in page.text and not page.tags & {"script", "b", "img", "a"}
    assert (
        r"\[bold\]x\[/bold\] \<script\>alert(1)\</script\> \|a\|b\| \[l\](u) \*i\* \[31m &amp;"
        in files["md"].read_text()
    )
    assert any(shown in line["reason"] for line in csv.DictReader(io.StringIO(files["csv"].read_text())))
    out = capsys.readouterr().out
    assert "[bold]x[/bold]" in out and "\x1b" not in out and "\u202e" not in out


def test_markdown_and_page_hold_every_cell(tmp_path):
    found = table(summary(), fp16(), folder=tmp_path)
    assert compare([str(tmp_path), "--md", str(tmp_path / "t.md"), "--html", str(tmp_path / "new" / "t.html")]) == 0
    md, page = (tmp_path / "t.md").read_text(), _Tags()
    page.feed((tmp_path / "new" / "t.html").read_text())
    for cell in (cell for cells in document_of(found).blocks[0].cells for cell in cells):
        assert cell.main in md and cell.detail in md and cell.main in page.text and cell.detail in page.text
    assert {len(line.split(" | ")) for line in md.splitlines() if line.startswith("| ")} == {9}


@pytest.mark.parametrize("width", [80, 100, 120])
def test_terminal_text_fits_and_keeps_metric_and_difference(tmp_path, width):
    record = fp16(precision_label="fp16 keep_fp32=[layer4.conv1,fc]", scale="dynamic interval=100")
    seeds = [
        {**each, "seed": seed} for seed in (0, 1, 2) for each in (summary(metric={"value": 0.87 + seed / 100}), record)
    ]
    text = printed(table(*seeds, folder=tmp_path), width)
    assert max(map(len, text.splitlines())) <= width
    assert "0.8840" in text and "+0.0040" in text and "-0.0208..+0.0288" in text and "emulated" in text
    assert ("left out at" in text) == (width < 112)


def test_two_folders_of_different_commits_stay_apart_and_pair_up(tmp_path, capsys):
    for name, commit, speed in (("a", "aaa", 1000.0), ("b", "bbb", 1500.0)):
        environment, throughput = {"commit": commit}, {"value": speed}
        put(tmp_path / name / "fp32", summary(environment=environment, throughput=throughput))
        put(tmp_path / name / "fp16", fp16(environment=environment, throughput=throughput))
    put(tmp_path / "b" / "more", fp16(scale="64"))
    folders = [tmp_path / "a", tmp_path / "b"]
    both = build_table(*find_runs(folders))
    assert [sorted({each.commits for each in group.rows}) for group in both.groups] == [["aaa"], ["abc1234", "bbb"]]
    assert document_of(table_of(read_csv(write_csv(both.rows, Row), Row))) == document_of(both)
    assert "resnet: commit aaa and abc1234, bbb are not compared with each other" in printed(both)
    pairs, alone = pair_up(*(build_table(*find_runs([folder])) for folder in folders))
    assert [(pair.precision, pair.throughput_ratio, pair.difference) for pair in pairs] == [
        ("fp32", 1.5, 0),
        ("fp16", 1.5, 0),
    ]
    assert alone == ["second folder: resnet on fashion (real data), 600 steps, batch 128, fp16, scale 64"]
    assert compare([*map(str, folders), "--between", "--csv", str(tmp_path / "t.csv")]) == 0
    assert "Between: resnet on fashion" in capsys.readouterr().out
    assert read_csv((tmp_path / "t-between.csv").read_text(), Pair) == pairs


@pytest.mark.parametrize(
    ("values", "change", "regressions"),
    [
        ((0.884, 0.880, 0.888), {}, ""),
        ((0.874, 0.870, 0.878), {}, "worse by 0.0100"),  # Welch: -.0100 +- .0091
        ((0.877, 0.873, 0.881), {}, ""),  # the same by .0070: within noise
        ((0.954, 0.950, 0.958), {}, ""),  # better
        ((0.873,), {}, "worse by 0.0110"),  # one seed: more than the margin of .01
        ((0.875,), {}, ""),
        ((None, 0.880, 0.888), {}, "1/3 diverged"),
        ((None, None), {}, "2/2 diverged"),
        ((0.884, 0.880, 0.888), {"throughput": {"value": 1500.0}}, "slower: 0.75x"),
        (
            (0.884, 0.880, 0.888),
            {"throughput": {"value": 1500.0}, "started": "2026-01-01T00:00:30+00:00"},
            "",
        ),  # shared
        ((0.884, 0.880, 0.888), {"throughput": {"value": 1700.0}}, ""),
        ((0.884, 0.880, 0.888), {"memory": {"peak_mib": 132.0}}, "more memory: 1.10x"),
        ((0.884, 0.880, 0.888), {"throughput": {"value": 1500.0}, "environment": {"device_name": "Arm"}}, ""),
        ((0.774, 0.770, 0.778), {"memory": {"peak_mib": 240.0}}, "worse by 0.1100; more memory: 2.00x"),
    ],
)
def test_regressions_beyond_noise_are_marked_and_end_with_status_3(tmp_path, capsys, values, change, regressions):
    for seed, value in enumerate((0.884, 0.880, 0.888)):
        put(tmp_path / "a" / str(seed), summary(seed=seed, metric={"value": value}))
    for seed, value in enumerate(values):
        diverged = {} if value is not None else {"status": "diverged", "reason": "NaN"}
        put(tmp_path / "b" / str(seed), summary(seed=seed, metric={"value": value}, **diverged, **change))
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    (pair,), _ = pair_up(*(build_table(*find_runs([tmp_path / name])) for name in "ab"))
    assert pair.regressions == regressions
    assert compare([*folders, "--between"]) == (3 if regressions else 0)
    assert compare(folders) == 0
    assert compare(["--help"]) == 0 and "3 if --between marks a regression" in capsys.readouterr().out


def test_between_asks_for_two_folders(tmp_path, capsys):
    assert compare([str(tmp_path), "--between"]) == 1
    assert capsys.readouterr().err.startswith("mptrain: --between takes two folders, got 1")


def test_nothing_to_compare_is_one_friendly_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for argument, words in {
        "empty": "There is no run in empty; make one: mptrain +recipe=resnet precision=fp32.",
        "missing": "There is no folder missing; give the folder that holds the runs.",
        "file": "file is not a folder; give the folder that holds the runs.",
    }.items():
        assert compare([argument]) == 1
        assert capsys.readouterr().err == f"mptrain: {words}\n"
    assert compare([]) == 1
    assert "no folder results/runs" in capsys.readouterr().err


def test_a_folder_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    put(tmp_path / "runs" / "good", summary())
    put(tmp_path / "runs" / "locked", summary())
    listing = os.scandir

    def refuse(folder):
        if str(folder).endswith(locked):
            raise PermissionError(13, "Permission denied")
        return listing(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    locked = "locked"
    runs, excluded = find_runs([tmp_path / "runs"])
    assert len(runs) == 1
    assert excluded == [
        Excluded(str(tmp_path / "runs" / "locked"), "unreadable", "folder cannot be listed: Permission denied")
    ]
    locked = "runs"
    with pytest.raises(UserError, match="cannot be opened .Permission denied."):
        find_runs([tmp_path / "runs"])


def test_only_runs_without_result_end_with_status_1(tmp_path, capsys):
    put(tmp_path / "crash", summary(status="failed", reason="out of memory"))
    assert compare([str(tmp_path), "--csv", str(tmp_path / "t.csv")]) == 1
    out, err = capsys.readouterr()
    assert "failed: " in out and "has a result to compare" in err
    assert "out of memory" in (tmp_path / "t.csv").read_text()


def test_help_and_wrong_options(capsys):
    assert compare(["--help"]) == 0
    assert "--baseline PRECISION" in capsys.readouterr().out
    assert compare(["--bogus"]) == 2
    assert "--bogus" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_one_line(tmp_path, capsys):
    put(tmp_path / "a", summary())
    (tmp_path / "file").write_text("")
    assert compare([str(tmp_path), "--csv", str(tmp_path / "file" / "t.csv")]) == 1
    assert capsys.readouterr().err.startswith("mptrain: Cannot write ")


START = "import sys; from mptrain.results.compare import compare; code = compare(sys.argv[1:]);"
LIGHT = START + "sys.exit(code or bool({'torch', 'hydra', 'omegaconf', 'scipy.stats'} & sys.modules.keys()))"


def test_a_thousand_runs_take_less_than_two_seconds(tmp_path):
    for group in range(20):
        for seed in range(10):
            for precision, scale in (
                ("fp32", "none"),
                ("bf16", "none"),
                ("fp16", "8"),
                ("fp16", "64"),
                ("fp16", "dynamic"),
            ):
                value = 0.88 + random.Random(f"{group} {seed} {precision} {scale}").gauss(0, 0.01)
                record = summary(precision=precision, scale=scale, seed=seed, metric={"value": value})
                record["key"]["settings"] = f"s{group}"
                put(tmp_path / f"{group}-{seed}-{precision}-{scale}", record)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", LIGHT, str(tmp_path)], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("baseline") == 20
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_output_survives_an_ascii_terminal(tmp_path):
    table(*(summary(seed=seed, metric={"value": seed / 10}) for seed in range(3)), folder=tmp_path)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "120"}
    command = [sys.executable, "-c", START + "sys.exit(code)", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "+- 0.1000" in done.stdout
