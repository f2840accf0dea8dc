import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mptrain.data import images
from mptrain.data.crops import resized_crop
from mptrain.data.dataset import BatchKey, DataSpec, batches


def key(indices, seed=(0, 0, 0), train=True) -> BatchKey:
    return BatchKey(np.array(indices), seed, first=False, train=train)


def load(name="synthetic", split="train", seed=0, classes=10, image_size=28, channels=1, augment="none"):
    return images.load(DataSpec(name, seed=seed), split, classes, image_size, channels, augment)


@pytest.fixture(scope="module")
def fashion():
    return load("fashion", augment="flip")


def test_fashion_is_normalised_and_complete(fashion) -> None:
    assert len(fashion) == 10_000
    assert len(load("fashion", "test")) == 5_000
    pictures, labels = fashion.__getitems__(key(range(10_000), train=False))
    assert pictures.shape == (10_000, 1, 28, 28)
    assert pictures.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert labels.bincount().min() > 900
    assert pictures.mean().item() == pytest.approx(0, abs=0.01)
    assert pictures.std().item() == pytest.approx(1, abs=0.01)
    assert (fashion.name, fashion.kind) == ("fashion", "real")


def test_fashion_in_another_size_and_in_colour() -> None:
    test_set = load("fashion", "test", image_size=32, channels=3)
    pictures, _ = next(batches(test_set, 4))
    assert pictures.shape == (4, 3, 32, 32)
    assert torch.equal(pictures[:, 0], pictures[:, 2])


def test_flip_mirrors_about_half_of_the_pictures(fashion) -> None:
    chosen = range(200)
    plain, _ = fashion.__getitems__(key(chosen, train=False))
    changed, _ = fashion.__getitems__(key(chosen))
    same = (changed == plain).flatten(1).all(1)
    mirrored = (changed == plain.flip(3)).flatten(1).all(1)
    assert (same | mirrored).all()
    assert 70 < mirrored.sum() < 130


@pytest.mark.parametrize("augment", ["flip", "random_crop", "random_resized_crop"])
def test_augmentation_depends_on_the_key_alone(augment) -> None:
    first, again = load(augment=augment), load(augment=augment)
    once, labels = first.__getitems__(key([3, 1, 4, 1], (7, 2, 5)))
    first.__getitems__(key([0, 1], (7, 2, 6)))
    assert torch.equal(once, again.__getitems__(key([3, 1, 4, 1], (7, 2, 5)))[0])
    assert not torch.equal(once, again.__getitems__(key([3, 1, 4, 1], (7, 2, 6)))[0])
    assert torch.equal(labels, first.labels[[3, 1, 4, 1]])
    plain, _ = first.__getitems__(key([3, 1, 4, 1], train=False))
    assert torch.equal(plain, load().__getitems__(key([3, 1, 4, 1], train=False))[0])


def test_moving_shifts_each_picture_within_the_margin_of_a_crop() -> None:
    dot = torch.zeros(500, 2, 28, 28, dtype=torch.uint8)
    dot[:, :, 10, 12] = 200
    result = images.moved(dot, np.random.default_rng(0))
    assert (result.flatten(2).sum(2) == 200).all()
    places = result[:, 0].flatten(1).argmax(1)
    assert torch.equal(places, result[:, 1].flatten(1).argmax(1)), "both channels move together"
    rows, columns = places // 28, places % 28
    # 256 to 224 leaves 16 pixels on each side; at 28 that is 2.
    assert set(rows.tolist()) == set(range(8, 13))
    assert set(columns.tolist()) == set(range(10, 15))


def test_zooming_enlarges_the_box(monkeypatch) -> None:
    pictures = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(images, "resized_crop", lambda rng, width, height: (0, 0, width, height))
    assert torch.equal(images.zoomed(pictures, np.random.default_rng(0)), pictures)
    monkeypatch.setattr(images, "resized_crop", lambda rng, width, height: (4, 8, 12, 16))
    expected = F.interpolate(pictures[:, :, 8:16, 4:12].float(), size=(16, 16), mode="bilinear")
    result = images.zoomed(pictures, np.random.default_rng(0)).float()
    assert ((result - expected)[:, :, 1:-1, 1:-1].abs() <= 0.5).all()


@pytest.mark.parametrize(("width", "height"), [(300, 200), (37, 80), (5, 900), (1, 1)])
def test_resized_crops_keep_to_area_and_shape(width, height) -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        left, top, right, bottom = resized_crop(rng, width, height)
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
        if min(width, height) > 30:
            assert 0.07 < (right - left) * (bottom - top) / (width * height) <= 1
            assert 0.7 < (right - left) / (bottom - top) < 1.43


def test_synthetic_pictures_follow_the_seed() -> None:
    train, again, other, test = load(), load(), load(seed=1), load(split="test")
    assert torch.equal(train.pictures, again.pictures)
    assert not torch.equal(train.pictures, other.pictures)
    assert not torch.equal(train.pictures[: len(test)], test.pictures)
    assert train.kind == "synthetic"
    assert class_means(train.pictures, train.labels).sub(class_means(test.pictures, test.labels)).abs().mean() < 8


def class_means(pictures: Tensor, labels: Tensor) -> Tensor:
    return torch.stack([pictures[labels == label].float().mean(0) for label in range(10)])


def test_synthetic_takes_the_form_of_imagenet() -> None:
    pictures, labels = load(classes=1000, image_size=64, channels=3).__getitems__(key([0, 1]))
    assert pictures.shape == (2, 3, 64, 64)
    assert labels.max() < 1000
