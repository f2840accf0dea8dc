import numpy as np
import pytest
import torch

from mptrain.data import hard_batches, image_text
from mptrain.data.dataset import BatchKey, DataSpec
from mptrain.data.loader import Loader
from mptrain.errors import UserError


def plain():
    return image_text.load(DataSpec("synthetic", None, 0), 8, 100, 8)[0]


def key(number, train=True, size=6):
    return BatchKey(np.arange(size), (0, 0, number), False, train, number)


@pytest.mark.parametrize("kind", hard_batches.KINDS)
def test_only_the_batches_in_a_row_are_spoilt(kind):
    data = plain()
    hard = hard_batches.harden(data, kind, 3, 2)
    assert len(hard) == len(data) and hard.name == data.name and hard.kind == data.kind
    for number in range(7):
        one, other = data.__getitems__(key(number)), hard.__getitems__(key(number))
        same = all(torch.equal(one[part], other[part]) for part in one)
        assert same == (number not in (3, 4))
    held_out = data.__getitems__(key(3, train=False)), hard.__getitems__(key(3, train=False))
    assert torch.equal(held_out[0]["pictures"], held_out[1]["pictures"])


def test_no_shuffled_caption_keeps_its_picture_and_none_is_lost():
    data = plain()
    # of different shapes, so that no two captions are equal
    batch = data.__getitems__(BatchKey(np.arange(0, 256, 37), (0, 0, 5), False, True, 5))
    found = hard_batches.shuffled(batch, key(5))
    assert torch.equal(found["pictures"], batch["pictures"])
    assert not any(torch.equal(a, b) for a, b in zip(found["words"], batch["words"], strict=True))
    assert sorted(found["words"].tolist()) == sorted(batch["words"].tolist())
    for words, length in zip(found["words"], found["lengths"], strict=True):
        where = (batch["words"] == words).all(1)
        assert batch["lengths"][where].tolist() == [length]


def test_undivided_pixels_by_hand_overflow_half_precision():
    pictures = torch.tensor([-1.0, 0.0, 1.0])
    found = hard_batches.undivided({"pictures": pictures})["pictures"]
    assert found.tolist() == [-1.0, 65534.0, 131069.0]
    assert found.half().isinf().tolist() == [False, True, True]


def test_a_batch_knows_its_number_across_epochs_and_after_a_resume():
    class Numbers(image_text.Dataset):
        name = "numbers"

        def __len__(self):
            return 10

        def __getitems__(self, key):
            return key.number

    loader = Loader(Numbers(), 4, 1, seed=0)
    windows = loader.windows()
    assert [next(windows) for _ in range(7)] == [[number] for number in range(7)]
    later = Loader(Numbers(), 4, 1, seed=0)
    later.load_state_dict(loader.state_dict())
    assert next(later.windows()) == [7]


@pytest.mark.parametrize(
    ("kind", "first", "count", "word"),
    [("noisy", 0, 1, "task.hard=shuffled"), ("shuffled", -1, 1, "hard_from"), ("shuffled", 0, 0, "hard_count")],
)
def test_what_cannot_be_is_refused(kind, first, count, word):
    with pytest.raises(UserError, match=word):
        hard_batches.harden(plain(), kind, first, count)


def test_without_a_kind_the_data_stays_as_it_is():
    data = plain()
    assert hard_batches.harden(data, None, 300, 10) is data
