"""A run with a scale for every layer: under every precision, and the same bits after a resume."""

import io

import pytest
import torch

from mptrain import compose, files, state
from mptrain.results.record import Record
from mptrain.train import Run


def begun(folder, recipe, precision):
    given = ["data=synthetic", "batch_size=4", "steps=6", "device=cpu", "scale=layerwise", "layerwise.every=2"]
    config = compose.config([f"+recipe={recipe}", f"precision={precision}", f"out={folder}", *given])
    return Run(config, Record(folder))


@pytest.mark.parametrize(
    ("recipe", "precision"),
    [
        ("resnet", "fp16"),
        pytest.param("gan", "fp16", marks=pytest.mark.slow),
        *(pytest.param("resnet", p, marks=pytest.mark.slow) for p in files.names("precision") if p != "fp16"),
    ],
)
def test_it_goes_on_bit_for_bit(tmp_path, recipe, precision):
    run, saved = begun(tmp_path / "a", recipe, precision), io.BytesIO()
    windows = run.loader.windows()
    for step in range(6):
        if step == 3:
            torch.save(state.state_dict(run), saved)
        run.step(next(windows))
    assert all(run.applied.values())
    assert run.scaler.moments or precision == "tf32"  # its products, of FP32's range, are left alone
    again = begun(tmp_path / "b", recipe, precision)
    saved.seek(0)
    state.load_state_dict(again, torch.load(saved, weights_only=True))
    windows = again.loader.windows()
    for _ in range(3):
        again.step(next(windows))
    for name, model in run.models.items():
        for key, value in model.state_dict().items():
            assert torch.equal(value, again.models[name].state_dict()[key]), key
    assert again.scaler.state_dict() == run.scaler.state_dict()
