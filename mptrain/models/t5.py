"""The encoder of T5 (Raffel et al. 2020): a deep stack in which nothing ever normalises what the layers add up.

Each layer reads the sum through an RMS norm and adds to it; attention has no 1/sqrt(d), which the initialisation of its
queries makes up for once only; no layer has a bias. Weights and learning rate are large (0.01 for the first 10,000
steps), so what a feed-forward layer puts out grows, and nothing in the loss minds: the last norm divides it away. FP16
ends at 65,504. `clamp` is the cure that Transformers has for it: what outgrows the format is cut down to just below;
here the scores of attention are too, which are as large where the learning rate is not relative to the weights.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MARGIN = 1000
"""below the largest number of the format, as in Transformers"""
BUCKETS, FARTHEST = 32, 128
"""of relative positions (Raffel et al. 2020, section 2.1)"""


class T5Encoder(nn.Module):
    """Takes words (batch, time), returns hidden states (batch, time, width); `causal`: none sees a word behind it."""

    def __init__(
        self,
        words: int,
        width: int,
        layers: int,
        heads: int,
        feed: int,
        clamp: bool,
        dropout: float = 0.0,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.embedding = nn.Embedding(words, width)
        self.positions = nn.Embedding(BUCKETS, heads)
        self.blocks = nn.ModuleList(Block(width, heads, feed, clamp, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.dropout = nn.Dropout(dropout)

    def forward(self, words: Tensor) -> Tensor:
        x = self.dropout(self.embedding(words))
        bias = self.positions(bucket(words.shape[1], words.device)).permute(2, 0, 1)
        if self.causal:
            ahead = torch.ones_like(bias[0], dtype=torch.bool).triu(1)
            bias = bias.masked_fill(ahead, -math.inf)
        for block in self.blocks:
            x = block(x, bias)
        return self.dropout(self.norm(x))


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to what came in."""

    def __init__(self, width: int, heads: int, feed: int, clamp: bool, dropout: float) -> None:
        super().__init__()
        self.attention, self.feed = Attention(width, heads, clamp), Feed(width, feed)
        self.clamp, self.dropout = clamp, nn.Dropout(dropout)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = self.added(x, self.attention(x, bias))
        return self.added(x, self.feed(x))

    def added(self, x: Tensor, more: Tensor) -> Tensor:
        """The sum so far and what a layer adds to it, each within its format if they are to be clamped."""
        if not self.clamp:
            return x + self.dropout(more)
        return limited(x + self.dropout(limited(more)))


def limited(x: Tensor) -> Tensor:
    limit = torch.finfo(x.dtype).max - MARGIN
    return x.clamp(-limit, limit)


class Attention(nn.Module):
    """Multi-head self-attention of what comes in, after its norm."""

    def __init__(self, width: int, heads: int, clamp: bool = False) -> None:
        super().__init__()
        self.heads, self.clamp = heads, clamp
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.query, self.key, self.value, self.output = (linear(width, width) for _ in range(4))
        nn.init.normal_(self.query.weight, std=(width * (width // heads)) ** -0.5)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = self.norm(x)
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(2, 3)
        weights = ((limited(scores) if self.clamp else scores) + bias).softmax(-1)
        return self.output((weights.type_as(value) @ value).transpose(1, 2).flatten(2))


class Feed(nn.Module):
    """Two linear layers side by side, one through GELU, multiplied, and a third one behind (T5 1.1; Shazeer 2020)."""

    def __init__(self, width: int, feed: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.gate, self.wide, self.narrow = linear(width, feed), linear(width, feed), linear(feed, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.narrow(F.gelu(self.gate(x), approximate="tanh") * self.wide(x))


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Without bias, one divided by the root of its inputs wide: outputs start as large as inputs."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


def bucket(time: int, device: torch.device) -> Tensor:
    """(time, time): which of the buckets the distance from a query (row) to a key (column) falls into.

    Half are for keys ahead; of each half the first half is exact, the others widen like logarithms up to `FARTHEST`.
    """
    place = torch.arange(time, device=device)
    distance = place - place[:, None]
    half, exact = BUCKETS // 2, BUCKETS // 4
    size = distance.abs()
    wide = exact + (size.clamp(min=1) / exact).log() / math.log(FARTHEST / exact) * (half - exact)
    near = torch.where(size < exact, size, wide.long().clamp(max=half - 1))
    return near + half * (distance > 0)
