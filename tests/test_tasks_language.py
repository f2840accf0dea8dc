import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mptrain.data import text
from mptrain.data.dataset import BatchKey, DataSpec, batches
from mptrain.errors import UserError
from mptrain.tasks import language
from mptrain.tasks.language import exponential, rare_words

SYNTHETIC = DataSpec("synthetic", None, 0)


def build(**options):
    torch.manual_seed(0)
    return language.build(SYNTHETIC, **{"vocabulary": 60, "embedding": 8, "hidden": 8, "window": 5, **options})


def train_batches(task, batch_size, count, seed=0):
    order = task.train_set.epoch(batch_size, np.random.default_rng(seed))[:count]
    return [task.train_set.__getitems__(BatchKey(i, (0, 0, n), n == 0, True)) for n, i in enumerate(order)]


def loss_of(task, batch):
    ((name, loss),) = task.losses(batch)
    assert name == "model" and loss.dtype == torch.float32 and loss.ndim == 0
    return loss


def evaluate(task, batch_size):
    task.model.eval()
    with torch.no_grad():
        return task.evaluate(batches(task.test_set, batch_size))


def test_perplexity_of_a_network_that_knows_nothing_is_the_vocabulary():
    task = build()
    torch.nn.init.zeros_(task.model.output.weight)
    found = evaluate(task, 3)
    assert found["perplexity"] == pytest.approx(60, rel=1e-5)
    assert found["rare_given"] == pytest.approx(len(task.rare) / 60, abs=1e-5)


def test_perplexity_weighs_every_word_alike_and_no_batch_size_matters():
    task = build()
    torch.nn.init.normal_(task.model.embedding.weight)
    task.test_set.words = task.test_set.words[:2700]
    total = 0.0
    for start in range(0, 2699, text.DOCUMENT):
        words = torch.from_numpy(task.test_set.words[start : start + text.DOCUMENT + 1].astype(np.int64))[None]
        with torch.no_grad():
            logits, _ = task.model(words[:, :-1])
        total += F.cross_entropy(logits[0].double(), words[0, 1:], reduction="sum").item()
    for batch_size in (1, 7, 64):
        assert evaluate(task, batch_size)["perplexity"] == pytest.approx(math.exp(total / 2699), rel=1e-6)


def test_shares_of_rare_and_unknown_words():
    task = build()
    words = task.test_set.words[1:]
    found = evaluate(task, 8)
    assert found["unknown"] == pytest.approx((words == 2).mean())
    assert found["rare_true"] == pytest.approx(np.isin(words, task.rare.numpy()).mean())
    assert rare_words(np.array([0] * 9 + [1] * 8 + [3], np.int32), 5).tolist() == [1, 2, 3, 4]


def test_state_is_carried_detached_and_reset_at_an_epoch():
    task = build()
    first, second = train_batches(task, 4, 2)
    loss_of(task, first).backward()
    assert all(part.grad_fn is None and part.dtype == torch.float32 for part in task.state)
    carried = loss_of(task, second)
    carried.backward()
    both = torch.cat([first["words"], second["words"]], dim=1)
    logits, _ = task.model(both)
    expected = F.cross_entropy(logits[:, 5:].flatten(0, 1), second["targets"].flatten())
    torch.testing.assert_close(carried, expected)
    torch.testing.assert_close(loss_of(task, second | {"first": True}), loss_of(build(), second))


def test_state_of_another_batch_size_is_dropped():
    task = build()
    loss_of(task, train_batches(task, 4, 1)[0])
    (smaller,) = train_batches(task, 2, 1)
    torch.testing.assert_close(loss_of(task, smaller | {"first": False}), loss_of(build(), smaller))


def test_evaluation_leaves_the_carried_state_alone():
    task = build()
    loss_of(task, train_batches(task, 4, 1)[0])
    before = [part.clone() for part in task.state]
    evaluate(task, 8)
    torch.testing.assert_close(list(task.state), before)


def test_state_survives_a_resume(tmp_path):
    task, resumed = build(), build()
    assert task.state_dict() == {}
    resumed.load_state_dict({})
    first, second = train_batches(task, 4, 2)
    loss_of(task, first)
    torch.save(task.state_dict(), tmp_path / "state.pt")
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    torch.testing.assert_close(loss_of(resumed, second), loss_of(task, second), rtol=0, atol=0)


@pytest.mark.parametrize(
    "options", [{}, {"sampled": 20}, {"projection": 8, "hidden": 16, "sampled": 20, "tied": False}]
)
def test_it_learns(options):
    task = build(**options)
    optimizer = torch.optim.Adam(task.model.parameters(), 1e-2)
    before = evaluate(task, 8)["perplexity"]
    for batch in train_batches(task, 16, 60):
        optimizer.zero_grad()
        loss_of(task, batch).backward()
        optimizer.step()
    assert evaluate(task, 8)["perplexity"] < 0.8 * before


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_train_evaluate_train_under_autocast(dtype):
    task = build()
    for batch in train_batches(task, 4, 3):
        task.model.train()
        with torch.autocast("cpu", dtype):
            loss = loss_of(task, batch)
        loss.backward()
        assert math.isfinite(evaluate(task, 8)["perplexity"])


def test_size_counts_predicted_words():
    task = build()
    assert task.size(train_batches(task, 4, 1)[0]) == 20


def test_a_diverged_network_has_an_infinite_or_undefined_perplexity():
    assert exponential(1e4) == math.inf and math.isnan(exponential(math.nan))
    task = build()
    torch.nn.init.constant_(task.model.output.bias, math.nan)
    assert math.isnan(evaluate(task, 8)["perplexity"])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"window": 0}, "task.window=0"), ({"hidden": 9}, "task.tied=true"), ({"sampled": 60}, "task.sampled=60")],
)
def test_bad_options(options, message):
    with pytest.raises(UserError, match=message):
        build(**options)
