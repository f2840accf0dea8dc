import io
import re
from collections import Counter

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import soundfile
from PIL import Image as Picture

from mptrain.data import samples
from mptrain.errors import UserError

SIZES = {
    "asterisk": {"train": 479, "test": 60},
    "austen": {"train": 9245, "validation": 551, "test": 502},
    "emoji": {"train": 3 * 1594, "test": 1594},
    "fashion": {"train": 10_000, "test": 5_000},
    "homeassistant_en_de": {"train": 10_606, "test": 833},
    "homeassistant_en_fr": {"train": 6_769, "test": 398},
    "trees": {"train": 4, "test": 1},
}
every_sample = pytest.mark.parametrize("name", samples.names())


def rows(name, split=None, columns=None):
    table = samples.read(name, split)
    return (table.select(columns) if columns else table).to_pylist()


def decoded(row):
    return Picture.open(io.BytesIO(row["image"]["bytes"]))


def plain(text):
    return " ".join(re.findall(r"\w+", text.casefold()))


def test_the_expected_samples_are_there():
    assert samples.names() == sorted(SIZES)


def test_all_samples_together_stay_small():
    assert sum(samples.path(name).stat().st_size for name in samples.names()) <= 22e6


@every_sample
def test_splits_have_their_sizes_and_cover_all_rows(name):
    assert Counter(samples.read(name)["split"].to_pylist()) == SIZES[name]
    for split, size in SIZES[name].items():
        assert set(samples.read(name, split)["split"].to_pylist()) == {split}
        assert len(samples.read(name, split)) == size


@every_sample
def test_no_row_occurs_twice(name):
    table = samples.read(name).drop_columns("split")
    if name == "austen":  # headings recur
        texts = [row["text"] for row in table.to_pylist() if len(row["text"]) > 100]
        assert len(texts) == len(set(texts))
    elif name != "trees":
        assert len({repr(row) for row in table.to_pylist()}) == len(table)


@every_sample
def test_licence_and_origin_stand_in_all_three_places(name):
    metadata = {key.decode(): value.decode() for key, value in pq.read_schema(samples.path(name)).metadata.items()}
    tags = samples.path(name).with_suffix(".parquet.license").read_text("utf-8").splitlines()
    assert f"SPDX-License-Identifier: {metadata['SPDX-License-Identifier']}" in tags
    holders = metadata["SPDX-FileCopyrightText"].splitlines()
    assert [f"SPDX-FileCopyrightText: {holder}" for holder in holders] == tags[: len(holders)] and holders
    readme = samples.path(name).with_name("README.md").read_text("utf-8").splitlines()
    described, licensed = (line for line in readme if line.startswith(f"| `{name}.parquet`"))
    cells = [cell.strip() for cell in licensed.strip("|").split("|")]
    assert cells[1:3] == [metadata["SPDX-License-Identifier"], metadata["source"]] and cells[4] == metadata["changes"]
    sizes = [SIZES[name].get(split, 0) for split in ("train", "validation", "test")]
    assert described.split("|")[2].strip() == f"{sum(sizes):,} ({' + '.join(f'{size:,}' for size in sizes)})"


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(UserError, match="'mnist'.*asterisk, austen, emoji, fashion"):
        samples.path("mnist")
    with pytest.raises(UserError, match="'../samples/fashion'"):
        samples.read("../samples/fashion")


def test_an_unknown_split_lists_what_there_is():
    with pytest.raises(UserError, match="'austen' has no split 'dev'.*train, validation, test"):
        samples.read("austen", "dev")


# --------------------------------------------------------------------------------------------- as `datasets` reads them


@every_sample
def test_datasets_finds_the_same_rows_and_real_features(name, tmp_path):
    loaded = datasets.Dataset.from_parquet(str(samples.path(name)), cache_dir=str(tmp_path))
    assert len(loaded) == sum(SIZES[name].values())
    assert loaded.features == datasets.Features.from_arrow_schema(samples.read(name).schema)
    kinds = {column: type(feature).__name__ for column, feature in loaded.features.items()}
    special = {column: kind for column, kind in kinds.items() if kind not in ("Value", "List")}
    assert (
        special
        == {
            "asterisk": {"audio": "Audio"},
            "austen": {},
            "emoji": {"image": "Image", "group": "ClassLabel"},
            "fashion": {"image": "Image", "label": "ClassLabel"},
            "homeassistant_en_de": {"translation": "Translation"},
            "homeassistant_en_fr": {"translation": "Translation"},
            "trees": {"image": "Image", "objects": "dict"},
        }[name]
    )


def test_datasets_decodes_pictures_and_class_names(tmp_path):
    fashion = datasets.load_dataset(
        "parquet", data_files=str(samples.path("fashion")), split="train", cache_dir=str(tmp_path)
    )
    assert (fashion[0]["image"].mode, fashion[0]["image"].size) == ("L", (28, 28))
    assert fashion.features["label"].int2str(fashion[0]["label"]) == "Ankle boot"
    trees = datasets.Dataset.from_parquet(str(samples.path("trees")), cache_dir=str(tmp_path))
    assert trees[1]["image"].size == (599, 2472)
    assert trees.features["objects"]["category"].feature.names == ["tree"]


# ---------------------------------------------------------------------------------------------------------- one by one


