import logging

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from mptrain.data.sequences import bucketed, padded, tell_left_out


@given(st.lists(st.integers(0, 40), min_size=1, max_size=200), st.integers(1, 17), st.none() | st.integers(0, 5))
def test_every_sample_comes_exactly_once(lengths, size, seed):
    batches = bucketed(np.array(lengths), size, None if seed is None else np.random.default_rng(seed))
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    assert sorted(len(batch) for batch in batches)[1:] == [size] * (len(batches) - 1)


def test_batches_are_alike_in_length_and_differ_between_epochs():
    lengths = np.random.default_rng(0).integers(1, 100, 1000)
    rng = np.random.default_rng(1)
    first, second = bucketed(lengths, 10, rng), bucketed(lengths, 10, rng)
    spread = np.mean([np.ptp(lengths[batch]) for batch in first])
    assert spread < 5 < np.mean([np.ptp(lengths[i : i + 10]) for i in range(0, 1000, 10)])
    assert {tuple(batch) for batch in first} != {tuple(batch) for batch in second}
    assert [b.tolist() for b in bucketed(lengths, 10, np.random.default_rng(1))] == [b.tolist() for b in first]


def test_evaluation_starts_with_the_longest():
    assert [batch.tolist() for batch in bucketed(np.array([3, 9, 5]), 2, None)] == [[1, 2], [0]]


def test_padded_rows_and_their_lengths():
    rows, lengths = padded([np.array([0, 7]), np.array([], dtype=int), np.array([5])])
    assert rows.tolist() == [[0, 7], [0, 0], [5, 0]] and lengths.tolist() == [2, 0, 1]
    frames, _ = padded([torch.ones(2, 3), torch.ones(1, 3)])
    assert frames.shape == (2, 2, 3) and not frames[1, 1].any()


def test_what_is_left_out_is_told_by_id_and_beyond_ten_by_number(caplog):
    with caplog.at_level(logging.WARNING):
        tell_left_out("train clip", {f"id{i}": "too long" for i in range(12)})
    assert caplog.messages[0] == "train clip id0 is left out: too long"
    assert len(caplog.messages) == 11 and caplog.messages[-1] == "train clip: 12 left out in all"
