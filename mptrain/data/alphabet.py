"""Transcripts to the characters a speech network writes, and back."""

import unicodedata
from collections import Counter
from collections.abc import Iterable

import numpy as np

BLANK = 0
"""CTC's "nothing here"; no character has this number."""

UNUSED = "\N{REPLACEMENT CHARACTER}"
"""What a network with more classes than the alphabet writes for one of the others."""

ENGLISH = " 'abcdefghijklmnopqrstuvwxyz"
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class Alphabet:
    """Characters numbered from 1 up; 0 is the blank."""

    def __init__(self, characters: Iterable[str]):
        self.characters = list(characters)
        self.numbers = {character: number for number, character in enumerate(self.characters, start=1)}

    def __len__(self) -> int:
        """Number of classes, the blank included."""
        return len(self.characters) + 1

    def missing(self, text: str) -> str:
        """The characters of a text that the alphabet lacks."""
        return "".join(sorted(set(text) - self.numbers.keys()))

    def encode(self, text: str) -> np.ndarray:
        """int64 numbers; raises KeyError for a character that the alphabet lacks."""
        return np.array([self.numbers[character] for character in text], dtype=np.int64)

    def decode(self, numbers: Iterable[int]) -> str:
        """Numbers without blanks -> text; a number that stands for nothing becomes UNUSED, which counts as an error."""
        return "".join(self.characters[n - 1] if n < len(self) else UNUSED for n in numbers)


def most_frequent(texts: Iterable[str], size: int) -> Alphabet:
    """The characters of the training transcripts, the most frequent first; `size` counts the blank too."""
    counts = Counter(character for text in texts for character in text)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return Alphabet(character for character, _ in ranked[: size - 1])


def plain_english(text: str) -> str:
    """Lower case, without accents and punctuation; hyphens become spaces, a single digit its word.

    Longer numbers stay digits, since their reading is unknown: such a transcript does not fit the alphabet.
    """
    letters = unicodedata.normalize("NFKD", text).replace("\u2019", "'").lower()
    kept = []
    for position, letter in enumerate(letters):
        if letter.isdecimal() and letter.isascii():
            alone = (
                not letters[max(position - 1, 0) : position].isdecimal()
                and not letters[position + 1 : position + 2].isdecimal()
            )
            kept.append(f" {DIGITS[int(letter)]} " if alone else letter)
        elif letter.isalnum() or letter == "'":
            kept.append(letter)
        elif not unicodedata.combining(letter):
            kept.append(" ")
    return " ".join("".join(kept).split())


def plain_characters(text: str) -> str:
    """Any script: width-normalised, lower case, without punctuation and spaces (Mandarin is written without)."""
    return "".join(letter for letter in unicodedata.normalize("NFKC", text).lower() if letter.isalnum())
