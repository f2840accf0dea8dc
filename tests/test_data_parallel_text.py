import datasets
import numpy as np
import pytest
import torch

from mptrain.data import samples
from mptrain.data.dataset import BatchKey, DataSpec, batches
from mptrain.data.parallel_text import Sizes, load
from mptrain.data.words import END, START, UNKNOWN
from mptrain.errors import UserError

SIZES = Sizes(source_words=50, target_words=50, longest=6, lower_source=True)


def write(folder, **splits):
    for name, pairs in splits.items():
        for side, language in enumerate(("en", "fr")):
            (folder / f"{name}.{language}").write_text("".join(pair[side] + "\n" for pair in pairs), encoding="utf8")
    return folder


@pytest.fixture
def folder(tmp_path):
    train = [("The cat.", "Le chat."), ("", "rien"), ("nothing", ""), ("a b c d e f g", "a"), ("The dog", "Le chien")]
    return write(tmp_path, train=train, test=[("A cat", "Un chat"), ("", "vide"), ("a b c d e f g h", "x")])


def test_a_folder_of_text_files(folder):
    train, test = load(DataSpec("wmt", folder), SIZES, "en", "fr")
    assert train.kind == "real" and len(train) == 2 and test.references == ["Un chat", "vide", "x"]
    assert (
        train.source_vocabulary.numbers.keys() >= {"the", "cat", "dog"} and "A" not in train.source_vocabulary.numbers
    )
    assert test.ids == ["test:1", "test:2", "test:3"]


def test_empty_and_over_long_training_pairs_are_left_out_by_id_held_out_ones_never(folder):
    train, test = load(DataSpec("wmt", folder), SIZES, "en", "fr")
    assert train.left_out == {
        "train:2": "an empty sentence", "train:3": "an empty sentence", "train:4": "7 tokens, more than 6",
    }  # fmt: skip
    assert not test.left_out and len(test) == 3 and test.source.lengths.tolist() == [2, 0, 8]


def test_vocabularies_know_the_training_split_alone(folder):
    _, test = load(DataSpec("wmt", folder), SIZES, "en", "fr")
    assert test.target[0].tolist() == [UNKNOWN, test.target_vocabulary.numbers["chat"]]


def test_a_batch(folder):
    train, _ = load(DataSpec("wmt", folder), SIZES, "en", "fr")
    batch = train.__getitems__(BatchKey(np.array([1, 0]), (0,), True, True))
    dog, cat = train.target[1].tolist(), train.target[0].tolist()
    assert batch["target_in"].tolist() == [[START, *dog, 0], [START, *cat]]
    assert batch["target_out"].tolist() == [[*dog, END, 0], [*cat, END]]
    assert batch["target_lengths"].tolist() == [3, 4] and batch["source_lengths"].tolist() == [3, 4]
    assert batch["source"][0].tolist() == [*train.source[1].tolist(), END, 0]
    assert {v.dtype for v in batch.values()} == {torch.int64}


def test_hub_layout_saved_on_disk(tmp_path):
    rows = [{"translation": {"en": "one two", "fr": "un deux"}}, {"translation": {"en": "three", "fr": None}}]
    found = datasets.DatasetDict({s: datasets.Dataset.from_list(rows) for s in ("train", "validation")})
    found.save_to_disk(tmp_path / "saved")
    train, test = load(DataSpec("wmt", tmp_path / "saved"), SIZES, "fr", "en")
    assert train.left_out == {"train:1": "an empty sentence"} and test.references == ["one two", "three"]


def test_embedded_sentences_hold_out_whole_components():
    train, test = load(DataSpec("homeassistant"), Sizes(5000, 7000, 40, True), "en", "de")
    assert (
        train.kind == "real"
        and len(train) + len(train.left_out) == len(samples.read("homeassistant_en_de", "train")) > 10000
    )
    rows = samples.read("homeassistant_en_de", "test")
    assert len(test) == len(rows) > 700
    assert len(train.target_vocabulary) == 7000
    seen = torch.cat([batch["index"] for batch in batches(test, 100)])
    assert sorted(seen.tolist()) == list(range(len(rows)))


def test_embedded_sentences_in_the_other_direction():
    _, test = load(DataSpec("homeassistant"), SIZES, "de", "en")
    _, there = load(DataSpec("homeassistant"), SIZES, "en", "de")
    assert test.references == there.sources and test.sources == there.references


def test_synthetic_pairs_come_from_the_seed():
    one, two = (load(DataSpec("synthetic", seed=seed), Sizes(99, 99, 40, True), "en", "fr") for seed in (1, 2))
    again = load(DataSpec("synthetic", seed=1), Sizes(99, 99, 40, True), "en", "fr")
    assert one[0].kind == "synthetic" and (len(one[0]), len(one[1])) == (256, 64)
    assert one[1].references == again[1].references != two[1].references


@pytest.mark.parametrize(
    ("spec", "languages", "message"),
    [
        (DataSpec("imagenet"), ("en", "fr"), "data=homeassistant"),
        (DataSpec("homeassistant"), ("en", "nl"), "task.target=de"),
    ],
)
def test_mistakes_are_answered(spec, languages, message):
    with pytest.raises(UserError, match=message):
        load(spec, SIZES, *languages)


def test_folders_that_cannot_be_used(tmp_path):
    with pytest.raises(UserError, match="train.en"):
        load(DataSpec("wmt", tmp_path), SIZES, "en", "fr")
    write(tmp_path, train=[("a", "b")])
    with pytest.raises(UserError, match="test.en is missing"):
        load(DataSpec("wmt", tmp_path), SIZES, "en", "fr")
    write(tmp_path, test=[("a", "b")])
    (tmp_path / "train.fr").write_text("b\nc\n")
    with pytest.raises(UserError, match="differ in their number of lines"):
        load(DataSpec("wmt", tmp_path), SIZES, "en", "fr")
    (tmp_path / "train.fr").write_bytes(b"\xff\xfe\n")
    with pytest.raises(UserError, match="UTF-8"):
        load(DataSpec("wmt", tmp_path), SIZES, "en", "fr")
    write(tmp_path, train=[("", "")])
    with pytest.raises(UserError, match="no usable training pair"):
        load(DataSpec("wmt", tmp_path), SIZES, "en", "fr")
