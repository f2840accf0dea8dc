"""Sentence pairs for translation.

`homeassistant`: interface sentences of Home Assistant, English with German or French, embedded; whole components are
held out. `wmt`: a folder with train.en, train.fr, test.en, test.fr (line by line), or any folder or hub data set that
the `datasets` library reads and that has a `translation` column; without a folder, WMT15 French-English from the hub.
`synthetic`: sentences of made-up words, translated word by word in reverse order.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch

from mptrain.data import samples
from mptrain.data.dataset import BatchKey, Dataset, DataSpec
from mptrain.data.sequences import bucketed, padded, tell_left_out
from mptrain.data.words import END, START, Vocabulary, tokenise
from mptrain.errors import UserError

Pairs = Callable[[], Iterable[tuple[str, str, str]]]
"""Called once for every pass over a split: yields (id, source sentence, target sentence)."""


@dataclass(frozen=True)
class Sizes:
    """What the recipe says about sentences."""

    source_words: int
    target_words: int
    longest: int
    """a training pair with more tokens than this on one side is left out"""
    lower_source: bool


class ParallelText(Dataset):
    """Encoded pairs in two flat arrays, with the raw sentences beside them where they are needed for a metric."""

    def __init__(self, name: str, kind: str, source: Vocabulary, target: Vocabulary, sizes: Sizes):
        self.name, self.kind = name, kind
        self.source_vocabulary, self.target_vocabulary = source, target
        self.sizes = sizes
        self.source, self.target = Flat(), Flat()
        self.ids: list[str] = []
        self.sources: list[str] = []
        self.references: list[str] = []
        self.left_out: dict[str, str] = {}

    def fill(self, pairs: Pairs, training: bool) -> "ParallelText":
        """Encodes every pair; a training pair that is empty or over-long goes to `left_out` with its reason.

        A held-out pair is never left out: an empty or over-long source still counts in the metric.
        """
        for sample, source, target in pairs():
            tokens = tokenise(source, self.sizes.lower_source), tokenise(target)
            longest = max(map(len, tokens))
            if training and not all(tokens):
                self.left_out[sample] = "an empty sentence"
            elif training and longest > self.sizes.longest:
                self.left_out[sample] = f"{longest} tokens, more than {self.sizes.longest}"
            else:
                self.source.append(self.source_vocabulary.encode(tokens[0]))
                self.target.append(self.target_vocabulary.encode(tokens[1]))
                if not training:
                    self.ids.append(sample)
                    self.sources.append(source)
                    self.references.append(target)
        tell_left_out(f"{self.name}: training pair", self.left_out)
        return self

    def __len__(self) -> int:
        return len(self.source)

    def epoch(self, batch_size: int, rng: np.random.Generator | None) -> list[np.ndarray]:
        return bucketed(self.source.lengths + self.target.lengths, batch_size, rng)

    def __getitems__(self, key: BatchKey) -> dict[str, torch.Tensor]:
        """Numbers: `source` (B, S) closed by END, `target_in` (B, T) opened by START, `target_out` (B, T) closed by
        END; lengths: `source_lengths`, `target_lengths` (B,); `index` (B,). Padding is 0, which is END too: go by the
        lengths.
        """
        source, source_lengths = padded([np.append(self.source[i], END) for i in key.indices])
        target_in, target_lengths = padded([np.append(START, self.target[i]) for i in key.indices])
        target_out, _ = padded([np.append(self.target[i], END) for i in key.indices])
        return {
            "source": source.long(),
            "source_lengths": source_lengths,
            "target_in": target_in.long(),
            "target_out": target_out.long(),
            "target_lengths": target_lengths,
            "index": torch.as_tensor(key.indices),
        }


class Flat:
    """Rows of numbers kept end to end in one array, 4 bytes a number."""

    def __init__(self) -> None:
        self._values = array("i")
        self._ends = array("q", [0])

    def append(self, numbers: list[int]) -> None:
        """Adds a row."""
        self._values.extend(numbers)
        self._ends.append(len(self._values))

    @property
    def lengths(self) -> np.ndarray:
        """Length of every row, int64."""
        return np.diff(np.frombuffer(self._ends, dtype=np.int64))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return np.array(self._values[self._ends[row] : self._ends[row + 1]], dtype=np.int32)


def load(spec: DataSpec, sizes: Sizes, source: str, target: str) -> tuple[ParallelText, ParallelText]:
    """The training and the held-out pairs; both vocabularies are built from the training split alone.

    Raises UserError for an unknown data set, a folder without the files or a split without a usable pair.
    """
    readers = {"homeassistant": homeassistant, "wmt": wmt, "synthetic": synthetic}
    if spec.name not in readers:
        raise UserError(f"data={spec.name} is no parallel text; type data={', data='.join(sorted(readers))}")
    kind, train, test = readers[spec.name](spec, source, target)
    counts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for _, source_sentence, target_sentence in train():
        counts[0].update(tokenise(source_sentence, sizes.lower_source))
        counts[1].update(tokenise(target_sentence))
    vocabularies = Vocabulary(counts[0], sizes.source_words), Vocabulary(counts[1], sizes.target_words)
    train_set = ParallelText(spec.name, kind, *vocabularies, sizes).fill(train, training=True)
    test_set = ParallelText(spec.name, kind, *vocabularies, sizes).fill(test, training=False)
    for split, found in (("training", train_set), ("held-out", test_set)):
        if not len(found):
            raise UserError(f"data={spec.name} has no usable {split} pair; look at data_dir and at task.longest")
    return train_set, test_set


def homeassistant(spec: DataSpec, source: str, target: str) -> tuple[str, Pairs, Pairs]:
    """The embedded sentences, English to or from German or French; the sample id is COMPONENT:ROW of the split."""
    name = "homeassistant_" + "_".join(sorted((source, target), key=lambda language: language != "en"))
    if name not in samples.names():
        raise UserError(f"data=homeassistant has no pair {source}-{target}; type task.source=en task.target=de (or fr)")

    def part(split: str) -> Iterator[tuple[str, str, str]]:
        for row, item in enumerate(samples.read(name, split).to_pylist()):
            pair = item["translation"]
            yield f"{item['component']}:{row}", pair[source], pair[target]

    return "real", lambda: part("train"), lambda: part("test")


def wmt(spec: DataSpec, source: str, target: str) -> tuple[str, Pairs, Pairs]:
    """A folder of parallel text, or what the `datasets` library finds under `data_dir` (a folder, or hub:NAME)."""
    folder = spec.folder
    if folder is not None and (folder / f"train.{source}").is_file():
        return (
            "real",
            lambda: parallel_lines(folder, "train", source, target),
            lambda: parallel_lines(folder, "test", source, target),
        )
    import datasets

    try:
        if folder is not None and (folder / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(str(folder))
        elif folder is not None:
            found = datasets.load_dataset(str(folder).removeprefix("hub:"))
        else:
            found = datasets.load_dataset("wmt/wmt15", f"{source if target == 'en' else target}-en")
    except Exception as error:
        raise UserError(
            f"data=wmt: nothing to read in {folder or 'the hub (wmt/wmt15)'} ({error}); "
            f"give data_dir=FOLDER with train.{source}, train.{target}, test.{source}, test.{target}"
        ) from error
    held_out = next((split for split in ("test", "validation") if split in found), None)
    if "train" not in found or held_out is None or "translation" not in found["train"].column_names:
        raise UserError(
            f"data=wmt: {folder} has the splits {', '.join(found)}; wanted are train and test with a column translation"
        )
    return (
        "real",
        lambda: translations(found, "train", source, target),
        lambda: translations(found, held_out, source, target),
    )


def parallel_lines(folder: Path, split: str, source: str, target: str) -> Iterator[tuple[str, str, str]]:
    """Pairs of train.en and train.fr, line by line; UserError if a file is missing, shorter or not UTF-8."""
    files = folder / f"{split}.{source}", folder / f"{split}.{target}"
    if missing := [str(file) for file in files if not file.is_file()]:
        raise UserError(f"data=wmt: {missing[0]} is missing; each split wants one file a language, line by line")
    try:
        with files[0].open(encoding="utf8") as sources, files[1].open(encoding="utf8") as targets:
            for line, (one, other) in enumerate(zip_longest(sources, targets), start=1):
                if one is None or other is None:
                    raise UserError(f"data=wmt: {files[0]} and {files[1]} differ in their number of lines")
                yield f"{split}:{line}", one.strip(), other.strip()
    except UnicodeDecodeError as error:
        raise UserError(f"data=wmt: {files[0]} or {files[1]} is not UTF-8 ({error}); convert it") from error


def translations(found, split: str, source: str, target: str) -> Iterator[tuple[str, str, str]]:
    """Pairs of a hub data set whose rows are {"translation": {"en": ..., "fr": ...}}; a missing side is empty."""
    for row, item in enumerate(found[split]):
        pair = item["translation"]
        yield f"{split}:{row}", (pair.get(source) or "").strip(), (pair.get(target) or "").strip()


def synthetic(spec: DataSpec, source: str, target: str) -> tuple[str, Pairs, Pairs]:
    """Sentences of 2 to 12 made-up words; the translation is each word's partner, in reverse order."""
    rng = np.random.default_rng(spec.seed)
    partners = [
        ("".join(rng.choice(list("aeioubdgklmnprst"), 5)), "".join(rng.choice(list("aeioubdgklmnprst"), 6)))
        for _ in range(60)
    ]
    sentences = [rng.integers(60, size=rng.integers(2, 13)) for _ in range(320)]

    def part(first: int, last: int) -> Iterator[tuple[str, str, str]]:
        for number, sentence in enumerate(sentences[first:last], start=first):
            yield (
                str(number),
                " ".join(partners[i][0] for i in sentence),
                " ".join(partners[i][1] for i in sentence[::-1]),
            )

    return "synthetic", lambda: part(0, 256), lambda: part(256, 320)
