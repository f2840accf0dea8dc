import numpy as np
import pytest
import torch

from mptrain.data import text
from mptrain.data.dataset import BatchKey, DataSpec, batches
from mptrain.data.words import UNKNOWN
from mptrain.errors import UserError


def stream(words=100, window=7, sampled=0):
    return text.Stream("synthetic", "synthetic", np.arange(words, dtype=np.int32), words, window, sampled)


def key(indices, first=False, train=True):
    return BatchKey(np.asarray(indices), (1, 2, 3), first, train)


def test_each_row_goes_on_where_it_stopped():
    data = stream()
    found = [data.__getitems__(key(indices)) for indices in data.epoch(3, np.random.default_rng(0))]
    assert len(found) == 4
    for before, after in zip(found[:-1], found[1:], strict=True):
        assert (after["words"][:, 0] == before["words"][:, -1] + 1).all()
    for batch in found:
        assert batch["words"].shape == (3, 7) and batch["tokens"] == 21
        assert (batch["targets"] == batch["words"] + 1).all()


def test_an_epoch_shows_no_word_twice_and_drops_less_than_a_window_a_row():
    data = stream()
    for seed in range(5):
        rng = np.random.default_rng(seed)
        words = torch.cat([data.__getitems__(key(i))["words"].flatten() for i in data.epoch(3, rng)])
        assert len(words.unique()) == len(words)
        assert 99 - len(words) < 3 * 7 + 7


def test_epochs_start_at_different_words():
    data = stream()
    assert len({data.epoch(3, np.random.default_rng(seed))[0][0] for seed in range(20)}) > 3


def test_a_batch_larger_than_the_text_is_refused():
    with pytest.raises(UserError, match="batch_size=15 is too large"):
        stream().epoch(15, None)


@pytest.mark.parametrize(("words", "documents"), [(2, 1), (1025, 1), (1026, 2), (3000, 3)])
def test_documents_predict_every_word_but_the_first_once(words, documents):
    numbers = np.arange(10, 10 + words, dtype=np.int32)
    data = text.Documents("synthetic", "synthetic", numbers)
    assert len(data) == documents
    for batch_size in (1, 2, 64):
        found = list(batches(data, batch_size))
        targets = torch.cat([batch["targets"].flatten() for batch in found])
        assert targets[targets != text.IGNORED].tolist() == numbers[1:].tolist()
        assert sum(batch["tokens"] for batch in found) == words - 1
        for batch in found:
            scored = batch["targets"] != text.IGNORED
            assert (batch["targets"] - batch["words"])[scored].eq(1).all()


def test_sampled_words_are_distinct_and_follow_the_log_uniform_law():
    rng = np.random.default_rng(0)
    counts, draws = np.zeros(1000), 0
    for _ in range(300):
        words, tries = text.log_uniform_sample(50, 1000, rng)
        assert len(set(words.tolist())) == 50 and tries >= 50
        counts[words] += 1
        draws += tries
    ranks = np.arange(1000)
    p = np.log((ranks + 2) / (ranks + 1)) / np.log(1001)
    expected = 300 * (1 - (1 - p) ** (draws / 300))
    assert counts[0] == 300
    assert np.abs(counts[1:100].sum() - expected[1:100].sum()) < 0.03 * expected[1:100].sum()
    assert np.abs(counts[100:].sum() - expected[100:].sum()) < 0.03 * expected[100:].sum()


def test_sampled_words_depend_on_the_batch_alone():
    data = stream(sampled=10)
    one, other = data.__getitems__(key([0, 7])), data.__getitems__(key([14, 21]))
    assert one["sampled"].tolist() == other["sampled"].tolist() and one["tries"] == other["tries"]
    with pytest.raises(UserError, match="task.sampled=100"):
        stream(sampled=100)


def test_synthetic_text_comes_from_its_seed():
    one, other, same = (text.load(DataSpec("synthetic", None, seed), 500, 35, 0)[0].words for seed in (0, 1, 0))
    assert (one == same).all() and (one != other).any()
    assert one.min() >= 0 and one.max() < 500


def test_unknown_data_names_what_there_is():
    with pytest.raises(
        UserError,
        match="data=fashion is no running text; type data=austen, data=austen_letters, data=lm1b, data=synthetic",
    ):
        text.load(DataSpec("fashion", None, 0), 500, 35, 0)


def test_letters_are_those_of_the_words():
    train, test = text.load(DataSpec("austen_letters", None, 0), 48, 35, 0)
    plain = [word for _, word in zip(range(2000), text.novel_words("train"), strict=False)]
    spelled = "".join("\n" if word == "</s>" else f"{word} " for word in plain)
    assert train.kind == "real" and len(train.words) == 3_734_924 and len(test.words) == 212_222
    letters = dict(zip(train.words.tolist(), spelled, strict=False))
    assert letters[0] == "\n" and len(set(letters.values())) == len(letters) > 30
    assert "".join(letters[number] for number in train.words[: len(spelled)].tolist()) == spelled
    assert (train.words == UNKNOWN).mean() < 1e-4


def test_austen_is_words_and_signs_in_lower_case_with_an_end_after_each_paragraph():
    train, test = text.load(DataSpec("austen", None, 0), 8000, 35, 0)
    assert train.kind == "real"
    assert 780_000 < len(train.words) < 790_000 and 44_000 < len(test.words) < 45_000
    assert train.words[:9].tolist().count(0) == 3  # EMMA, By Jane Austen, VOLUME I: three paragraphs
    assert train.words.max() < 8000 and (test.words == UNKNOWN).mean() < 0.02
