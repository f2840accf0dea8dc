import os

import numpy as np
import pytest

from mptrain.data import lm1b
from mptrain.errors import UserError


@pytest.fixture
def folder(tmp_path):
    training = tmp_path / "training-monolingual.tokenized.shuffled"
    held_out = tmp_path / "heldout-monolingual.tokenized.shuffled"
    training.mkdir()
    held_out.mkdir()
    (training / "news.en-00002-of-00100").write_text("the cat\n")
    (training / "news.en-00001-of-00100").write_text("the dog sat on the mat .\n\nthe cat sat .\n")
    (held_out / "news.en.heldout-00000-of-00050").write_text("a cat sat .\n")
    (held_out / "news.en.heldout-00001-of-00050").write_text("not used\n")
    return tmp_path


def test_shards_in_order_with_an_end_after_each_sentence(folder):
    train, test = lm1b.read(folder, 20)
    # counts: the 4; . cat sat 2 each; dog mat on 1 each -> numbers from 3, after </s>, <s>, <unk>
    the, dot, cat, sat, dog, mat, on = range(3, 10)
    assert train.tolist() == [the, dog, sat, on, the, mat, dot, 0, the, cat, sat, dot, 0, the, cat, 0]
    assert test.tolist() == [2, cat, sat, dot, 0]
    assert train.dtype == np.int32


def test_a_small_vocabulary_keeps_the_most_frequent_words(folder):
    train, _ = lm1b.read(folder, 4)
    assert train.tolist() == [3, 2, 2, 2, 3, 2, 2, 0, 3, 2, 2, 2, 0, 3, 2, 0]


def test_a_listed_vocabulary_sets_the_order(folder):
    (folder / "vocabulary.txt").write_text("<S>\nmat\ncat 7\nthe\n")
    train, _ = lm1b.read(folder, 20)
    assert train.tolist() == [5, 2, 2, 2, 5, 3, 2, 0, 5, 4, 2, 2, 0, 5, 4, 0]


def test_numbers_are_kept_and_read_again(folder, monkeypatch):
    first = lm1b.read(folder, 20)
    monkeypatch.setattr(lm1b, "write", None)
    second = lm1b.read(folder, 20)
    assert all((one == other).all() for one, other in zip(first, second, strict=True))
    assert not list(folder.glob(".mptrain-unfinished-*"))


def test_changed_text_is_numbered_anew(folder):
    lm1b.read(folder, 20)
    (folder / "heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050").write_text("dog\n")
    assert lm1b.read(folder, 20)[1].tolist() == [7, 0]


def test_an_interrupted_pass_leaves_nothing(folder, monkeypatch):
    monkeypatch.setattr(lm1b, "write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lm1b.read(folder, 20)
    assert not list(folder.glob(".mptrain-*"))


def test_a_folder_that_cannot_be_written_is_read_all_the_same(folder, tmp_path_factory, monkeypatch):
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    assert len(lm1b.read(folder, 20)[0]) == 16
    assert list((home / "mptrain").glob(".mptrain-*")) and not list(folder.glob(".mptrain-*"))


def test_missing_files(tmp_path):
    with pytest.raises(UserError, match="no train"):
        lm1b.read(tmp_path, 20)
    with pytest.raises(UserError, match="is no folder"):
        lm1b.read(tmp_path / "nowhere", 20)


def test_numbered_text_of_another_run_is_not_entered(tmp_path, monkeypatch):
    """It may be gone in the next moment."""
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "one").write_text("the cat\n")
    (tmp_path / ".mptrain-unfinished-1").mkdir()
    entered, scan = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: entered.append(str(path)) or scan(path))
    assert lm1b.files(tmp_path, "train") == [tmp_path / "training" / "one"]
    assert entered == [str(tmp_path), str(tmp_path / "training")]
