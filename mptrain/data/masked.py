"""Masked text: some words of running text are hidden, to be told from what stands around them (BERT's and T5's task).

Which words are hidden is part of the batch, drawn by its key in training and by the document's place where it is held
out, so that it is the same for every batch size, number of loader workers and precision.
"""

import numpy as np
import torch

from mptrain.data import text
from mptrain.data.dataset import BatchKey, Dataset

HIDDEN = 0.15
"""share of the words, as in BERT and T5"""


class Masked(Dataset):
    """Running text whose batches have a mask: True where a word is asked for, of a share of them."""

    def __init__(self, inner: text.Stream | text.Documents, share: float | None):
        self.inner, self.name, self.kind, self.share = inner, inner.name, inner.kind, share

    def __len__(self) -> int:
        return len(self.inner)

    def epoch(self, batch_size: int, rng: np.random.Generator | None) -> list[np.ndarray]:
        return self.inner.epoch(batch_size, rng)

    def __getitems__(self, key: BatchKey) -> dict[str, torch.Tensor]:
        """`words` and the mask `hidden`, both (batch, time): at least one word of a row, and none behind its end."""
        batch = self.inner.__getitems__(key)
        words, real = batch["words"], batch["targets"] != text.IGNORED
        assert isinstance(words, torch.Tensor) and isinstance(real, torch.Tensor)
        drawn = torch.from_numpy(self._drawn(key, words.shape)).where(real, torch.tensor(2.0))
        hidden = (drawn < (HIDDEN if self.share is None else self.share)) | (
            drawn == drawn.min(1, keepdim=True).values
        ) & real
        return {"words": words, "hidden": hidden}

    def _drawn(self, key: BatchKey, shape: torch.Size) -> np.ndarray:
        if key.train:
            return key.rng().random(shape)
        return np.stack([np.random.default_rng((0, int(index))).random(shape[1]) for index in key.indices])


def load(
    spec: text.DataSpec, vocabulary: int, window: int, documents: int, share: float | None = None
) -> tuple[Masked, Masked]:
    """Training text in stretches of `window` words, and the first held-out `documents`; see `text.load`.

    share: of the words that are asked for; unset, HIDDEN.
    """
    train, test = text.load(spec, vocabulary, window, 0)
    test.words = test.words[: documents * text.DOCUMENT + 1]
    return Masked(train, share), Masked(test, share)
