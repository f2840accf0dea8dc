from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from mptrain import compose
from mptrain.data import imagenet, images
from mptrain.data.dataset import BatchKey, DataSpec, batches
from mptrain.errors import UserError

SIZE = 56


def load(folder, split="train", classes=2, channels=3, augment="random_resized_crop"):
    return images.load(DataSpec("imagenet", folder and Path(folder)), split, classes, SIZE, channels, augment)


def key(indices, seed=(0, 0, 0), train=True) -> BatchKey:
    return BatchKey(np.array(indices), seed, first=False, train=train)


def photo(width=80, height=64, seed=0) -> Image.Image:
    """Colours that change slowly from place to place, so that JPEG leaves them alone."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part, count in (("train", 3), ("val", 2)):
        for number, name in enumerate(("n01", "n02")):
            (tmp_path / part / name).mkdir(parents=True)
            for index in range(count):
                photo(seed=10 * number + index).save(tmp_path / part / name / f"{name}_{index}.JPEG")
    return tmp_path


def test_folders_are_classes_in_alphabetical_order(folder) -> None:
    train, test = load(folder), load(folder, "test")
    assert (len(train), len(test)) == (6, 4)
    pictures, labels = train.__getitems__(key(range(6)))
    assert pictures.shape == (6, 3, SIZE, SIZE)
    assert pictures.dtype == torch.float32
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert (train.name, train.kind) == ("imagenet", "real")


def test_what_tools_leave_behind_is_no_class_and_no_picture(folder) -> None:
    (folder / "train/.git").mkdir()
    (folder / "train/n01/._n01_0.JPEG").write_bytes(b"of a Macintosh")
    assert len(load(folder)) == 6


def test_a_class_without_a_picture(folder) -> None:
    (folder / "train/n00").mkdir()
    with pytest.raises(UserError, match="train has classes without a picture: n00; remove or fill them"):
        load(folder, classes=3)


@pytest.mark.parametrize(("width", "height"), [(80, 64), (50, 90), (64, 64)])
def test_evaluation_is_torchvision_s_resize_and_centre_crop(folder, width, height) -> None:
    file = folder / "val/n01/n01_0.JPEG"
    photo(width, height).save(file, quality=95)
    pictures, _ = next(batches(load(folder, "test"), 1))
    reference = v2.Compose(
        [
            v2.Resize(SIZE * 256 // 224),
            v2.CenterCrop(SIZE),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(imagenet.MEAN, imagenet.STD),
        ]
    )
    assert torch.allclose(pictures[0], reference(Image.open(file)), atol=1e-5)


@pytest.mark.parametrize("augment", ["flip", "random_crop", "random_resized_crop"])
def test_augmentation_depends_on_the_key_alone(folder, augment) -> None:
    once, _ = load(folder, augment=augment).__getitems__(key([4, 2], (1, 2, 3)))
    again, _ = load(folder, augment=augment).__getitems__(key([4, 2], (1, 2, 3)))
    others = [load(folder, augment=augment).__getitems__(key([4, 2], (1, 2, seed)))[0] for seed in range(4, 10)]
    assert torch.equal(once, again)
    assert any(not torch.equal(once, other) for other in others)


def test_a_picture_s_crop_does_not_depend_on_its_neighbours(folder) -> None:
    train = load(folder)
    one, _ = train.__getitems__(key([4, 2], (1, 2, 3)))
    other, _ = train.__getitems__(key([0, 2], (1, 2, 3)))
    assert torch.equal(one[1], other[1])


def test_caffe_presses_into_a_square_and_crops(folder) -> None:
    halves = Image.new("RGB", (300, 100), (255, 0, 0))
    halves.paste((0, 0, 255), (150, 0, 300, 100))
    halves.save(folder / "val/n01/n01_0.JPEG", quality=95)
    pictures, _ = next(batches(load(folder, "test", augment="random_crop"), 1))
    red = pictures[0, 0] * imagenet.STD[0] + imagenet.MEAN[0]
    assert (red[:, : SIZE // 2 - 3] > 0.95).all()
    assert (red[:, SIZE // 2 + 3 :] < 0.05).all()


def test_random_crop_is_a_piece_of_the_enlarged_picture() -> None:
    picture = photo(seed=3)
    enlarged = np.asarray(picture.resize((64, 64), Image.Resampling.BILINEAR))
    for seed in range(20):
        result = np.asarray(imagenet.cut(picture, SIZE, "random_crop", np.random.default_rng(seed)))
        pieces = [enlarged[t : t + SIZE, le : le + SIZE] for t in range(9) for le in range(9)]
        assert any(np.array_equal(result, p) or np.array_equal(result, p[:, ::-1]) for p in pieces)


@pytest.mark.parametrize(
    ("mode", "ending"), [("L", "JPEG"), ("CMYK", "JPEG"), ("RGBA", "png"), ("LA", "png"), ("P", "png"), ("1", "png")]
)
def test_other_colour_modes_become_rgb(folder, mode, ending) -> None:
    photo().convert(mode).save(folder / f"train/n01/a.{ending}")
    pictures, _ = load(folder).__getitems__(key([0]))
    assert pictures.shape == (1, 3, SIZE, SIZE)
    if mode in ("L", "LA"):
        spread = (pictures[0] * torch.tensor(imagenet.STD).view(3, 1, 1)) + torch.tensor(imagenet.MEAN).view(3, 1, 1)
        assert torch.allclose(spread[0], spread[2], atol=1e-5)


def test_colour_becomes_grey_on_request(folder) -> None:
    pictures, _ = load(folder, channels=1).__getitems__(key([0, 5]))
    assert pictures.shape == (2, 1, SIZE, SIZE)


@pytest.mark.parametrize("damage", ["empty", "noise", "truncated"])
def test_a_corrupt_picture_is_named(folder, damage) -> None:
    file = folder / "train/n02/n02_1.JPEG"
    whole = file.read_bytes()
    file.write_bytes({"empty": b"", "noise": b"\x00" * 500, "truncated": whole[: len(whole) // 2]}[damage])
    with pytest.raises(UserError, match="n02_1.JPEG cannot be decoded"):
        load(folder).__getitems__(key([4]))


def test_mistakes_in_the_layout_are_explained(folder, tmp_path) -> None:
    with pytest.raises(UserError, match="needs data_dir=FOLDER"):
        load(None)
    with pytest.raises(UserError, match="does not exist.*train/CLASS"):
        load(folder / "nowhere")
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="laid out otherwise.*train/CLASS"):
        load(empty)
    with pytest.raises(UserError, match="holds 2 classes, task.classes=1000; set task.classes=2"):
        load(folder, classes=1000)
    (folder / "val/n03").mkdir()
    with pytest.raises(UserError, match="train/ lacks: n03"):
        load(folder, "test")
    (folder / "val").rename(folder / "valid")
    with pytest.raises(UserError, match="has no val/"):
        load(folder, "test")


@pytest.fixture
def saved(tmp_path: Path, monkeypatch) -> Path:
    """A data set as the hub keeps it: Parquet files with encoded pictures."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    for part, count in (("train", 4), ("validation", 3)):
        rows = {"image": [photo(seed=i) for i in range(count)], "label": [i % 2 for i in range(count)]}
        (tmp_path / "set/data").mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_dict(rows, features).to_parquet(tmp_path / f"set/data/{part}-00000-of-00001.parquet")
    return tmp_path / "set"


