"""Sound files to spectrograms."""

import io
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import torch
import torchaudio
from torch import Tensor

Sound = Path | bytes
"""A sound file, or its content."""


def open_sound(sound: Sound) -> soundfile.SoundFile:
    """Opens whatever libsndfile reads (wav, flac, ogg, mp3, ...); raises soundfile.LibsndfileError otherwise."""
    return soundfile.SoundFile(io.BytesIO(sound) if isinstance(sound, bytes) else sound)


@dataclass(frozen=True)
class Spectrogram:
    """Log power spectrogram: windows of `window` seconds every `hop` seconds, as it is or summed into `mels` bands."""

    rate: int
    """Hz; sounds of another rate are resampled"""
    window: float
    hop: float
    mels: int

    @property
    def bins(self) -> int:
        """Number of values a frame."""
        return self.mels or self._samples(self.window) // 2 + 1

    def frames(self, samples: int, rate: int) -> int:
        """Number of whole windows in so many samples taken `rate` times a second; 0 if they are fewer than one
        window.
        """
        samples = math.ceil(samples * self.rate / rate)
        return max(0, 1 + (samples - self._samples(self.window)) // self._samples(self.hop))

    def read(self, sound: Sound) -> Tensor:
        """A sound file -> (frames, bins) FP32, each bin with mean 0 and variance 1 over the clip.

        Raises ValueError if the file breaks off, holds NaN or infinity, or is shorter than one window;
        soundfile.LibsndfileError if it is no sound file.
        """
        with open_sound(sound) as file:
            promised, rate = file.frames, file.samplerate
            wave = torch.from_numpy(file.read(promised, dtype="float32", always_2d=True)).mean(1)
        if len(wave) < promised:
            raise ValueError(f"the file breaks off after {len(wave)} of {promised} samples")
        if not torch.isfinite(wave).all():
            raise ValueError("the file holds NaN or infinite samples")
        if rate != self.rate:
            wave = torchaudio.functional.resample(wave, rate, self.rate)
        return self.features(wave)

    def features(self, wave: Tensor) -> Tensor:
        """A wave (samples,) at `rate` -> (frames, bins) FP32, normalised over the clip."""
        size, hop = self._samples(self.window), self._samples(self.hop)
        if len(wave) < size:
            raise ValueError(f"{len(wave)} samples are shorter than one window of {size}")
        power = (
            torch.stft(wave, size, hop, window=torch.hann_window(size), center=False, return_complex=True)
            .abs()
            .square()
            .T
        )
        if self.mels:
            power = power @ torchaudio.functional.melscale_fbanks(
                size // 2 + 1, 0.0, self.rate / 2, self.mels, self.rate
            )
        logs = power.clamp(min=1e-8).log()
        return (logs - logs.mean(0)) / (logs.std(0, correction=0) + 1e-2)

    def _samples(self, seconds: float) -> int:
        return round(seconds * self.rate)


def masked(features: Tensor, rng: np.random.Generator, frames: int, bins: int, share: float) -> Tensor:
    """SpecAugment (Park et al. 2019): a copy with two stripes of up to `bins` bins and up to `share` of the clip's
    frames in stripes of up to `frames` frames set to 0, the mean.
    """
    features = features.clone()
    length, height = features.shape
    for _ in range(2):
        width = int(rng.integers(bins + 1))
        start = int(rng.integers(max(1, height - width + 1)))
        features[:, start : start + width] = 0.0
    left = int(length * share)
    while left > 0 and frames > 0:
        width = min(left, int(rng.integers(1, frames + 1)))
        start = int(rng.integers(max(1, length - width + 1)))
        features[start : start + width] = 0.0
        left -= width
    return features