def test_fashion_is_balanced_and_test_pictures_are_new():
    for split, each in (("train", 1000), ("test", 500)):
        counts = np.bincount(samples.read("fashion", split)["label"].to_numpy())
        assert len(counts) == 10 and np.all(np.abs(counts - each) <= 0.12 * each)
    seen = {row["image"]["bytes"] for row in rows("fashion", "train")}
    assert not any(row["image"]["bytes"] in seen for row in rows("fashion", "test"))


def test_fashion_keeps_the_published_pixels():
    first = np.asarray(decoded(rows("fashion", "train")[0]))
    assert first.shape == (28, 28) and first.dtype == np.uint8
    assert first[3, 12:21].tolist() == [1, 0, 0, 13, 73, 0, 0, 1, 4]


def test_trees_are_whole_and_parts_meet_without_sharing_a_column():
    parts = rows("trees")
    assert [decoded(part).size for part in parts] == [(1700, 2472), (599, 2472), (1249, 1035), (400, 400), (400, 400)]
    assert [part["split"] for part in parts] == ["train", "test", "train", "train", "train"]
    for part in parts:
        boxes, (width, height) = np.array(part["objects"]["bbox"]), decoded(part).size
        assert np.all(boxes[:, :2] >= 0) and np.all(boxes[:, 2:] <= [width, height])
        assert np.all(boxes[:, 2:] > boxes[:, :2])
        assert len(boxes) == len(part["objects"]["category"]) == len(part["objects"]["difficult"])
    # 574 crowns of the first photograph: the cut goes through eight of them, and each half counts.
    counts = [len(part["objects"]["bbox"]) for part in parts]
    assert counts[0] + counts[1] == 574 + 8 and counts[2:] == [279, 61, 37]
    difficult = [sum(part["objects"]["difficult"]) for part in parts]
    assert difficult == [6, 2, 0, 0, 0]


@pytest.mark.parametrize("language", ["de", "fr"])
def test_translations_are_split_by_component_without_leaks(language):
    train, test = (rows(f"homeassistant_en_{language}", split) for split in ("train", "test"))
    assert not {row["component"] for row in train} & {row["component"] for row in test}
    for side in ("en", language):
        known = {plain(row["translation"][side]) for row in train}
        assert not any(plain(row["translation"][side]) in known for row in test)
    for row in train + test:
        assert row["translation"][language].strip() and 2 <= len(row["translation"]["en"].split()) <= 30


def test_german_umlauts_and_placeholders_survive():
    pairs = [row["translation"] for row in rows("homeassistant_en_de")]
    assert {"en": "Outdoor air quality index", "de": "Index der Außenluftqualität"} in pairs
    assert sum("{" in pair["en"] for pair in pairs) > 500


def test_austen_is_cut_by_position_in_six_novels():
    text = rows("austen")
    order = [row["split"] for row in text]
    assert order == sorted(order, key=["train", "validation", "test"].index)
    words = Counter()
    for row in text:
        words[row["split"]] += len(row["text"].split())
    total = sum(words.values())
    assert total == 717_537
    assert [round(words[split] / total, 3) for split in ("train", "validation", "test")] == [0.9, 0.05, 0.05]
    assert len({row["book"] for row in text}) == 6
    assert text[3]["text"].startswith("CHAPTER I") or text[2]["text"].startswith("CHAPTER I")


def test_speech_decodes_to_its_length():
    for row in rows("asterisk")[::10]:
        wave, rate = soundfile.read(io.BytesIO(row["audio"]["bytes"]))
        assert rate == 8000 and wave.ndim == 1
        assert 0 <= len(wave) / rate - row["seconds"] < 0.1
        assert np.abs(wave).max() > 0.01


def test_speech_holds_out_words_that_training_never_has():
    train, test = (rows("asterisk", split, ["id", "text", "seconds"]) for split in ("train", "test"))
    assert not {row["text"] for row in train} & {row["text"] for row in test}
    assert max(row["seconds"] for row in test) <= 8
    assert all(re.fullmatch(r"[a-z']+( [a-z']+)*", row["text"]) for row in train + test)


def test_speech_spells_out_figures_and_keys():
    text = {row["id"]: row["text"] for row in rows("asterisk", columns=["id", "text"])}
    assert text["digits/7"] == "seven"
    assert text["spy-h323"] == "h three two three"
    assert text["dictate/both_help"] == "press star to toggle pause press pound to enter a new dictation filename"


def test_emoji_has_every_concept_from_every_vendor():
    table = rows("emoji")
    concepts = {}
    for row in table:
        concepts.setdefault(row["vendor"], []).append(row["hexcode"])
        assert row["split"] == ("test" if row["vendor"] == "fluent" else "train")
    assert list(concepts) == ["noto", "twemoji", "openmoji", "fluent"]
    assert all(found == concepts["noto"] for found in concepts.values()) and len(set(concepts["noto"])) == 1594
    shapes = {np.asarray(decoded(row)).shape for row in table[::50]}
    assert shapes == {(32, 32, 3)}


def test_emoji_is_named_in_four_languages():
    (dog,) = (row for row in rows("emoji", "test") if row["hexcode"] == "1F436")
    names = samples.read("emoji").schema.metadata[b"huggingface"].decode()
    assert [dog["label"], dog["label_de"], dog["label_fr"], dog["label_es"]] == [
        "dog face", "Hundegesicht", "tête de chien", "cara de perro"]  # fmt: skip
    assert dog["emoji"] == "🐶" and "pet" in dog["tags"] and dog["group"] == 2 and "animals-nature" in names
