"""Sentences to words and back without loss, and word vocabularies of a stated size."""

import re
from collections import Counter
from collections.abc import Iterable

JOINER = "\uffed"
"""Stands on the side of a token where no space was ("on", "￭.")."""

END, START, UNKNOWN = 0, 1, 2
"""The first three numbers of every vocabulary; 0 is a real token, as padding is told by length."""

TOKEN = re.compile(r"\{[^{}\s]*\}|\w+(?:['’]\w+)*|[^\w\s]")
"""A {placeholder}, a word, or a single other sign."""


def tokenise(sentence: str, lower: bool = False) -> list[str]:
    """Splits a sentence into words, signs and whole {placeholders}; `detokenise` undoes it up to the width of spaces.

    `lower` makes everything but placeholders lower case (for source sentences, which nobody has to restore).
    """
    tokens: list[str] = []
    end = -1
    for match in TOKEN.finditer(sentence.replace(JOINER, " ")):
        token = match.group()
        joined = tokens and match.start() == end
        end = match.end()
        if lower and not token.startswith("{"):
            token = token.lower()
        if joined and is_sign(tokens[-1]) and not is_sign(token):
            tokens[-1] += JOINER
        elif joined:
            token = JOINER + token
        tokens.append(token)
    return tokens


def is_sign(token: str) -> bool:
    """Whether a token is a single sign, joined or not: signs carry the joiners so that words look the same
    everywhere.
    """
    bare = token.strip(JOINER)
    return len(bare) == 1 and not bare.isalnum() and bare != "_"


def detokenise(tokens: Iterable[str]) -> str:
    """Joins tokens with spaces, except where a joiner says there was none."""
    return " ".join(tokens).replace(f"{JOINER} ", "").replace(f" {JOINER}", "").replace(JOINER, "")


class Vocabulary:
    """The most frequent words of a text, numbered; all others are UNKNOWN."""

    def __init__(self, counts: Counter[str], size: int):
        """Keeps `size` entries at most, the three special ones included; words of one count go by alphabet."""
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        self.words = ["</s>", "<s>", "<unk>", *(word for word, _ in ranked[: size - 3])]
        self.numbers = {word: number for number, word in enumerate(self.words) if number > UNKNOWN}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, tokens: Iterable[str]) -> list[int]:
        """Tokens -> numbers; no start or end is added."""
        return [self.numbers.get(token, UNKNOWN) for token in tokens]
