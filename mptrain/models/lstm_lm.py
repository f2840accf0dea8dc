"""The LSTM language model of Jozefowicz et al. 2016, "Exploring the Limits of Language Modeling" (bigLSTM).

Embedding, stacked LSTM whose outputs are projected to a narrower vector (Sak et al. 2014), softmax over words. With a
very large vocabulary the softmax costs more than all of the rest, so training may score each target against a few
sampled words instead; evaluation always uses the whole softmax.
"""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

State = tuple[Tensor, Tensor]
"""Outputs (layers, batch, projection or hidden) and cells (layers, batch, hidden) after the last word."""


class LSTMLanguageModel(nn.Module):
    """Scores the next word of running text.

    `projection=0` leaves the LSTM's outputs as wide as its cells; `tied` uses the embedding as the softmax's weights
    and needs outputs as wide as the embedding.
    """

    reads = ("output",)
    """children whose parameters are taken without running them"""

    def __init__(
        self,
        vocabulary: int,
        embedding: int,
        hidden: int,
        layers: int = 1,
        projection: int = 0,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        width = projection or hidden
        if tied and width != embedding:
            raise ValueError(f"tied weights need outputs as wide as the embedding, not {width} and {embedding}")
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.dropout = nn.Dropout(dropout)
        between = dropout if layers > 1 else 0.0
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True, dropout=between, proj_size=projection)
        self.output = nn.Linear(width, vocabulary)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.zeros_(self.output.bias)
        if tied:
            self.output.weight = self.embedding.weight

    def forward(
        self, words: Tensor, state: State | None = None, targets: Tensor | None = None, sampled: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Returns logits and the state after the last word of `words` (batch, time).

        Without `targets` and `sampled` the logits are (batch, time, vocabulary). With them they are (batch, time,
        1 + samples): the `targets` (batch, time) first, then the `sampled` words (samples,), the same everywhere.
        """
        x = self.dropout(self.embedding(words))
        if state is not None:
            state = (state[0].to(x.dtype), state[1].to(x.dtype))
        x, state = self.run(x, state)
        x = self.dropout(x)
        if targets is None or sampled is None:
            return self.output(x), state
        of_sampled = F.linear(x, F.embedding(sampled, self.output.weight), self.output.bias[sampled])
        of_target = (x * F.embedding(targets, self.output.weight)).sum(-1) + self.output.bias[targets]
        return torch.cat([of_target.unsqueeze(-1).to(of_sampled.dtype), of_sampled], dim=-1), state

    def run(self, x: Tensor, state: State | None) -> tuple[Tensor, State]:
        """The LSTM, without torch's remark that oneDNN has no projection."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "LSTM with projections is not supported with oneDNN")
            return self.lstm(x, state)


def log_uniform_probability(words: Tensor, vocabulary: int) -> Tensor:
    """P(word) = log((word + 2) / (word + 1)) / log(vocabulary + 1): near Zipf's law if numbered by frequency."""
    words = words.double()
    return torch.log1p(1 / (words + 1)) / torch.log(torch.tensor(vocabulary + 1.0, dtype=torch.float64))


def sampled_softmax_loss(logits: Tensor, targets: Tensor, sampled: Tensor, tries: int, vocabulary: int) -> Tensor:
    """Mean cross entropy of the target among itself and the sampled words (Jean et al. 2015, section 3).

    `logits` (batch, time, 1 + samples) as the network gives them; `sampled` distinct words out of `tries` log-uniform
    draws. Each logit is lowered by the log of how often its word was expected to be drawn, which makes the loss
    approach that of the whole softmax; a sampled word that is the target is left out.
    """

    def log_expected(words: Tensor) -> Tensor:
        return torch.log(-torch.expm1(tries * torch.log1p(-log_uniform_probability(words, vocabulary)))).float()

    logits = logits.float()
    of_target = logits[..., :1] - log_expected(targets).unsqueeze(-1)
    of_sampled = logits[..., 1:] - log_expected(sampled)
    of_sampled = of_sampled.masked_fill(targets.unsqueeze(-1) == sampled, float("-inf"))
    scores = torch.cat([of_target, of_sampled], dim=-1).flatten(0, 1)
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long, device=scores.device))
