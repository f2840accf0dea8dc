import json

import numpy as np
import pytest
import soundfile
import torch

from mptrain.data import samples, speech
from mptrain.data.audio import Spectrogram
from mptrain.data.dataset import BatchKey, DataSpec, batches
from mptrain.errors import UserError

MEL = Spectrogram(8000, 0.02, 0.01, 40)
NONE = speech.Masks(0, 0, 0.0)


def load(name: str, folder=None, alphabet="english", classes=29, masks=NONE):
    return speech.load(DataSpec(name, folder, seed=0), alphabet, classes, MEL, masks)


def write(path, seconds: float, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.random.default_rng(0).normal(0, 0.1, round(seconds * 8000)), 8000, **options)


def key(*indices: int, train: bool = False, seed=(0, 0, 0)) -> BatchKey:
    return BatchKey(np.array(indices), seed, True, train)


@pytest.fixture
def audiofolder(tmp_path):
    rows = {"train": [("a.wav", "One two"), ("b/c.wav", "Three, four!")], "test": [("d.wav", "five")]}
    for split, clips in rows.items():
        for name, _ in clips:
            write(tmp_path / split / name, 0.5)
        lines = ["file_name,transcription", *(f'{name},"{text}"' for name, text in clips)]
        (tmp_path / split / "metadata.csv").write_text("\n".join(lines), encoding="utf8")
    return tmp_path


def test_audiofolder_with_csv(audiofolder):
    train, test = load("audiofolder", audiofolder)
    assert train.kind == "real" and [(c.id, c.text) for c in train.clips] == [
        ("a.wav", "one two"),
        ("b/c.wav", "three four"),
    ]
    assert len(test) == 1 and train.frames.tolist() == [49, 49]


def test_audiofolder_with_jsonl(audiofolder):
    (audiofolder / "train" / "metadata.csv").unlink()
    line = json.dumps({"file_name": "a.wav", "transcription": "a\nb"})
    (audiofolder / "train" / "metadata.jsonl").write_text(line + "\n\n", encoding="utf8")
    assert [c.text for c in load("audiofolder", audiofolder)[0].clips] == ["a b"]


def test_csv_with_line_breaks_in_a_transcript_and_a_byte_order_mark(audiofolder):
    table = '\ufefffile_name,transcription\na.wav,"one\ntwo"\n'
    (audiofolder / "train" / "metadata.csv").write_text(table, encoding="utf8")
    assert [c.text for c in load("audiofolder", audiofolder)[0].clips] == ["one two"]


def test_librispeech_layout(tmp_path):
    for split, sample in (("train-clean-100", "1-2-0001"), ("test-clean", "3-4-0001"), ("test-other", "5-6-0001")):
        speaker, chapter, _ = sample.split("-")
        folder = tmp_path / split / speaker / chapter
        write(folder / f"{sample}.flac", 0.4)
        (folder / f"{speaker}-{chapter}.trans.txt").write_text(f"{sample} HELLO WORLD\n")
    train, test = load("librispeech", tmp_path)
    assert [(c.id, c.text) for c in train.clips + test.clips] == [
        ("1-2-0001", "hello world"),
        ("3-4-0001", "hello world"),
    ]


def test_unusable_sounds_are_left_out_with_their_id(audiofolder):
    (audiofolder / "train" / "broken.wav").write_bytes(b"RIFF nothing")
    write(audiofolder / "train" / "short.wav", 0.01)
    soundfile.write(audiofolder / "train" / "nan.wav", np.full(4000, np.nan), 8000, subtype="FLOAT")
    with (audiofolder / "train" / "metadata.csv").open("a") as file:
        file.write("\nbroken.wav,x\nshort.wav,x\nnan.wav,x\nmissing.wav,x\n")
    train, _ = load("audiofolder", audiofolder)
    assert [c.id for c in train.clips] == ["a.wav", "b/c.wav"]
    assert set(train.left_out) == {"broken.wav", "short.wav", "nan.wav", "missing.wav"}
    assert "cannot be read" in train.left_out["broken.wav"] and "shorter than one window" in train.left_out["short.wav"]


def test_a_sound_that_breaks_later_is_named(audiofolder, monkeypatch):
    monkeypatch.setattr(speech, "READ_AHEAD", 0)
    train, _ = load("audiofolder", audiofolder)
    (audiofolder / "train" / "b" / "c.wav").write_bytes(b"gone")
    with pytest.raises(UserError, match="clip b/c.wav"):
        train.__getitems__(key(0, 1))


