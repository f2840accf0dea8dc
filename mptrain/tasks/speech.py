"""Speech recognition with DeepSpeech 2 and CTC (paper section 4.3, table 3).

The loss is CTC's negative log likelihood over all clips of a batch, divided by the characters of their transcripts. The
metric is the character error rate of greedy decoding: all edits over all characters of the held-out transcripts.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torchaudio.functional import edit_distance

from mptrain.data import speech
from mptrain.data.alphabet import BLANK
from mptrain.data.audio import Spectrogram
from mptrain.data.dataset import Batch, DataSpec
from mptrain.errors import UserError
from mptrain.models.deepspeech import DeepSpeech2
from mptrain.tasks.task import Task

HEARD = 20
"""Clips shown in heard.txt at the end of a run."""


def build(
    data: DataSpec,
    alphabet: str = "english",
    classes: int = 29,
    rate: int = 8000,
    window: float = 0.02,
    hop: float = 0.01,
    mels: int = 0,
    longest: float = 30.0,
    mask_frames: int = 0,
    mask_bins: int = 0,
    mask_share: float = 0.0,
    channels: list[int] | None = None,
    kernels: list[list[int]] | None = None,
    strides: list[list[int]] | None = None,
    width: int = 2560,
    layers: int = 3,
    ahead: int = 19,
    dropout: float = 0.0,
) -> "SpeechTask":
    """Spectrogram: `rate` Hz, `window` and `hop` s, `mels` bands (0: plain); training clips over `longest` s are
    left out.

    The masks are SpecAugment's, in frames and bins; the rest is DeepSpeech2's. Raises UserError for values that
    cannot be.
    """
    if min(rate, window, hop, longest) <= 0:
        raise UserError("task.rate, task.window, task.hop and task.longest must be above 0")
    if not 0 <= dropout < 1 or not 0 <= mask_share < 1:
        raise UserError(f"task.dropout={dropout} and task.mask_share={mask_share} must be at least 0 and below 1")
    spectrogram = Spectrogram(rate, window, hop, mels)
    masks = speech.Masks(mask_frames, mask_bins, mask_share)
    train_set, test_set = speech.load(data, alphabet, classes, spectrogram, masks)
    try:
        network = DeepSpeech2(
            spectrogram.bins,
            classes,
            channels or (32, 32),
            kernels or ((41, 11), (21, 11)),
            strides or ((2, 2), (2, 1)),
            width,
            layers,
            ahead,
            dropout,
        )
    except ValueError as error:
        raise UserError(f"task: {error}") from error
    return SpeechTask(network, train_set, test_set, longest)


class SpeechTask(Task):
    """DeepSpeech 2 over two splits of clips."""

    metric = "cer"
    higher_is_better = False
    margin = 0.02
    unit = "characters"
    train_set: speech.Speech
    test_set: speech.Speech

    def __init__(self, network: DeepSpeech2, train_set: speech.Speech, test_set: speech.Speech, longest: float):
        self.network = network
        self.models = {"model": network}
        self.train_set, self.test_set = train_set, test_set
        frames = longest / train_set.spectrogram.hop

        def misfit(clip: speech.Clip, length: int) -> str | None:
            if missing := train_set.alphabet.missing(clip.text):
                return f"its transcript has {missing!r}, which the alphabet lacks"
            if not clip.text:
                return "its transcript is empty"
            if length > frames:
                return f"it is longer than {longest} s"
            needed, there = frames_needed(clip.text), network.output_lengths(length)
            return f"its transcript needs {needed} output frames and it has {there}" if needed > there else None

        train_set.keep_fitting(misfit)
        train_set.tell_left_out("training")
        test_set.tell_left_out("held-out")
        if not len(train_set):
            raise UserError(f"data={train_set.name}: no training clip is left; look at task.longest and task.alphabet")
        self.heard: dict[str, tuple[str, str]] = {}

    def losses(self, batch: Batch) -> Iterator[tuple[str, Tensor]]:
        logits, lengths = self.network(batch["spectrogram"], batch["lengths"])
        total = clip_losses(logits, lengths, batch["text"], batch["text_lengths"]).sum()
        yield "model", total / batch["text_lengths"].sum()

    def size(self, batch: Batch) -> int:
        return int(batch["text_lengths"].sum())

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """`cer`; `loss`, in nats a character over the clips whose transcript fits their audio; `clips` scored and
        `left_out`.
        """
        edits = characters = clips = fitting = 0
        loss = 0.0
        for batch in batches:
            logits, lengths = self.network(batch["spectrogram"], batch["lengths"])
            written = greedy(logits, lengths)
            for index, numbers in zip(batch["index"].tolist(), written, strict=True):
                clip = self.test_set.clips[index]
                text = self.test_set.alphabet.decode(numbers)
                edits += edit_distance(text, clip.text)
                characters += len(clip.text)
                if len(self.heard) < HEARD or clip.id in self.heard:
                    self.heard[clip.id] = (clip.text, text)
            clips += len(lengths)
            fits = fitting_rows(lengths, batch["text"], batch["text_lengths"])
            if fits.any():
                rows = clip_losses(logits[fits], lengths[fits], batch["text"][fits], batch["text_lengths"][fits])
                loss += rows.double().sum().item()
                fitting += int(batch["text_lengths"][fits].sum())
        return {
            "cer": edits / max(1, characters),
            "loss": loss / max(1, fitting),
            "clips": clips,
            "left_out": len(self.test_set.left_out),
        }

    def finish(self, folder: Path) -> None:
        """heard.txt: for some held-out clips, what was said and what the network wrote."""
        lines = [f"{clip}\n  said:  {said}\n  heard: {heard}\n" for clip, (said, heard) in self.heard.items()]
        (folder / "heard.txt").write_text("".join(lines), encoding="utf8")


def frames_needed(text: str) -> int:
    """The fewest frames in which CTC can write a text: one a character, and a blank between equal neighbours."""
    return len(text) + sum(one == other for one, other in zip(text, text[1:], strict=False))


def fitting_rows(lengths: Tensor, text: Tensor, text_lengths: Tensor) -> Tensor:
    """True for the clips (B,) whose transcript can be spelled (length >= 0) and fits into their output frames."""
    inside = torch.arange(text.shape[1], device=text.device)[1:] < text_lengths.unsqueeze(1)
    repeats = ((text[:, 1:] == text[:, :-1]) & inside).sum(1)
    return (text_lengths >= 0) & (text_lengths + repeats <= lengths)


def clip_losses(logits: Tensor, lengths: Tensor, text: Tensor, text_lengths: Tensor) -> Tensor:
    """CTC negative log likelihood in FP32, nats a clip: logits (B, T, C), lengths (B,), text (B, L) -> (B,)."""
    scores = logits.float().log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, text, lengths, text_lengths, blank=BLANK, reduction="none")


def greedy(logits: Tensor, lengths: Tensor) -> list[list[int]]:
    """The likeliest class of every frame, repeats merged, blanks dropped: (B, T, C) -> class numbers of each clip."""
    best = logits.float().argmax(-1).cpu()
    rows = (torch.unique_consecutive(row[:length]) for row, length in zip(best, lengths.tolist(), strict=True))
    return [row[row != BLANK].tolist() for row in rows]
