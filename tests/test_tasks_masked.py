"""Masked words: which are hidden, the loss by hand, evaluation for every batch size, and a few steps."""

import numpy as np
import pytest
import torch

from mptrain.data import masked, text
from mptrain.data.dataset import BatchKey, DataSpec, batches
from mptrain.data.words import START
from mptrain.errors import UserError
from mptrain.tasks import build

SMALL = {"vocabulary": 60, "width": 16, "layers": 2, "heads": 2, "feed": 24, "window": 12}


def task(**options):
    torch.manual_seed(0)
    return build("masked", DataSpec("synthetic"), **{**SMALL, **options})


def key(indices, number=0, train=True):
    return BatchKey(np.asarray(indices), (0, 0, number), False, train, number)


def test_fifteen_percent_are_hidden_by_the_batch_s_own_key():
    data = masked.load(DataSpec("synthetic"), 60, 40, 4)[0]
    rows = np.arange(500) * 40
    one, again, other = (data.__getitems__(key(rows, number)) for number in (0, 0, 1))
    assert one["hidden"].shape == one["words"].shape == (500, 40)
    assert float(one["hidden"].float().mean()) == pytest.approx(masked.HIDDEN, abs=0.01)
    assert torch.equal(one["hidden"], again["hidden"]) and not torch.equal(one["hidden"], other["hidden"])
    assert torch.equal(one["words"], other["words"])


def test_every_row_asks_and_nothing_behind_the_end_is_asked(monkeypatch):
    monkeypatch.setattr(masked, "HIDDEN", 0.0)
    train, test = masked.load(DataSpec("synthetic"), 60, 40, 4)
    assert (train.__getitems__(key(np.arange(50) * 40))["hidden"].sum(1) == 1).all()
    monkeypatch.setattr(masked, "HIDDEN", 1.0)
    last = len(test) - 1
    hidden = test.__getitems__(key([0, last], train=False))["hidden"]
    left = (len(test.inner.words) - 1) % text.DOCUMENT or text.DOCUMENT
    assert hidden[0].all() and hidden[1].sum() == left > 0 and hidden[1, :left].all()


def test_held_out_words_are_hidden_alike_in_every_batch():
    test = masked.load(DataSpec("synthetic"), 60, 40, 4)[1]
    whole = test.__getitems__(key([0, 1, 2], train=False))["hidden"]
    assert torch.equal(whole[1:2], test.__getitems__(key([1], 7, train=False))["hidden"])
    assert not torch.equal(whole[0], whole[1])


def test_loss_by_hand_and_no_sight_of_what_is_hidden():
    subject = task()
    model = subject.models["model"]
    batch = subject.train_set.__getitems__(key([0, 12, 24]))
    ((name, loss),) = subject.losses(batch)
    shown = torch.where(batch["hidden"], START, batch["words"])
    logits = (model(shown) / 4 @ model.embedding.weight.T).double().log_softmax(-1)  # a width of 16
    expected = [-logits[row, place, batch["words"][row, place]] for row, place in batch["hidden"].nonzero().tolist()]
    assert name == "model" and loss.dtype == torch.float32 and subject.size(batch) == 36
    assert loss.item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-5)
    changed = {**batch, "words": batch["words"].masked_fill(batch["hidden"], 7)}
    with torch.no_grad():
        assert torch.equal(*(subject.answers(b["words"], b["hidden"])[0] for b in (batch, changed)))


def test_evaluation_does_not_depend_on_the_batch_size():
    subject = task()
    subject.models["model"].eval()
    subject.test_set.inner.words = subject.test_set.inner.words[:2700]
    with torch.no_grad():
        one, two, all_at_once = (subject.evaluate(batches(subject.test_set, size)) for size in (1, 2, 64))
    for found in (two, all_at_once):
        assert found["accuracy"] == one["accuracy"] and found["loss"] == pytest.approx(one["loss"], rel=1e-6)


def test_a_few_steps_lower_the_loss():
    subject = task()
    optimizer = torch.optim.Adam(subject.models["model"].parameters(), 1e-2)
    batch = subject.train_set.__getitems__(key(np.arange(6) * 12))
    values = []
    for _ in range(15):
        ((_, loss),) = subject.losses(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    assert values[-1] < 0.5 * values[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feed": 0}, "task.feed=0 must be at least 1"),
        ({"heads": 3}, "task.width=16 must be a multiple of task.heads=3"),
        ({"dropout": 1.0}, "task.dropout=1.0 must be at least 0 and below 1"),
        ({"ask": "before"}, "task.ask=before is unknown; type task.ask=hidden or task.ask=next"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        task(**options)


def test_asked_for_the_next_word_it_sees_those_before():
    subject = task(ask="next")
    model = subject.models["model"]
    batch = subject.train_set.__getitems__(key([0, 12, 24]))
    assert batch["hidden"].all()
    ((_, loss),) = subject.losses(batch)
    logits = (model(batch["words"][:, :-1]) / 4 @ model.embedding.weight.T).double().log_softmax(-1)
    expected = -logits.gather(-1, batch["words"][:, 1:, None]).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    changed = batch["words"].clone()
    changed[:, 7:] = 5
    with torch.no_grad():
        before, after = (subject.answers(w, batch["hidden"])[0].view(3, 11, 60) for w in (batch["words"], changed))
    assert torch.equal(before[:, :7], after[:, :7]) and not torch.equal(before[:, 7:], after[:, 7:])
