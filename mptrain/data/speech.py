"""Sound clips with transcripts for speech recognition.

`asterisk`: telephone prompts read by one speaker, embedded. `librispeech`: a folder in LibriSpeech's layout
(SPEAKER/CHAPTER/*.trans.txt beside the flac files, below train-* and test-* folders). `audiofolder`: the layout of the
Hugging Face audiofolder: train/metadata.csv (or .jsonl) with file_name,transcription, and the same in test/.
`synthetic`: words spelled in tones, one tone pair a letter.

Whatever does not fit is left out of the training split and told with its sample id; of the held-out split only a clip
that cannot be read at all is left out, and the number of clips left out stands beside the metric.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import soundfile
import torch
from torch import Tensor

from mptrain.data import samples
from mptrain.data.alphabet import ENGLISH, Alphabet, most_frequent, plain_characters, plain_english
from mptrain.data.audio import Sound, Spectrogram, masked, open_sound
from mptrain.data.dataset import BatchKey, Dataset, DataSpec
from mptrain.data.sequences import bucketed, padded, tell_left_out
from mptrain.errors import UserError

LONGEST = 3600
"""Seconds of a clip; a broken header may claim any length, which would be allocated before it is read."""

READ_AHEAD = 2_000_000
"""Sets with fewer frames than this (about 5 hours) are turned into spectrograms once, at the start."""


@dataclass(frozen=True)
class Clip:
    """One recording."""

    id: str
    text: str
    sound: Sound = field(repr=False)


@dataclass(frozen=True)
class Masks:
    """Augmentation of training clips; see `audio.masked`."""

    frames: int
    bins: int
    share: float


class Speech(Dataset):
    """Clips of one split, longest first in evaluation, alike in length in training."""

    def __init__(
        self, name: str, kind: str, clips: list[Clip], alphabet: Alphabet, spectrogram: Spectrogram, masks: Masks
    ):
        self.name, self.kind = name, kind
        self.alphabet, self.spectrogram, self.masks = alphabet, spectrogram, masks
        self.left_out: dict[str, str] = {}
        self.cache: dict[str, Tensor] = {}
        self.clips: list[Clip] = []
        self.frames = np.zeros(0, dtype=np.int64)
        found = [(clip, self._frames(clip)) for clip in clips]
        self._keep([(clip, frames) for clip, frames in found if frames])
        if self.frames.sum() <= READ_AHEAD:
            found = [(clip, self._read(clip)) for clip in self.clips]
            self._keep([(clip, frames) for clip, frames in found if frames])

    def _keep(self, found: list[tuple[Clip, int]]) -> None:
        self.clips = [clip for clip, _ in found]
        self.frames = np.array([frames for _, frames in found], dtype=np.int64)

    def _frames(self, clip: Clip) -> int:
        try:
            with open_sound(clip.sound) as file:
                if file.frames > LONGEST * file.samplerate:
                    return self._leave_out(clip, f"it claims to last {file.frames / file.samplerate / 3600:.1f} hours")
                frames = self.spectrogram.frames(file.frames, file.samplerate)
        except (soundfile.LibsndfileError, OSError) as error:
            return self._leave_out(clip, f"its sound cannot be read ({error})")
        return frames or self._leave_out(clip, f"it is shorter than one window of {self.spectrogram.window} s")

    def _read(self, clip: Clip) -> int:
        try:
            self.cache[clip.id] = self.spectrogram.read(clip.sound)
        except (soundfile.LibsndfileError, ValueError) as error:
            return self._leave_out(clip, f"its sound cannot be read ({error})")
        return len(self.cache[clip.id])

    def _leave_out(self, clip: Clip, reason: str) -> int:
        """Remembers why a clip is missing; returns 0, its number of frames from now on."""
        self.left_out[clip.id] = reason
        return 0

    def keep_fitting(self, misfit: Callable[[Clip, int], str | None]) -> None:
        """Leaves out every clip for which misfit(clip, frames) gives a reason."""
        kept = []
        for clip, frames in zip(self.clips, self.frames.tolist(), strict=True):
            if reason := misfit(clip, frames):
                self._leave_out(clip, reason)
            else:
                kept.append((clip, frames))
        self._keep(kept)

    def tell_left_out(self, split: str) -> None:
        """Warns of the clips that are missing from this split."""
        tell_left_out(f"{self.name}: {split} clip", self.left_out)

    def __len__(self) -> int:
        return len(self.clips)

    def epoch(self, batch_size: int, rng: np.random.Generator | None) -> list[np.ndarray]:
        return bucketed(self.frames, batch_size, rng)

    def features(self, index: int) -> Tensor:
        """Spectrogram (frames, bins) of one clip; UserError with its id if the sound turns out to be broken."""
        clip = self.clips[index]
        if clip.id in self.cache:
            return self.cache[clip.id]
        try:
            return self.spectrogram.read(clip.sound)
        except (soundfile.LibsndfileError, ValueError) as error:
            raise UserError(f"clip {clip.id}: {error}; repair the file or take it out of the transcripts") from error

    def __getitems__(self, key: BatchKey) -> dict[str, Tensor]:
        """`spectrogram` (B, T, bins) FP32, `lengths` (B,) in frames, `text` (B, L), `text_lengths` (B,), `index` (B,).

        Text that the alphabet cannot spell has length -1 (in held-out splits only)."""
        features = [self.features(i) for i in key.indices]
        if key.train:
            rng, m = key.rng(), self.masks
            features = [masked(x, rng, m.frames, m.bins, m.share) for x in features]
        spectrogram, lengths = padded(features)
        texts = [self.clips[i].text for i in key.indices]
        spelled = [not self.alphabet.missing(text) for text in texts]
        text, text_lengths = padded(
            [self.alphabet.encode(text if good else "") for text, good in zip(texts, spelled, strict=True)]
        )
        return {
            "spectrogram": spectrogram,
            "lengths": lengths,
            "text": text,
            "text_lengths": text_lengths.masked_fill(~torch.tensor(spelled), -1),
            "index": torch.as_tensor(key.indices),
        }


def load(spec: DataSpec, alphabet: str, classes: int, spectrogram: Spectrogram, masks: Masks) -> tuple[Speech, Speech]:
    """The training and the held-out clips.

    `alphabet` is english (29 classes) or characters (the `classes` - 1 most frequent of the training transcripts).
    Raises UserError for an unknown data set or alphabet, a folder without clips, or a split of which nothing can be
    used.
    """
    readers = {"asterisk": asterisk, "librispeech": librispeech, "audiofolder": audiofolder, "synthetic": synthetic}
    if spec.name not in readers:
        raise UserError(f"data={spec.name} is no speech; type data={', data='.join(sorted(readers))}")
    plain = {"english": plain_english, "characters": plain_characters}.get(alphabet)
    if plain is None:
        raise UserError(f"task.alphabet={alphabet} is unknown; type task.alphabet=english or task.alphabet=characters")
    kind, *splits = readers[spec.name](spec)
    train, test = ([Clip(clip.id, plain(clip.text), clip.sound) for clip in split] for split in splits)
    letters = Alphabet(ENGLISH) if alphabet == "english" else most_frequent((clip.text for clip in train), classes)
    if len(letters) > classes:
        raise UserError(f"task.classes={classes} is too few for the {len(letters)} classes of the English alphabet")
    train_set, test_set = (Speech(spec.name, kind, clips, letters, spectrogram, masks) for clips in (train, test))
    for split, found in (("training", train_set), ("held-out", test_set)):
        if not len(found):
            raise UserError(f"data={spec.name} has no usable {split} clip; look at data_dir")
    return train_set, test_set


def asterisk(spec: DataSpec) -> tuple[str, list[Clip], list[Clip]]:
    """The embedded prompts; numbers in their transcripts are spelled out as they are read."""
    train, test = (
        [Clip(row["id"], row["text"], row["audio"]["bytes"]) for row in samples.read("asterisk", split).to_pylist()]
        for split in ("train", "test")
    )
    return "real", train, test


def librispeech(spec: DataSpec) -> tuple[str, list[Clip], list[Clip]]:
    """Folders named train* and test* (the latter test-clean alone where it is there); all below data_dir."""
    folder = folder_of(spec)
    held_out = "test-clean" if (folder / "test-clean").is_dir() else "test*"
    return "real", list(transcribed(folder, "train*")), list(transcribed(folder, held_out))


def transcribed(folder: Path, pattern: str) -> Iterator[Clip]:
    """Clips of every *.trans.txt below the matching folders: lines "ID TRANSCRIPT", sound in ID.flac beside it."""
    for file in sorted(folder.glob(f"{pattern}/**/*.trans.txt")):
        for line in file.read_text(encoding="utf8").splitlines():
            sample, _, text = line.partition(" ")
            if sample:
                yield Clip(sample, text, file.parent / f"{sample}.flac")


def audiofolder(spec: DataSpec) -> tuple[str, list[Clip], list[Clip]]:
    """train/ and test/ with their metadata.csv or metadata.jsonl."""
    folder = folder_of(spec)
    return "real", list(listed(folder / "train")), list(listed(folder / "test"))


def listed(folder: Path) -> Iterator[Clip]:
    """Clips of a folder by its metadata file; the sample id is the file name."""
    table, lines = folder / "metadata.csv", folder / "metadata.jsonl"
    if table.is_file():
        with table.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
    elif lines.is_file():
        rows = [json.loads(line) for line in lines.read_text(encoding="utf8").splitlines() if line.strip()]
    else:
        raise UserError(f"data=audiofolder: {folder} has no metadata.csv or metadata.jsonl (file_name,transcription)")
    for number, row in enumerate(rows, start=1):
        if not row.get("file_name") or row.get("transcription") is None:
            raise UserError(f"data=audiofolder: entry {number} of {folder}'s metadata lacks file_name or transcription")
        yield Clip(row["file_name"], row["transcription"], folder / row["file_name"])


def folder_of(spec: DataSpec) -> Path:
    """data_dir, which these data sets need; UserError if it is missing."""
    if spec.folder is None or not spec.folder.is_dir():
        raise UserError(f"data={spec.name} wants a folder, data_dir={spec.folder} is none; type data_dir=/path/to/it")
    return spec.folder


def synthetic(spec: DataSpec) -> tuple[str, list[Clip], list[Clip]]:
    """Clips of one to three made-up words at 8 kHz; a letter is 80 ms of two tones, a space is silence."""
    rng = np.random.default_rng(spec.seed)
    times = np.arange(640) / 8000
    letters = "abcdefghijklmnopqrstuvwxyz"
    tones = {
        letter: np.sin(2 * np.pi * (300 + 110 * (i % 6)) * times) + np.sin(2 * np.pi * (1200 + 400 * (i // 6)) * times)
        for i, letter in enumerate(letters)
    }
    clips = []
    for number in range(240):
        words = ["".join(rng.choice(list(letters), rng.integers(2, 7))) for _ in range(rng.integers(1, 4))]
        text = " ".join(words)
        wave = np.concatenate([0.2 * tones[c] if c != " " else np.zeros(640) for c in text])
        wave += rng.normal(0, 0.01, len(wave))
        file = io.BytesIO()
        soundfile.write(file, wave, 8000, format="WAV")
        clips.append(Clip(str(number), text, file.getvalue()))
    return "synthetic", clips[:192], clips[192:]
