"""The block `paper:` of recipes: what it may say, what it inherits, and that every product recipe's is sound."""

import pytest
from pydantic import ValidationError

from mptrain import files, paper
from mptrain.errors import UserError
from mptrain.paper import Claim, Paper, PaperRun, paper_of

RUNS = {"fp32": {"precision": "fp32"}, "fp16": {"precision": "fp16", "scale": 8, "also": ["steps=3"]}}


@pytest.mark.parametrize("recipe", files.names("recipe"))
def test_every_recipe_s_block_is_sound(recipe):
    known = paper_of(recipe)
    assert (known.where and known.metric) or not known.runs
    assert {run.precision for run in known.runs.values()} <= set(files.names("precision"))
    assert all(name in files.names("recipe") for claim in known.claims for name in claim.recipes)


@pytest.mark.parametrize(
    ("claim", "complaint"),
    [
        ({"test": "equal", "above": 1.0}, "test equal takes against, of, within, not above"),
        ({"test": "share", "of": "memory"}, "test share needs above or below"),
        ({"test": "share", "of": "memory", "above": 1.0, "against": "bf16"}, "takes above, below, of, not against"),
        ({"test": "worse", "of": "memory"}, "test worse is of metric or training loss; compare memory with test ratio"),
        ({"test": "equal", "within": 0.0}, "greater than 0"),
        ({"test": "equal", "of": "memory"}, "no task states a margin for memory"),
        ({"test": "not_worse", "within": "spread"}, "within: spread is for test equal"),
        ({"test": "share", "of": "speed", "above": 1.0}, "should match pattern"),
        ({"test": "better"}, "should be 'equal'"),
    ],
)
def test_a_claim_that_makes_no_sense_is_refused(claim, complaint):
    with pytest.raises(ValidationError, match=complaint):
        Claim.model_validate({"claim": "A claim.", "run": "fp16", **claim})


def test_a_claim_names_runs_that_are_there():
    with pytest.raises(ValidationError, match="needs a run fp61; did you mean fp16"):
        Paper.model_validate({"runs": RUNS, "claims": [{"claim": "A claim.", "test": "worse", "run": "fp61"}]})


def test_overrides_and_scale_label_of_a_run():
    assert PaperRun(precision="fp16", scale=8, also=["steps=3"]).overrides == ["precision=fp16", "scale=8", "steps=3"]
    assert PaperRun(precision="fp16", scale=8).scale_label == "8"
    assert PaperRun(precision="fp16").scale_label == "dynamic"
    assert PaperRun(precision="fp32").overrides == ["precision=fp32"]
    assert PaperRun(precision="fp32").scale_label == "none"


def test_a_recipe_inherits_changes_and_drops(monkeypatch, tmp_path):
    (tmp_path / "small.yaml").write_text(
        "paper: {where: table 1, runs: {fp32: {precision: fp32, printed: 1.0}, fp16: {precision: fp16}}}"
    )
    (tmp_path / "small_paper.yaml").write_text(
        "defaults: [small, _self_]\npaper: {runs: {fp32: {printed: 2.0}, fp16: null}, seeds: 1}"
    )
    monkeypatch.setattr(files, "folder", lambda name: tmp_path)
    monkeypatch.setattr(paper, "paper_of", paper.paper_of.__wrapped__)
    assert paper.paper_of("small_paper") == Paper(
        where="table 1", seeds=1, runs={"fp32": PaperRun(precision="fp32", printed=2.0)}
    )
    (tmp_path / "small.yaml").write_text("paper: {wher: x, runs: {fp32: {scale: 0}}}")
    with pytest.raises(UserError) as error:
        paper.paper_of("small")
    assert str(error.value).count("\n") >= 2 and "recipe=small: paper.wher: Extra inputs" in str(error.value)
