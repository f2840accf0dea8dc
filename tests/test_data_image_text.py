import json

import numpy as np
import pytest
import torch
from PIL import Image

from mptrain.data import image_folder, image_text
from mptrain.data.dataset import BatchKey, DataSpec, batches
from mptrain.data.words import END, START, UNKNOWN
from mptrain.errors import UserError


def load(name="synthetic", size=16, words=100, length=8, folder=None, seed=0):
    return image_text.load(DataSpec(name, folder, seed), size, words, length)


def get(data, indices, train, seed=0):
    return data.__getitems__(BatchKey(np.asarray(indices), (0, 0, seed), False, train))


def test_a_caption_is_its_words_between_start_and_end_told_by_length():
    _, test = load()
    batch = get(test, [0, 5], train=False)
    numbers = test.vocabulary.numbers
    assert batch["words"][0].tolist() == [START, *(numbers[w] for w in ("red", "square", "on", "white")), END]
    assert batch["lengths"].tolist() == [6, 6]
    assert batch["pictures"].shape == (2, 3, 16, 16) and batch["pictures"].abs().max() <= 1


def test_a_long_caption_is_cut_and_still_ends():
    _, test = load(length=4)
    words = get(test, [0], train=False)["words"][0].tolist()
    assert len(words) == 4 and words[0] == START and words[-1] == END


def test_words_outside_the_vocabulary_are_unknown():
    _, test = load(words=5)
    assert UNKNOWN in get(test, [0], train=False)["words"]


def test_held_out_pairs_come_once_and_are_the_same_for_every_batch_size():
    _, test = load()
    whole = next(batches(test, len(test)))
    for batch_size in (7, 64):
        pictures = torch.cat([batch["pictures"] for batch in batches(test, batch_size)])
        assert torch.equal(pictures, whole["pictures"])


def test_training_pictures_vary_with_the_batch_and_are_the_same_for_the_same_batch():
    train, _ = load()
    one, same, other = get(train, [3, 4], True), get(train, [3, 4], True), get(train, [3, 4], True, seed=1)
    assert torch.equal(one["pictures"], same["pictures"]) and not torch.equal(one["pictures"], other["pictures"])


def test_augmentation_without_chance_is_the_identity(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *shape, generator: torch.full(shape, 0.5))
    pictures = torch.linspace(0, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)
    torch.testing.assert_close(image_text.augment(pictures, torch.Generator()), pictures)


def test_training_captions_keep_the_name_and_drop_some_tags():
    data = image_text.DrawnPairs("x", "real", torch.zeros(1, 2, 3, 8, 8, dtype=torch.uint8), ["a b"], [["c", "d e"]], 9)
    data.vocabulary = image_text.Vocabulary(data.counts(), 20)
    names = {number: word for word, number in data.vocabulary.numbers.items()}
    captions = set()
    for seed in range(60):
        numbers = data.caption(0, np.random.default_rng(seed))
        captions.add(" ".join(names[n] for n in numbers[1:-1]))
    assert captions == {"a b", "a b c", "a b d e", "a b c d e", "a b d e c"}
    assert [names[n] for n in data.caption(0, None)[1:-1]] == ["a", "b", "c", "d", "e"]


@pytest.fixture(params=["csv", "jsonl"])
def folder(request, tmp_path):
    for part, count in (("train", 3), ("test", 2)):
        (tmp_path / part).mkdir()
        rows = [{"file_name": f"{i}.png", "text": f"Picture, number {i}"} for i in range(count)]
        for i in range(count):
            Image.new("RGB", (20, 10), (i * 10, 20, 30)).save(tmp_path / part / f"{i}.png")
        if request.param == "jsonl":
            text = "\n".join(map(json.dumps, rows))
        else:
            text = "file_name,text\n" + "\n".join(f'{row["file_name"]},"{row["text"]}"' for row in rows)
        (tmp_path / part / f"metadata.{request.param}").write_text(text)
    return tmp_path


def test_a_folder_with_captions(folder):
    train, test = load("imagetext", folder=folder)
    assert (len(train), len(test), train.kind) == (3, 2, "real")
    batch = get(test, [1], train=False)
    assert batch["pictures"][0, :, 8, 8].tolist() == pytest.approx([v / 127.5 - 1 for v in (10, 20, 30)], abs=1e-6)
    assert batch["lengths"].tolist() == [5]


def test_errors_of_a_folder(folder):
    (folder / "test" / "1.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match="1.png cannot be decoded as a picture"):
        get(load("imagetext", folder=folder)[1], [1], train=False)
    for file in (folder / "test").glob("metadata*"):
        file.unlink()
    with pytest.raises(UserError, match="no metadata.csv"):
        load("imagetext", folder=folder)
    (folder / "test" / "metadata.csv").write_text("file_name,label\n0.png,x\n")
    with pytest.raises(UserError, match="needs a file_name and a text"):
        load("imagetext", folder=folder)
    (folder / "train").rename(folder / "elsewhere")
    with pytest.raises(UserError, match="needs train/"):
        load("imagetext", folder=folder)


def test_the_middle_square_is_taken():
    picture = Image.new("RGB", (30, 10), (255, 0, 0))
    picture.paste((0, 0, 255), (10, 0, 20, 10))
    assert image_folder.to_square(picture, 4).flatten(1).T.unique(dim=0).tolist() == [[0, 0, 255]]


def test_unknown_data_names_what_there_is():
    with pytest.raises(UserError, match="data=austen has no captions; type data=emoji, data=imagetext, data=synthetic"):
        load("austen")
