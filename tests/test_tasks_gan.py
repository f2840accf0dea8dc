import math

import numpy as np
import pytest
import scipy.linalg
import torch
from PIL import Image
from torch import nn

from mptrain.data.dataset import BatchKey, DataSpec, batches
from mptrain.errors import UserError
from mptrain.tasks import gan
from mptrain.tasks.gan.frechet import Moments, frechet_distance


def build(**options):
    torch.manual_seed(0)
    return gan.build(
        DataSpec("synthetic", None, 0),
        **{"size": 16, "generator_width": 4, "discriminator_width": 4, "features": 8, "noise": 6, **options},
    )


def train_batch(task, count=8, seed=0):
    return task.train_set.__getitems__(BatchKey(np.arange(count), (0, 0, seed), seed == 0, True))


def evaluate(task, batch_size):
    for network in task.models.values():
        network.eval()
    with torch.no_grad():
        return task.evaluate(batches(task.test_set, batch_size))


def test_discriminator_first_then_generator_in_fp32():
    task = build()
    names, losses = zip(*task.losses(train_batch(task)), strict=True)
    assert names == ("discriminator", "generator")
    assert all(loss.dtype == torch.float32 and loss.ndim == 0 for loss in losses)


def test_losses_of_a_network_that_knows_nothing():
    task = build()
    nn.init.zeros_(task.discriminator.classifier.weight)
    losses = dict(task.losses(train_batch(task)))
    assert losses["discriminator"].item() == pytest.approx(2 * math.log(2))
    assert losses["generator"].item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("logit", [-60.0, 60.0])
def test_extreme_logits_give_finite_losses_and_gradients(dtype, logit):
    real, drawn = (torch.full((4,), sign * logit, dtype=dtype, requires_grad=True) for sign in (1, -1))
    for loss in (gan.discriminator_loss(real, drawn, 1.0), gan.generator_loss(drawn)):
        assert loss.dtype == torch.float32 and loss.isfinite()
        loss.backward()
    assert real.grad.isfinite().all() and drawn.grad.isfinite().all()
    assert gan.discriminator_loss(real, drawn, 1.0).item() == pytest.approx(120.0 if logit < 0 else 0.0, abs=1e-6)


def test_real_label_smooths_the_real_side_alone():
    zero, large = torch.zeros(2), torch.full((2,), 10.0)
    assert gan.discriminator_loss(large, -large, 0.9).item() == pytest.approx(
        0.1 * 10 + 2 * math.log1p(math.exp(-10)), rel=1e-5
    )
    assert gan.discriminator_loss(zero, zero, 0.9).item() == pytest.approx(2 * math.log(2))


def test_the_generator_pass_leaves_no_gradient_on_the_discriminator():
    task = build()
    task.discriminator.classifier.bias.requires_grad_(False)
    phases = task.losses(train_batch(task))
    _, loss = next(phases)
    loss.backward()
    assert all(p.grad is None for p in task.generator.parameters())
    task.discriminator.zero_grad()
    _, loss = next(phases)
    loss.backward()
    assert all(p.grad is None for p in task.discriminator.parameters())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in task.generator.parameters())
    frozen = [name for name, p in task.discriminator.named_parameters() if not p.requires_grad]
    assert frozen == ["classifier.bias"]


def test_the_generator_learns_from_the_discriminator_that_has_just_moved():
    task = build()
    phases = task.losses(train_batch(task))
    next(phases)
    nn.init.zeros_(task.discriminator.classifier.weight)
    assert next(phases)[1].item() == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"d_every": 2}, ["dg", "g", "dg", "g"]), ({"g_every": 3}, ["dg", "d", "d", "dg"]), ({}, ["dg"] * 4)],
)
def test_a_phase_out_of_turn_is_not_yielded_not_even_after_a_resume(options, expected):
    task, phases = build(**options), []
    for step in range(4):
        phases.append("".join(name[0] for name, _ in task.losses(train_batch(task))))
        if step == 1:
            state, task = task.state_dict(), build(**options)
            task.load_state_dict(state)
    assert phases == expected


