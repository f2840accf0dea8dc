import numpy as np
import pytest
import torch

from mptrain.data.dataset import Dataset
from mptrain.data.loader import Loader, explained, mover
from mptrain.errors import UserError


class Numbers(Dataset):
    name, kind = "numbers", "synthetic"

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitems__(self, key):
        noise = torch.rand(len(key.indices), generator=key.generator())
        return torch.from_numpy(key.indices), noise, key.first


def taken(loader, windows):
    stream = loader.windows()
    found = [next(stream) for _ in range(windows)]
    stream.close()
    return found


def same(a, b):
    return len(a) == len(b) and all(
        len(v) == len(w) and all(torch.equal(x[0], y[0]) and torch.equal(x[1], y[1]) and x[2] == y[2]
                                 for x, y in zip(v, w, strict=True))
        for v, w in zip(a, b, strict=True)
    )  # fmt: skip


def test_every_sample_once_an_epoch_in_another_order_each_time():
    windows = taken(Loader(Numbers(10), 4, 1, seed=0), 6)
    epochs = [torch.cat([window[0][0] for window in windows[i : i + 3]]) for i in (0, 3)]
    assert [len(window[0][0]) for window in windows] == [4, 4, 2, 4, 4, 2]
    assert all(torch.equal(epoch.sort().values, torch.arange(10)) for epoch in epochs)
    assert not torch.equal(*epochs)
    assert torch.equal(epochs[1], torch.from_numpy(np.random.default_rng((0, 1)).permutation(10)))
    assert [window[0][2] for window in windows] == [True, False, False, True, False, False]


def test_the_seed_decides():
    assert same(taken(Loader(Numbers(10), 4, 1, 5), 9), taken(Loader(Numbers(10), 4, 1, 5), 9))
    assert not same(taken(Loader(Numbers(10), 4, 1, 5), 9), taken(Loader(Numbers(10), 4, 1, 6), 9))


def test_a_batch_larger_than_the_data_is_told_once(capsys):
    assert [len(window[0][0]) for window in taken(Loader(Numbers(10), 11, 1, 0), 3)] == [10, 10, 10]
    taken(Loader(Numbers(10), 11, 1, 0, rank=1, ranks=2), 3)
    taken(Loader(Numbers(10), 10, 1, 0), 3)
    taken(Loader(Numbers(10), 3, 4, 0), 3)
    taken(Loader(Numbers(10), 3, 5, 0), 3)
    assert capsys.readouterr().err == (
        "mptrain: batch_size=11 is more than the 10 samples that data=numbers trains on; "
        "a step takes all of them and no more\n"
        "mptrain: accumulate=5 is more than the 4 batches that data=numbers trains on; "
        "a step takes all of them and no more\n"
    )


@pytest.mark.parametrize("accumulate, sizes", [(2, [2, 1, 2, 1]), (3, [3, 3, 3, 3]), (5, [3, 3, 3, 3])])
def test_the_last_window_of_an_epoch_takes_what_is_left(accumulate, sizes):
    assert [len(window) for window in taken(Loader(Numbers(10), 4, accumulate, 0), 4)] == sizes


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_it_goes_on_from_any_position(workers, stop):
    whole = taken(Loader(Numbers(10), 4, 2, 0), 6)
    first = Loader(Numbers(10), 4, 2, 0, workers)
    begun = taken(first, stop)
    second = Loader(Numbers(10), 4, 2, 0, workers)
    second.load_state_dict(first.state_dict())
    assert same(whole, begun + taken(second, 6 - stop))


def test_workers_change_nothing_and_draw_nothing():
    state = torch.get_rng_state()
    with_workers = taken(Loader(Numbers(10), 4, 1, 0, workers=2), 7)
    assert torch.equal(state, torch.get_rng_state())
    assert same(with_workers, taken(Loader(Numbers(10), 4, 1, 0), 7))


class Broken(Numbers):
    def __getitems__(self, key):
        if 7 in key.indices:
            raise UserError("sample 7 cannot be decoded")
        return super().__getitems__(key)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_sample_is_told_without_the_workers_traceback(workers):
    with pytest.raises(UserError) as caught:
        taken(Loader(Broken(10), 4, 1, 0, workers), 4)
    assert str(caught.value) == "sample 7 cannot be decoded"


def test_a_killed_worker_is_explained():
    said = explained(RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed. "))
    assert isinstance(said, UserError) and "(pid 12) is killed by signal: Killed)" in str(said)
    other = RuntimeError("something else")
    assert explained(other) is other


def test_no_data():
    with pytest.raises(UserError, match="the training set numbers holds no batch"):
        next(Loader(Numbers(0), 4, 1, 0).windows())


def test_moving_a_batch_keeps_its_form():
    from collections import namedtuple

    pair = namedtuple("pair", "a b")
    moved = mover(torch.device("meta"))({"x": [torch.ones(2), "text"], "y": pair(torch.ones(1), (3, torch.ones(1)))})
    assert moved["x"][0].is_meta and moved["x"][1] == "text"
    assert isinstance(moved["y"], pair) and moved["y"].b[0] == 3 and moved["y"].b[1].is_meta
    batch = {"x": torch.ones(1)}
    assert mover(torch.device("cpu"))(batch) is batch
