import json
import re

import pytest

from mptrain import cli

LINE = ["+recipe=tiny", "steps=6", "out=run", "tensorboard=false", "precision=fp16"]


@pytest.mark.parametrize(
    "more", [[], ["--batch-size", "1"], ["--batch-size", "7"], ["ema=0.9"], ["eval.precision=same"]]
)
def test_a_checkpoint_scores_what_its_run_scored(tiny, capsys, more):
    keys = [word for word in more if "=" in word]
    assert cli.main([*LINE, *keys]) == 0
    before = {path: path.read_bytes() for path in (tiny / "run").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert cli.main(["eval", *LINE, *more]) == 0
    found = dict(re.findall(r"(\S+) (\S+?)(?:  |\n)", capsys.readouterr().out.partition(": ")[2]))
    summary = json.loads((tiny / "run" / "summary.json").read_text())
    expected = {summary["metric"]["name"]: summary["metric"]["value"], **summary["metrics"]}
    assert {key: float(value) for key, value in found.items()} == pytest.approx(expected, rel=1e-5)
    assert {path: path.read_bytes() for path in (tiny / "run").rglob("*") if path.is_file()} == before


def test_what_there_is_not_is_said(tiny, capsys):
    assert cli.main(["eval", *LINE]) == 1
    assert "run holds no run; train it first: mptrain +recipe=tiny steps=6" in capsys.readouterr().err
    assert cli.main(["eval", *LINE, "--batch-size", "0"]) == 1
    assert "--batch-size 0: give a whole number of 1 or more" in capsys.readouterr().err
    cli.main(LINE)
    assert cli.main(["eval", *LINE, "seed=5"]) == 1
    assert "holds a run with another configuration (seed" in capsys.readouterr().err
    for path in (tiny / "run" / "checkpoints").iterdir():
        path.unlink()
    assert cli.main(["eval", *LINE]) == 1
    assert "holds no checkpoint to evaluate" in capsys.readouterr().err