def test_half_of_the_training_pictures_are_mirrored_and_noise_comes_from_the_batch():
    task = build()
    one, same, other = train_batch(task), train_batch(task), train_batch(task, seed=1)
    assert one["noise"].shape == (8, 6)
    assert (one["noise"] == same["noise"]).all() and (one["noise"] != other["noise"]).any()
    plain = task.train_set.pictures[:8].float() / 127.5 - 1
    kept = [bool((a == b).all()) for a, b in zip(one["pictures"], plain, strict=True)]
    mirrored = [bool((a == b.flip(-1)).all()) for a, b in zip(one["pictures"], plain, strict=True)]
    assert all(a or b for a, b in zip(kept, mirrored, strict=True)) and any(mirrored) and any(kept)


def test_distance_is_independent_of_batch_size_and_zero_between_equal_sets():
    task = build()
    found = [evaluate(task, batch_size)["frechet"] for batch_size in (1, 7, 64)]
    assert found[0] > 0 and found == pytest.approx([found[0]] * 3, rel=1e-6)

    class Copy(nn.Module):
        def forward(self, noise):
            return pictures[: len(noise)]

    pictures = task.test_set.pictures[:64].float() / 127.5 - 1
    task.generator, task.test_set.pictures = Copy(), task.test_set.pictures[:64]
    assert evaluate(task, 64)["frechet"] == pytest.approx(0, abs=1e-6)


def test_the_grids_are_written(tmp_path):
    task = build()
    evaluate(task, 7)
    task.finish(tmp_path)
    for name in ("samples", "real"):
        with Image.open(tmp_path / f"{name}.png") as grid:
            assert grid.size == (8 * 18 + 2, 8 * 18 + 2)


def test_frechet_distance_of_known_normal_distributions():
    def moments(mean, covariance, count=50):
        rng = np.random.default_rng(0)
        rows = rng.normal(size=(count, len(mean)))
        rows = (rows - rows.mean(0)) @ scipy.linalg.inv(scipy.linalg.cholesky(np.cov(rows.T)))
        found = Moments(len(mean))
        found.add(torch.from_numpy(rows @ scipy.linalg.cholesky(covariance) + mean))
        return found

    one, other = moments([1.0, 2.0], np.diag([4.0, 9.0])), moments([0.0, 0.0], np.diag([1.0, 1.0]))
    assert frechet_distance(one, other) == pytest.approx(1 + 4 + (2 - 1) ** 2 + (3 - 1) ** 2)
    rng = np.random.default_rng(1)
    a, b = (rng.normal(size=(5, 5)) for _ in range(2))
    a, b = a @ a.T + np.eye(5), b @ b.T + np.eye(5)
    root = scipy.linalg.sqrtm(a @ b).real
    expected = np.trace(a + b - 2 * root) + 5 * 0.25
    assert frechet_distance(moments(np.full(5, 0.5), a), moments(np.zeros(5), b)) == pytest.approx(expected)


def test_a_collapsed_generator_and_a_dead_one():
    one, collapsed, dead = Moments(3), Moments(3), Moments(3)
    rows = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one.add(rows[:25])
    one.add(rows[25:])
    collapsed.add(torch.ones(40, 3))
    dead.add(torch.full((40, 3), math.nan))
    expected = ((rows.mean(0) - 1) ** 2).sum() + rows.var(0).sum()
    assert frechet_distance(one, collapsed) == pytest.approx(expected.item())
    assert math.isnan(frechet_distance(one, dead))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 48}, "task.size=48"),
        ({"d_every": 0}, "task.d_every=0"),
        ({"d_every": 2, "g_every": 2}, "task.d_every=2 and task.g_every=2"),
        ({"norm": "none"}, "task.norm=none is unknown; type task.norm=all or task.norm=inner"),
        ({"real_label": 0.5}, "task.real_label=0.5"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UserError, match=message):
        build(**options)
