"""LSTM encoder and decoder with attention for translation (paper section 4.4).

The paper names a variant of the TensorFlow English-French tutorial model: 3 or 5 layers of 1024 LSTM cells on each
side, with attention. Two things it leaves open are settled here so that whole sentences go through `nn.LSTM` in one
call: the first decoder layer does the looking (dot product, Luong et al. 2015) and the layers above it get what it
found, as in GNMT (Wu et al. 2016); the decoder starts from the mean of the encoder's outputs. Nothing beyond a
sentence's end ever reaches a result, so no packing is needed.
"""

import torch
from torch import Tensor, nn

State = list[tuple[Tensor, Tensor]]


def length_mask(lengths: Tensor, size: int) -> Tensor:
    """True at the real positions: lengths (B,) -> (B, size)."""
    return torch.arange(size, device=lengths.device) < lengths.unsqueeze(1)


def reverse_each(x: Tensor, lengths: Tensor) -> Tensor:
    """Turn the real part of every sequence of x (B, T, ...) round and leave the padding where it is."""
    steps = torch.arange(x.shape[1], device=x.device)
    index = lengths.unsqueeze(1) - 1 - steps
    index = torch.where(index >= 0, index, steps)
    return x[torch.arange(x.shape[0], device=x.device).unsqueeze(1), index]


def attend(query: Tensor, memory: Tensor, mask: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Dot-product attention: query (B, T, H), memory (B, S, H), mask (B, S) -> context (B, T, H), weights (B, T, S).

    The softmax runs in FP32. A query without a single real key gets zero weights and a zero context, not NaN.
    """
    scores = torch.matmul(query, memory.transpose(1, 2)).float() * scale
    keep = mask.unsqueeze(1)
    weights = scores.masked_fill(~keep, -torch.inf).masked_fill(~keep.any(-1, keepdim=True), 0.0).softmax(-1)
    weights = weights.masked_fill(~keep, 0.0)
    return torch.matmul(weights.type_as(memory), memory), weights


class LSTMStack(nn.Module):
    """Layers of LSTM cells over (B, T, width); with `residual`, every layer as wide as its input adds the two."""

    def __init__(self, layers: int, inputs: int, width: int, dropout: float, residual: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(width if i else inputs, width, batch_first=True) for i in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.residual = residual

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The state entering and leaving is one (h, c) pair of (1, B, width) a layer, kept in the dtype of x."""
        after: State = []
        for i, layer in enumerate(self.layers):
            before = None if state is None else (state[i][0].type_as(x), state[i][1].type_as(x))
            y, last = layer(self.dropout(x), before)
            after.append(last)
            x = x + y if self.residual and x.shape == y.shape else y
        return x, after


class Seq2Seq(nn.Module):
    """Translate token numbers; every number, 0 included, is a real token: padding is known by length alone.

    `bidirectional` splits the encoder's width over two stacks that read the sentence from either end; `tie` shares
    the target embedding with the output layer.
    """

    def __init__(
        self,
        source_words: int,
        target_words: int,
        layers: int = 3,
        width: int = 1024,
        dropout: float = 0.0,
        bidirectional: bool = False,
        residual: bool = False,
        tie: bool = False,
    ):
        super().__init__()
        if bidirectional and width % 2:
            raise ValueError(f"width={width} cannot be split over two directions")
        self.source_embedding = nn.Embedding(source_words, width)
        self.target_embedding = nn.Embedding(target_words, width)
        half = width // 2 if bidirectional else width
        self.encoder = LSTMStack(layers, width, half, dropout, residual)
        self.backward_encoder = LSTMStack(layers, width, half, dropout, residual) if bidirectional else None
        self.decoder = LSTMStack(1, width, width, dropout, residual)
        self.upper_decoder = LSTMStack(layers - 1, width, width, dropout, residual)
        self.query = nn.Linear(width, width, bias=False)
        self.combine = nn.Linear(2 * width, width, bias=False)
        self.output = nn.Linear(width, target_words)
        self.dropout = nn.Dropout(dropout)
        if tie:
            self.output.weight = self.target_embedding.weight
            nn.init.normal_(self.target_embedding.weight, std=width**-0.5)
        # Tied embeddings are small enough for the output layer, so the LSTM gets them enlarged to variance 1. Residual
        # sums have about that variance in every cell (plain LSTM outputs are small): their dot products are scaled.
        self.embedding_scale = width**0.5 if tie else 1.0
        self.attention_scale = width**-0.5 if residual else 1.0

    def encode(self, source: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Sentences (B, S) with their lengths (B,) -> memory (B, S, width), mask (B, S)."""
        x = self.source_embedding(source)
        memory, _ = self.encoder(x)
        if self.backward_encoder is not None:
            other, _ = self.backward_encoder(reverse_each(x, lengths))
            memory = torch.cat([memory, reverse_each(other, lengths)], -1)
            memory = memory + x if self.encoder.residual else memory
        return memory, length_mask(lengths, source.shape[1])

    def first_state(self, memory: Tensor, mask: Tensor) -> State:
        """The decoder's state before the first word: h is the mean encoder output in every layer, c is zero (FP32)."""
        total = memory.float().masked_fill(~mask.unsqueeze(-1), 0.0).sum(1)
        h = (total / mask.sum(1, keepdim=True).clamp(min=1)).unsqueeze(0)
        return [(h, torch.zeros_like(h)) for _ in range(1 + len(self.upper_decoder.layers))]

    def decode(self, words: Tensor, memory: Tensor, mask: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
        """Words so far (B, T) -> logits of the next (B, T, V), attention weights (B, T, S), state after the last."""
        hidden, first = self.decoder(self.target_embedding(words) * self.embedding_scale, state[:1])
        context, weights = attend(self.query(hidden), memory, mask, self.attention_scale)
        mixed = torch.tanh(self.combine(torch.cat([context.type_as(hidden), hidden], -1)))
        hidden, others = self.upper_decoder(mixed, state[1:])
        return self.output(self.dropout(hidden)), weights, first + others

    def forward(self, source: Tensor, source_lengths: Tensor, words: Tensor) -> Tensor:
        """Teacher forcing: source (B, S), lengths (B,), target words from the start symbol on (B, T) -> logits (B, T,
        V).
        """
        memory, mask = self.encode(source, source_lengths)
        return self.decode(words, memory, mask, self.first_state(memory, mask))[0]
