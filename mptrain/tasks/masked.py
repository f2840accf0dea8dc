"""Language modelling with the stack of T5: hidden words are told from those around them, or each from those before.

The paper does not have it. It is here for one thing: activations that outgrow FP16 although no gradient does, which no
loss scale can help.
"""

from collections.abc import Iterable, Iterator

import torch.nn.functional as F
from torch import Tensor

from mptrain.data import masked
from mptrain.data.dataset import DataSpec
from mptrain.data.words import START
from mptrain.errors import UserError
from mptrain.models.t5 import T5Encoder
from mptrain.tasks.task import Task, at_least

ASKED = {"hidden": masked.HIDDEN, "next": 1.0}
"""What is asked for, and how large a share of the words that is."""


class MaskedWords(Task):
    metric = "accuracy"
    higher_is_better = True
    margin = 0.01
    unit = "tokens"

    def __init__(
        self, model: T5Encoder, train_set: masked.Masked, test_set: masked.Masked, window: int, ask: str = "hidden"
    ):
        self.model, self.models, self.ask = model, {"model": model}, ask
        self.train_set, self.test_set, self.window = train_set, test_set, window

    def losses(self, batch: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        logits, words = self.answers(batch["words"], batch["hidden"])
        yield "model", F.cross_entropy(logits, words)

    def answers(self, words: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """FP32 logits (n, vocabulary) and the true words (n,) in the places that are asked for (batch, time)."""
        if self.ask == "next":
            words, hidden, seen = words[:, 1:], hidden[:, 1:], words[:, :-1]
        else:
            seen = words.masked_fill(hidden, START)  # real text has no start symbols
        found = self.model(seen)[hidden]
        # The output layer is the embedding; T5 scales what it reads, since the embedding's variance is one.
        return F.linear(found * found.shape[-1] ** -0.5, self.model.embedding.weight).float(), words[hidden]

    def size(self, batch: dict[str, Tensor]) -> int:
        return batch["words"].numel()

    def evaluate(self, batches: Iterable[dict[str, Tensor]]) -> dict[str, float]:
        """Share of the words asked for that are told; `loss` in nats a word."""
        right = asked = 0
        loss = 0.0
        for batch in batches:
            windows = (batch[part].split(self.window, dim=1) for part in ("words", "hidden"))
            for words, hidden in zip(*windows, strict=True):
                if not hidden.any():
                    continue
                logits, true = self.answers(words, hidden)
                loss += F.cross_entropy(logits, true, reduction="none").double().sum().item()
                right += int((logits.argmax(-1) == true).sum())
                asked += len(true)
        return {"accuracy": right / asked, "loss": loss / asked}


def build(
    data: DataSpec,
    vocabulary: int = 4000,
    width: int = 128,
    layers: int = 8,
    heads: int = 4,
    feed: int = 512,
    window: int = 64,
    documents: int = 8,
    dropout: float = 0.0,
    clamp: bool = False,
    ask: str = "hidden",
) -> MaskedWords:
    """`layers` of attention and a feed-forward layer of `feed`; `clamp` see `models.t5`. `window` words a row;
    held-out `documents` of 1,024 words are scored. `ask`: for words that are `hidden`, or for the `next` one
    everywhere."""
    at_least(1, vocabulary=vocabulary, width=width, layers=layers, heads=heads, feed=feed)
    at_least(1, window=window, documents=documents)
    if width % heads:
        raise UserError(f"task.width={width} must be a multiple of task.heads={heads}")
    if not 0 <= dropout < 1:
        raise UserError(f"task.dropout={dropout} must be at least 0 and below 1")
    if ask not in ASKED:
        raise UserError(f"task.ask={ask} is unknown; type task.ask={' or task.ask='.join(ASKED)}")
    train_set, test_set = masked.load(data, vocabulary, window, documents, ASKED[ask])
    model = T5Encoder(vocabulary, width, layers, heads, feed, clamp, dropout, causal=ask == "next")
    return MaskedWords(model, train_set, test_set, window, ask)
