"""Options of how networks run that must not change what they compute, or say that they do."""

import pytest
import torch
from tiny.runs import last_state, same_bits, settings, weights

from mptrain import compose, layout
from mptrain.config import check
from mptrain.errors import UserError
from mptrain.results.record import Record
from mptrain.train import Run, train


def resnet(**changes):
    values = compose.baseline("resnet", "fp32") | {"data": "synthetic", "batch_size": 4, "device": "cpu"}
    return check(values | changes)


def test_runs_without_the_options_keep_their_names():
    plain = resnet()
    assert "compile" not in plain.decisive()
    assert "channels_last" not in plain.decisive()
    others = [resnet(compile=True), resnet(channels_last=True)]
    assert len({config.identity() for config in (plain, *others)}) == 3
    assert len({config.comparable() for config in (plain, *others)}) == 3


def test_channels_last_is_the_same_step_in_another_order():
    runs = {name: Run(resnet(channels_last=name), Record(".")) for name in (False, True)}
    for run in runs.values():
        windows = run.loader.windows()
        run.step(next(windows))
        run.step(next(windows))
    plain, last = (dict(runs[name].models["model"].named_parameters()) for name in (False, True))
    filters = [p for p in last.values() if p.dim() == 4 and p.shape[1] > 1 and p.shape[2] > 1]
    assert filters
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in filters)
    assert all(p.grad.is_contiguous(memory_format=torch.channels_last) for p in filters)
    for name, p in plain.items():
        torch.testing.assert_close(last[name], p, rtol=1e-4, atol=1e-5)
    losses = [torch.stack(runs[name].recent["model"]) for name in (False, True)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)


def test_channels_last_needs_convolutions(tiny):
    with pytest.raises(UserError, match="no 2-D convolution"):
        train(settings(channels_last=True))


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"precision": "fp16"}, "precision=fp16 is computed by ours here.*precision=fp32, or a GPU"),
        ({"watch": {"enabled": True}}, "compile=true and watch=true exclude each other"),
        ({"scale": "layerwise"}, "compile=true and scale=layerwise exclude each other"),
        ({"compile": "reduce-overhead"}, "needs a GPU; use compile=true"),
    ],
)
def test_what_a_compiler_cannot_keep_is_refused(tiny, changes, said):
    precision = changes.pop("precision", "fp32")
    with pytest.raises(UserError, match=said):
        train(settings("tiny", precision, **{"compile": True, **changes}))


def test_unknown_values_are_refused():
    with pytest.raises(UserError, match="compile=fast: give true or false or one of reduce-overhead"):
        resnet(compile="fast")


def test_what_dynamo_runs_is_what_was_written_and_resumes(tiny, tmp_path, monkeypatch):
    """With a back-end that changes nothing, a compiled run has the bits of an uncompiled one."""
    monkeypatch.setattr(layout, "BACKEND", "eager")
    changes = {"steps": 12, "checkpoint_every": 5, "accumulate": 2, "task__dropout": 0.2}
    summaries = [train(settings(out=str(tmp_path / str(on)), compile=on, **changes)) for on in (False, True)]
    assert summaries[0]["metric"] == summaries[1]["metric"]
    assert "compiled" not in summaries[0]
    assert summaries[1]["compiled"] is True
    plain, compiled = (weights(tmp_path / str(on)) for on in (False, True))
    assert same_bits(plain, compiled)
    newest = max((tmp_path / "True" / "checkpoints").iterdir(), key=lambda path: path.name)
    newest.unlink()
    (tmp_path / "True" / "summary.json").unlink()
    assert train(settings(out=str(tmp_path / "True"), compile=True, **changes))["metric"] == summaries[0]["metric"]
    assert same_bits(weights(tmp_path / "True"), plain)
    assert last_state(tmp_path / "True")["steps"]["attempted"] == 12


def test_a_compiler_that_fails_is_named():
    error = torch._dynamo.exc.BackendCompilerFailed(lambda: None, RuntimeError("g++: not found"), None)
    said = layout.explained(error)
    assert isinstance(said, UserError)
    assert "set compile=false" in str(said)
    assert layout.explained(ValueError("x")).args == ("x",)


@pytest.mark.slow
def test_compiled_kernels_learn_the_same(tiny, tmp_path):
    losses = [train(settings(out=str(tmp_path / str(on)), compile=on))["metrics"]["loss"] for on in (False, True)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
