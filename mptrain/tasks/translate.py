"""Translation with an LSTM encoder and decoder with attention (paper section 4.4, figure 4).

The loss is the mean over the real target tokens of a batch, the end of each sentence included. The metric is
sacrebleu's corpus BLEU, in points, of greedy translations on plain (detokenised) text; perplexity is a side number.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import sacrebleu
import torch
from torch import Tensor
from torch.nn import functional as F

from mptrain.data import parallel_text
from mptrain.data.dataset import Batch, DataSpec
from mptrain.data.words import END, START, UNKNOWN, detokenise, tokenise
from mptrain.errors import UserError
from mptrain.models.seq2seq import Seq2Seq, length_mask
from mptrain.tasks.task import Task

IGNORED = -100
"""Target of a padded position; no token has a negative number."""

TOLD = 20
"""Sentences shown in translations.txt at the end of a run."""


def build(
    data: DataSpec,
    source: str = "en",
    target: str = "fr",
    source_words: int = 100_000,
    target_words: int = 40_000,
    lower_source: bool = False,
    longest: int = 50,
    layers: int = 3,
    width: int = 1024,
    dropout: float = 0.0,
    bidirectional: bool = False,
    residual: bool = False,
    tie: bool = False,
    label_smoothing: float = 0.0,
    copy_unknown: bool = False,
) -> "TranslateTask":
    """Languages, vocabulary sizes, the longest training sentence in tokens, then what Seq2Seq takes.

    `copy_unknown` replaces "unknown" by the source word with the most attention among those that are unknown themselves
    (among all, if none is). Raises UserError for values that cannot be.
    """
    if min(source_words, target_words) < 4 or min(longest, layers, width) < 1:
        raise UserError(
            "task.source_words and task.target_words must be at least 4; longest, layers and width at least 1"
        )
    if not 0 <= dropout < 1 or not 0 <= label_smoothing < 1:
        raise UserError(
            f"task.dropout={dropout} and task.label_smoothing={label_smoothing} must be at least 0 and below 1"
        )
    sizes = parallel_text.Sizes(source_words, target_words, longest, lower_source)
    train_set, test_set = parallel_text.load(data, sizes, source, target)
    words = len(train_set.source_vocabulary), len(train_set.target_vocabulary)
    try:
        network = Seq2Seq(*words, layers, width, dropout, bidirectional, residual, tie)
    except ValueError as error:
        raise UserError(f"task: {error}") from error
    return TranslateTask(network, train_set, test_set, label_smoothing, copy_unknown)


class TranslateTask(Task):
    """An encoder and decoder over two splits of sentence pairs."""

    metric = "bleu"
    higher_is_better = True
    margin = 1.0
    unit = "tokens"
    train_set: parallel_text.ParallelText
    test_set: parallel_text.ParallelText

    def __init__(
        self,
        network: Seq2Seq,
        train_set: parallel_text.ParallelText,
        test_set: parallel_text.ParallelText,
        label_smoothing: float,
        copy_unknown: bool,
    ):
        self.network = network
        self.models = {"model": network}
        self.train_set, self.test_set = train_set, test_set
        self.label_smoothing, self.copy_unknown = label_smoothing, copy_unknown
        self.told: list[tuple[str, str, str, str]] = []

    def losses(self, batch: Batch) -> Iterator[tuple[str, Tensor]]:
        yield "model", token_losses(self._logits(batch), batch, self.label_smoothing) / batch["target_lengths"].sum()

    def size(self, batch: Batch) -> int:
        return int(batch["target_lengths"].sum())

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """`bleu`; `loss` in nats a token without smoothing, `perplexity` = exp(loss), the number of `sentences`."""
        loss, tokens = 0.0, 0
        translations: dict[int, str] = {}
        for batch in batches:
            loss += token_losses(self._logits(batch), batch).double().item()
            tokens += self.size(batch)
            words, weights = greedy(self.network, batch["source"], batch["source_lengths"])
            for index, found, looked_at in zip(batch["index"].tolist(), words, weights, strict=True):
                translations[index] = self._sentence(index, found, looked_at)
        order = sorted(translations)
        references = [self.test_set.references[index] for index in order]
        score = sacrebleu.corpus_bleu([translations[index] for index in order], [references])
        self.told = [
            (self.test_set.ids[i], self.test_set.sources[i], self.test_set.references[i], translations[i])
            for i in order[:: max(1, len(order) // TOLD)][:TOLD]
        ]
        mean = loss / max(1, tokens)
        return {"bleu": score.score, "loss": mean, "perplexity": safe_exp(mean), "sentences": len(order)}

    def finish(self, folder: Path) -> None:
        """translations.txt: for some held-out sentences, source, reference and translation."""
        lines = [f"{i}\n  source:      {s}\n  reference:   {r}\n  translation: {t}\n" for i, s, r, t in self.told]
        (folder / "translations.txt").write_text("".join(lines), encoding="utf8")

    def _logits(self, batch: Batch) -> Tensor:
        return self.network(batch["source"], batch["source_lengths"], batch["target_in"])

    def _sentence(self, index: int, found: list[int], weights: Tensor) -> str:
        """Word numbers and their attention weights (words, source) -> plain text."""
        originals = tokenise(self.test_set.sources[index])
        strange = torch.tensor([number == UNKNOWN for number in self.test_set.source[index]], dtype=torch.bool)
        words = [self.test_set.target_vocabulary.words[number] for number in found]
        if self.copy_unknown and originals:
            candidates = weights[:, : len(originals)].cpu()
            if strange.any():
                candidates = candidates.masked_fill(~strange, -1.0)
            best = candidates.argmax(-1).tolist()
            words = [
                originals[place] if number == UNKNOWN else word
                for number, word, place in zip(found, words, best, strict=True)
            ]
        return detokenise(words)


def safe_exp(x: float) -> float:
    """exp(x), infinity where it overflows."""
    return math.exp(x) if x < 700 else math.inf


def token_losses(logits: Tensor, batch: Batch, label_smoothing: float = 0.0) -> Tensor:
    """Sum of the cross entropy, FP32, over the real target tokens: logits (B, T, V) -> scalar, in nats."""
    real = length_mask(batch["target_lengths"], logits.shape[1])
    targets = batch["target_out"].masked_fill(~real, IGNORED)
    return F.cross_entropy(
        logits.float().flatten(0, 1),
        targets.flatten(),
        ignore_index=IGNORED,
        label_smoothing=label_smoothing,
        reduction="sum",
    )


def length_limit(source_lengths: Tensor) -> Tensor:
    """The most tokens a translation may have: twice the source (its end counted) and ten."""
    return 2 * source_lengths + 10


def greedy(network: Seq2Seq, source: Tensor, source_lengths: Tensor) -> tuple[list[list[int]], list[Tensor]]:
    """The likeliest word at every step, up to the end symbol or `length_limit`.

    Gives for every sentence its word numbers and the attention weights (words, S) they were written with. A sentence's
    translation does not depend on what else is in the batch.
    """
    memory, mask = network.encode(source, source_lengths)
    state = network.first_state(memory, mask)
    limits = length_limit(source_lengths)
    word = torch.full_like(source[:, :1], START)
    going = torch.ones_like(limits, dtype=torch.bool)
    words, attention = [], []
    for step in range(1, int(limits.max()) + 1):
        logits, weights, state = network.decode(word, memory, mask, state)
        word = logits.float().argmax(-1)
        words.append(word)
        attention.append(weights)
        going &= (word[:, 0] != END) & (step < limits)
        if not going.any():
            break
    found = [row[:limit] for row, limit in zip(torch.cat(words, 1).tolist(), limits.tolist(), strict=True)]
    found = [row[: row.index(END)] if END in row else row for row in found]
    return found, [weights[: len(row)] for row, weights in zip(found, torch.cat(attention, 1), strict=True)]
