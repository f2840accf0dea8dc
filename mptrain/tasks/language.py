"""Language modelling (paper, section 4.5 and figure 5): an LSTM predicts the next word of running text.

Perplexity = exp(total negative log-likelihood / total words), always over the whole softmax, by documents of a fixed
length that start from an empty state. In training the state is carried from window to window, without its graph.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mptrain import models
from mptrain.data import text
from mptrain.data.dataset import DataSpec
from mptrain.data.words import UNKNOWN
from mptrain.errors import UserError
from mptrain.models.lstm_lm import State, sampled_softmax_loss
from mptrain.tasks.task import Task, at_least

RARE = 8
"""A word seen at most so often in training counts as rare."""


class Language(Task):
    metric = "perplexity"
    higher_is_better = False
    margin = 1.0
    unit = "tokens"

    train_set: text.Stream
    test_set: text.Documents

    def __init__(self, model: torch.nn.Module, train_set: text.Stream, test_set: text.Documents):
        self.model = model
        self.models = {"model": model}
        self.train_set, self.test_set = train_set, test_set
        self.state: State | None = None
        self.rare = rare_words(train_set.words, train_set.vocabulary)

    def losses(self, batch: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        words, targets = batch["words"], batch["targets"]
        if batch["first"] or (self.state is not None and self.state[0].shape[1] != len(words)):
            self.state = None
        state = None if self.state is None else tuple(part.to(words.device) for part in self.state)
        if "sampled" in batch:
            logits, state = self.model(words, state, targets, batch["sampled"])
            loss = sampled_softmax_loss(logits, targets, batch["sampled"], batch["tries"], self.train_set.vocabulary)
        else:
            logits, state = self.model(words, state)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        self.state = tuple(part.detach().float() for part in state)
        yield "model", loss

    def size(self, batch: dict[str, Any]) -> int:
        return batch["tokens"]

    def evaluate(self, batches: Iterable[dict[str, Any]]) -> dict[str, float]:
        """Perplexity and its logarithm ("loss"); the probability given to rare words, beside their true share; the
        share of words outside the vocabulary, which count as one word."""
        nll = rare_given = rare_true = 0.0
        tokens = unknown = 0
        for batch in batches:
            rare = self.rare.to(batch["words"].device)
            windows = (batch[part].split(self.train_set.window, dim=1) for part in ("words", "targets"))
            state = None
            for words, targets in zip(*windows, strict=True):
                logits, state = self.model(words, state)
                scored = targets != text.IGNORED
                logits, targets = logits.float()[scored], targets[scored]
                whole = logits.logsumexp(-1)
                nll += (whole - logits.gather(1, targets[:, None]).squeeze(1)).double().sum().item()
                rare_given += (logits[:, rare].logsumexp(-1) - whole).exp().double().sum().item()
                rare_true += torch.isin(targets, rare).sum().item()
                unknown += (targets == UNKNOWN).sum().item()
            tokens += batch["tokens"]
        return {
            "perplexity": exponential(nll / tokens),
            "loss": nll / tokens,
            "rare_given": rare_given / tokens,
            "rare_true": rare_true / tokens,
            "unknown": unknown / tokens,
        }

    def state_dict(self) -> dict[str, Any]:
        return {} if self.state is None else {"output": self.state[0], "cell": self.state[1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = (state["output"], state["cell"]) if state else None

    def merged(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Each carries the stretches of text it reads."""
        return {key: torch.cat([state[key] for state in states], dim=1) for key in states[0]}

    def part(self, state: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
        return {key: value.tensor_split(size, dim=1)[rank] for key, value in state.items()}


def rare_words(words: np.ndarray, vocabulary: int) -> Tensor:
    """Numbers of the words that occur at most RARE times."""
    counts = np.zeros(vocabulary, np.int64)
    for start in range(0, len(words), 2**24):
        counts += np.bincount(words[start : start + 2**24], minlength=vocabulary)
    return torch.from_numpy(np.flatnonzero(counts <= RARE))


def exponential(loss: float) -> float:
    """exp that ends in inf instead of an OverflowError, for runs that diverge."""
    return math.exp(loss) if not loss > 700 else math.inf


def build(
    data: DataSpec,
    model: str = "mptrain.models.lstm_lm:LSTMLanguageModel",
    vocabulary: int = 8000,
    embedding: int = 256,
    hidden: int = 256,
    layers: int = 1,
    projection: int = 0,
    dropout: float = 0.0,
    tied: bool = True,
    window: int = 35,
    sampled: int = 0,
) -> Language:
    """`window` words between two cuts of the graph; `sampled` words in a sampled softmax, 0 for the whole one."""
    at_least(1, vocabulary=vocabulary, window=window, hidden=hidden, layers=layers)
    if tied and (projection or hidden) != embedding:
        raise UserError(
            f"task.tied=true needs outputs as wide as the embedding, not {projection or hidden} and {embedding}; "
            f"type task.tied=false or task.embedding={projection or hidden}"
        )
    train_set, test_set = text.load(data, vocabulary, window, sampled)
    network = models.build(model, vocabulary, embedding, hidden, layers, projection, dropout, tied)
    return Language(network, train_set, test_set)
