"""Running text for language models.

`austen`: six novels of Jane Austen, embedded, in lower case; the last part of the text is held out.
`austen_letters`: the same, letter by letter.
`lm1b`: the 1-billion-word benchmark, or any folder of files with one sentence a line (see lm1b.py).
`synthetic`: random words, half of which follow from the word before.
"""

import re
from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch

from mptrain.data import samples
from mptrain.data.dataset import BatchKey, Dataset, DataSpec
from mptrain.data.words import END, Vocabulary
from mptrain.errors import UserError

IGNORED = -100
"""Target where a document has ended; torch's cross entropy leaves it out by default."""

DOCUMENT = 1024
"""Words of held-out text that are scored in one go, from an empty state: fixed, so that no batch size matters."""

WORD = re.compile(r"[a-z]+(?:'[a-z]+)*|\d+|--|[^\w\s]")
"""A word in lower case, a number, a dash, or a single other sign."""


class Stream(Dataset):
    """Training text in `batch_size` parallel stretches; each batch goes on where the last one stopped.

    A sample is named by the position of its first word. `sampled` > 0 adds that many distinct words, drawn
    log-uniformly by their rank, for a sampled softmax.
    """

    def __init__(self, name: str, kind: str, words: np.ndarray, vocabulary: int, window: int, sampled: int = 0):
        self.name, self.kind = name, kind
        self.words, self.vocabulary, self.window, self.sampled = words, vocabulary, window, sampled
        if sampled >= vocabulary:
            raise UserError(f"task.sampled={sampled} leaves no word out of {vocabulary}; type a smaller one, or 0")

    def __len__(self) -> int:
        return (len(self.words) - 1) // self.window

    def epoch(self, batch_size: int, rng: np.random.Generator | None) -> list[np.ndarray]:
        """First positions of each batch. With `rng` the text starts at a random word of the first window; what is left
        over at the end, less than one window per stretch, is dropped so that every batch has the same shape."""
        offset = 0 if rng is None else int(rng.integers(self.window))
        steps = (len(self.words) - 1 - offset) // self.window // batch_size
        if steps == 0:
            raise UserError(
                f"batch_size={batch_size} is too large: data={self.name} has {len(self)} windows of {self.window} words"
            )
        starts = offset + self.window * steps * np.arange(batch_size)
        return [starts + self.window * step for step in range(steps)]

    def __getitems__(self, key: BatchKey) -> dict[str, torch.Tensor | int | bool]:
        """`words` and `targets` (batch, window), how many `tokens` to predict, whether it is the `first` batch of an
        epoch; with a sampled softmax also `sampled` (samples,) and in how many `tries` they were drawn."""
        text = torch.from_numpy(self.words[key.indices[:, None] + np.arange(self.window + 1)].astype(np.int64))
        batch: dict[str, torch.Tensor | int | bool] = {
            "words": text[:, :-1],
            "targets": text[:, 1:],
            "tokens": text[:, 1:].numel(),
            "first": key.first,
        }
        if self.sampled:
            words, tries = log_uniform_sample(self.sampled, self.vocabulary, key.rng())
            batch |= {"sampled": torch.from_numpy(words), "tries": tries}
        return batch


class Documents(Dataset):
    """Held-out text cut into documents of DOCUMENT words, the last one shorter; all words but the first are targets."""

    def __init__(self, name: str, kind: str, words: np.ndarray):
        self.name, self.kind, self.words = name, kind, words

    def __len__(self) -> int:
        return -(-(len(self.words) - 1) // DOCUMENT)

    def __getitems__(self, key: BatchKey) -> dict[str, torch.Tensor | int | bool]:
        """`words` and `targets` (batch, DOCUMENT); behind the end of the text words are END and targets IGNORED."""
        positions = DOCUMENT * key.indices[:, None] + np.arange(DOCUMENT + 1)
        inside = torch.from_numpy(positions < len(self.words))
        text = torch.from_numpy(self.words[np.minimum(positions, len(self.words) - 1)].astype(np.int64))
        words, targets = text[:, :-1].where(inside[:, :-1], END), text[:, 1:].where(inside[:, 1:], IGNORED)
        return {"words": words, "targets": targets, "tokens": int(inside[:, 1:].sum()), "first": True}


def log_uniform_sample(number: int, vocabulary: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """`number` distinct words < `vocabulary`, P(word) = log((word + 2) / (word + 1)) / log(vocabulary + 1).

    Draws until so many distinct ones are found; returns them in the order found, and the number of draws.
    """
    drawn = np.zeros(0, np.int64)
    while True:
        more = np.exp(rng.random(2 * number) * np.log(vocabulary + 1)).astype(np.int64) - 1
        drawn = np.concatenate([drawn, np.minimum(more, vocabulary - 1)])
        first_seen = np.sort(np.unique(drawn, return_index=True)[1])
        if len(first_seen) >= number:
            return drawn[first_seen[:number]], int(first_seen[number - 1]) + 1


def load(spec: DataSpec, vocabulary: int, window: int, sampled: int) -> tuple[Stream, Documents]:
    """The training and the held-out text; the vocabulary comes from the training text alone.

    Raises UserError for an unknown data set or a folder without the files.
    """
    readers = {"austen": austen, "austen_letters": austen_letters, "lm1b": lm1b, "synthetic": synthetic}
    if spec.name not in readers:
        raise UserError(f"data={spec.name} is no running text; type data={', data='.join(sorted(readers))}")
    kind, train, test = readers[spec.name](spec, vocabulary)
    return Stream(spec.name, kind, train, vocabulary, window, sampled), Documents(spec.name, kind, test)


def austen(spec: DataSpec, vocabulary: int) -> tuple[str, np.ndarray, np.ndarray]:
    """Words, numbers and signs in lower case, one </s> after each paragraph; underscores (italics) are dropped."""
    train, test = (list(novel_words(split)) for split in ("train", "test"))
    known = Vocabulary(Counter(train), vocabulary)
    known.numbers["</s>"] = END
    return "real", np.array(known.encode(train), np.int32), np.array(known.encode(test), np.int32)


def austen_letters(spec: DataSpec, vocabulary: int) -> tuple[str, np.ndarray, np.ndarray]:
    """The letters of those words, with a space behind each, and the signs; one </s> after each paragraph."""
    train, test = (
        [sign for word in novel_words(split) for sign in ([word] if word == "</s>" else word + " ")]
        for split in ("train", "test")
    )
    known = Vocabulary(Counter(train), vocabulary)
    known.numbers["</s>"] = END
    return "real", np.array(known.encode(train), np.int32), np.array(known.encode(test), np.int32)


def novel_words(split: str) -> Iterator[str]:
    for paragraph in samples.read("austen", split)["text"].to_pylist():
        yield from WORD.findall(paragraph.lower().replace("_", ""))
        yield "</s>"


def lm1b(spec: DataSpec, vocabulary: int) -> tuple[str, np.ndarray, np.ndarray]:
    from mptrain.data.lm1b import read

    return "real", *read(spec.folder, vocabulary)


def synthetic(spec: DataSpec, vocabulary: int) -> tuple[str, np.ndarray, np.ndarray]:
    """Words with the frequencies of the log-uniform law; every other one is a fixed function of the word before."""
    rng = np.random.default_rng(spec.seed)
    words = np.exp(rng.random(44_000) * np.log(vocabulary + 1)).astype(np.int64) - 1
    words[1::2] = (words[::2] * 7919 + 1) % vocabulary
    words = words.astype(np.int32)
    return "synthetic", words[:40_000], words[40_000:]