def test_batches_without_read_ahead_are_the_same(audiofolder, monkeypatch):
    ahead = load("audiofolder", audiofolder)[0].__getitems__(key(0, 1))
    monkeypatch.setattr(speech, "READ_AHEAD", 0)
    later = load("audiofolder", audiofolder)[0].__getitems__(key(0, 1))
    assert ahead.keys() == later.keys() and all(torch.equal(ahead[k], later[k]) for k in ahead)


def test_a_batch_and_its_lengths():
    train, _ = load("synthetic")
    batch = train.__getitems__(key(3, 5))
    lengths = [len(train.cache[train.clips[i].id]) for i in (3, 5)]
    assert batch["lengths"].tolist() == lengths and batch["spectrogram"].shape == (2, max(lengths), 40)
    assert not batch["spectrogram"][0, lengths[0] :].any() and not batch["spectrogram"][1, lengths[1] :].any()
    for row, i in enumerate((3, 5)):
        numbers = batch["text"][row, : batch["text_lengths"][row]].tolist()
        assert train.alphabet.decode(numbers) == train.clips[i].text
    assert batch["index"].tolist() == [3, 5]


def test_text_that_cannot_be_spelled_has_length_minus_one(audiofolder):
    (audiofolder / "test" / "metadata.csv").write_text("file_name,transcription\nd.wav,dial 500\n")
    batch = load("audiofolder", audiofolder)[1].__getitems__(key(0))
    assert batch["text_lengths"].tolist() == [-1] and batch["text"].shape == (1, 0)


def test_augmentation_is_for_training_and_hangs_on_the_key_alone():
    train, _ = load("synthetic", masks=speech.Masks(10, 6, 0.3))
    plain = train.__getitems__(key(0, 1))["spectrogram"]
    one, again = (train.__getitems__(key(0, 1, train=True, seed=(0, 1, 2)))["spectrogram"] for _ in range(2))
    other = train.__getitems__(key(0, 1, train=True, seed=(0, 1, 3)))["spectrogram"]
    assert torch.equal(one, again) and not torch.equal(one, plain) and not torch.equal(one, other)


def test_the_embedded_prompts():
    train, test = load("asterisk")
    assert train.kind == "real" and len(train) == len(samples.read("asterisk", "train")) > 400 and len(test) == 60
    assert not train.left_out and not test.left_out
    assert not {c.id for c in train.clips} & {c.id for c in test.clips}
    assert not train.alphabet.missing("".join(c.text for c in train.clips + test.clips))
    assert 1200 < train.frames.sum() / 100 < 1300  # about 21 minutes
    seen = torch.cat([batch["index"] for batch in batches(test, 16)])
    assert sorted(seen.tolist()) == list(range(60))


def test_synthetic_clips_come_from_the_seed():
    one, two = (speech.load(DataSpec("synthetic", seed=seed), "english", 29, MEL, NONE)[0] for seed in (1, 2))
    again = speech.load(DataSpec("synthetic", seed=1), "english", 29, MEL, NONE)[0]
    assert one.kind == "synthetic" and [c.text for c in one.clips] == [c.text for c in again.clips] != [
        c.text for c in two.clips
    ]


def test_characters_come_from_the_training_transcripts(audiofolder):
    (audiofolder / "train" / "metadata.csv").write_text("file_name,transcription\na.wav,你好，你\n", encoding="utf8")
    train, test = load("audiofolder", audiofolder, alphabet="characters", classes=3)
    assert train.alphabet.characters == ["你", "好"] and test.alphabet is train.alphabet


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: load("cifar"), "data=asterisk"),
        (lambda path: load("librispeech"), "data_dir"),
        (lambda path: load("librispeech", path), "no usable training clip"),
        (lambda path: load("audiofolder", path), "metadata.csv"),
        (lambda path: load("synthetic", alphabet="klingon"), "task.alphabet=english"),
        (lambda path: load("synthetic", classes=5), "task.classes=5"),
    ],
)
def test_mistakes_are_answered(call, message, tmp_path):
    with pytest.raises(UserError, match=message):
        call(tmp_path)


def test_metadata_without_its_columns(audiofolder):
    (audiofolder / "train" / "metadata.csv").write_text("file,text\na.wav,one\n")
    with pytest.raises(UserError, match="entry 1 .* lacks"):
        load("audiofolder", audiofolder)