def test_parquet_files_are_read_through_datasets(saved) -> None:
    train, test = load(saved), load(saved, "test")
    assert (len(train), len(test)) == (4, 3)
    pictures, labels = next(batches(test, 8))
    assert labels.tolist() == [0, 1, 0]
    expected = imagenet.cut(photo(seed=1), SIZE, "none", None)
    levels = pictures[1] * torch.tensor(imagenet.STD).view(3, 1, 1) + torch.tensor(imagenet.MEAN).view(3, 1, 1)
    assert torch.allclose(levels, v2.functional.pil_to_tensor(expected) / 255, atol=1e-5)


def test_a_name_on_the_hub_reaches_datasets_as_it_was_typed(saved, tmp_path, monkeypatch) -> None:
    (tmp_path / "owner").mkdir()
    saved.rename(tmp_path / "owner/set")  # `datasets` looks for owner/set here before it asks the hub
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = compose.config(["+recipe=resnet50_paper", "data_dir=hub:owner/set"])
    assert config.data_dir == "hub:owner/set"
    assert len(load(config.data_dir)) == 4
    with pytest.raises(UserError, match="data_dir=hub:owner/other cannot be loaded"):
        load("hub:owner/other")


def test_a_saved_dataset_dict_is_read_and_its_corrupt_row_named(saved, tmp_path) -> None:
    import datasets

    rows = {"image": [{"bytes": b"no picture", "path": None}], "label": [1]}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    part = datasets.Dataset.from_dict(rows, features)
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(tmp_path / "disk")
    with pytest.raises(UserError, match="picture 0 of test in .*disk cannot be decoded"):
        load(tmp_path / "disk", "test").__getitems__(key([0]))


def test_a_table_without_labels_is_explained(saved) -> None:
    import pyarrow.parquet as pq

    for file in saved.rglob("*.parquet"):
        pq.write_table(pq.read_table(file).drop(["label"]), file)
    with pytest.raises(UserError, match="lacks label"):
        load(saved)


def test_labels_outside_the_classes_are_explained(saved) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for file in saved.rglob("*.parquet"):
        table = pq.read_table(file).replace_schema_metadata(None)
        table = table.set_column(1, "label", pa.array([-1] * len(table)))
        pq.write_table(table, file)
    with pytest.raises(UserError, match="go from -1 to -1"):
        load(saved)
