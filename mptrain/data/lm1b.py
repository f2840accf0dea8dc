"""The 1-billion-word benchmark (Chelba et al. 2013), or any text of its form: one sentence a line, words spaced.

A folder holds `train*` and `heldout*` (or `test*`) files or folders of files, as the published archive does
(training-monolingual.tokenized.shuffled/, heldout-monolingual.tokenized.shuffled/). As in published results, the first
held-out file alone is the test set. `vocabulary.txt` beside them (most frequent first, one word a line, `</s>` and
`<unk>` not needed) saves the count. Without a folder the hub's copy is read through the `datasets` library.

The text is numbered once, which takes minutes for the whole benchmark, and the numbers are kept in a file beside it,
or in ~/.cache/mptrain where the folder cannot be written.
"""

import hashlib
import itertools
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from mptrain.data.words import END, Vocabulary
from mptrain.errors import UserError

HUB = {"path": "billion-word-benchmark/lm1b", "data_dir": "plain_text", "revision": "refs/convert/parquet"}

KEPT = ".mptrain-"
"""What the folders of numbered text are called by."""

Sentences = Callable[[], Iterable[str]]

log = logging.getLogger(__name__)


def read(folder: Path | None, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Word numbers (int32, mapped from the file) of the training and the test text, END after each sentence."""
    if folder is None:
        train, test = hub()
        return numbered(cache(None), f"hub {vocabulary}", vocabulary, train, test, None)
    if not folder.is_dir():
        raise UserError(f"data_dir={folder} is no folder; data=lm1b wants one with train* and heldout* files")
    training, held_out = files(folder, "train"), files(folder, "heldout", "test")
    if not training or not held_out:
        raise UserError(f"data=lm1b: {folder} has no train* or no heldout* files with one sentence a line")
    sources = [*training, held_out[0], *folder.glob("vocabulary.txt")]
    stamp = "".join(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}\n" for file in sources) + str(vocabulary)
    listed = folder / "vocabulary.txt" if (folder / "vocabulary.txt").is_file() else None
    return numbered(cache(folder), stamp, vocabulary, lambda: lines(training), lambda: lines(held_out[:1]), listed)


def files(folder: Path, *prefixes: str) -> list[Path]:
    """Files whose path inside the folder begins with one of the prefixes, in order of their names."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = (name for name in folders if not name.startswith(KEPT))  # another run may just move it
        found += (Path(place, name) for name in names if name != "vocabulary.txt")
    return sorted(file for file in found if str(file.relative_to(folder)).startswith(prefixes) and file.is_file())


def lines(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        with path.open(encoding="utf8") as file:
            yield from file


def hub() -> tuple[Sentences, Sentences]:
    import datasets

    try:
        found = datasets.load_dataset(**HUB)
    except Exception as error:
        raise UserError(
            f"data=lm1b: the hub's {HUB['path']} cannot be read ({error}); "
            "give data_dir=FOLDER with train* and heldout* files"
        ) from error
    return lambda: column(found["train"]), lambda: column(found["test"])


def column(split: Iterable[dict[str, str]]) -> Iterator[str]:
    return (row["text"] for row in split)


def cache(folder: Path | None) -> Path:
    """Where numbered text is kept."""
    if folder is not None and os.access(folder, os.W_OK):
        return folder
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mptrain"


def numbered(
    place: Path, stamp: str, size: int, train: Sentences, test: Sentences, listed: Path | None
) -> tuple[np.ndarray, np.ndarray]:
    """Reads the numbers kept under this stamp; writes them first if there are none, whole or not at all."""
    kept = place / f"{KEPT}{hashlib.sha256(stamp.encode()).hexdigest()[:16]}"
    if not kept.is_dir():
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place, prefix=f"{KEPT}unfinished-") as building:
            log.info("numbering the words of lm1b, once; they are kept in %s", kept)
            vocabulary = Vocabulary(ranks(listed, size) if listed else counts(train()), size)
            vocabulary.numbers["</s>"] = END
            for name, sentences in (("train", train), ("test", test)):
                write(Path(building, name), vocabulary, sentences())
            try:
                os.rename(building, kept)
                os.mkdir(building)
            except OSError:
                if not kept.is_dir():
                    raise
    return np.memmap(kept / "train", np.int32, mode="r"), np.memmap(kept / "test", np.int32, mode="r")


def counts(sentences: Iterable[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for sentence in sentences:
        found.update(sentence.split())
    return found


def ranks(listed: Path, size: int) -> Counter[str]:
    """Stand-in counts that keep a listed vocabulary's order."""
    with listed.open(encoding="utf8") as file:
        words = [word for line in itertools.islice(file, size) if (word := line.split()[0]) not in SPECIAL]
    return Counter({word: size - rank for rank, word in enumerate(words)})


SPECIAL = {"</s>", "<s>", "<unk>", "</S>", "<S>", "<UNK>"}


def write(path: Path, vocabulary: Vocabulary, sentences: Iterable[str]) -> None:
    with path.open("wb") as file:
        for sentence in sentences:
            if words := sentence.split():
                np.array(vocabulary.encode([*words, "</s>"]), np.int32).tofile(file)
