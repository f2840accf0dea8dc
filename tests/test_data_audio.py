import io
import math

import numpy as np
import pytest
import soundfile
import torch

from mptrain.data.audio import Spectrogram, masked

EIGHT = Spectrogram(rate=8000, window=0.02, hop=0.01, mels=0)


def wav(wave: np.ndarray, rate: int = 8000, **options) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, wave, rate, **{"format": "WAV", "subtype": "FLOAT"} | options)
    return file.getvalue()


def tone(hertz: float, seconds: float, rate: int = 8000) -> np.ndarray:
    return np.sin(2 * math.pi * hertz * np.arange(round(seconds * rate)) / rate)


def test_bins_of_the_papers_windows():
    assert Spectrogram(16000, 0.02, 0.01, 0).bins == 161
    assert EIGHT.bins == 81 and Spectrogram(8000, 0.02, 0.01, 40).bins == 40


@pytest.mark.parametrize("samples", [160, 161, 239, 240, 8000, 8001, 12345])
def test_frames_are_what_the_file_gives(samples):
    features = EIGHT.read(wav(np.random.default_rng(0).normal(0, 0.1, samples)))
    assert features.shape == (EIGHT.frames(samples, 8000), 81)
    assert EIGHT.frames(samples, 8000) == 1 + (samples - 160) // 80


@pytest.mark.parametrize(("samples", "rate"), [(1600, 16000), (11025, 22050), (12000, 11025), (4801, 48000)])
def test_frames_of_resampled_files(samples, rate):
    features = EIGHT.read(wav(np.random.default_rng(0).normal(0, 0.1, samples), rate))
    assert len(features) == EIGHT.frames(samples, rate)


def test_a_tone_is_loudest_in_its_own_bin_and_each_bin_is_normalised():
    wave = np.concatenate([tone(1000, 0.5), np.zeros(4000)]) + np.random.default_rng(0).normal(0, 1e-3, 8000)
    features = EIGHT.features(torch.from_numpy(wave).float())
    loud = features[:40].mean(0) - features[60:].mean(0)
    assert int(loud.argmax()) in (19, 20, 21)  # 1000 Hz / 50 Hz a bin
    torch.testing.assert_close(features.mean(0), torch.zeros(81), atol=1e-4, rtol=0)
    assert (features[:, 20].std(correction=0) - 1).abs() < 0.01


def test_channels_are_averaged():
    wave = tone(300, 0.2)
    mono, stereo = EIGHT.read(wav(wave)), EIGHT.read(wav(np.stack([2 * wave, 0 * wave], 1)))
    torch.testing.assert_close(mono, stereo)


@pytest.mark.parametrize(
    "options", [{"format": "FLAC", "subtype": "PCM_16"}, {"subtype": "GSM610"}, {"subtype": "ULAW"}]
)
def test_other_formats(options):
    assert EIGHT.read(wav(0.5 * tone(400, 0.4), **options)).shape[1] == 81


def test_silence_and_a_single_frame_are_finite():
    assert EIGHT.read(wav(np.zeros(800))).abs().max() < 1e-3
    assert EIGHT.read(wav(tone(400, 0.02))).shape == (1, 81)


@pytest.mark.parametrize(
    ("wave", "message"),
    [(np.zeros(159), "shorter than one window"), (np.full(400, np.nan), "NaN"), (np.full(400, np.inf), "NaN")],
)
def test_sounds_that_cannot_be_used(wave, message):
    with pytest.raises(ValueError, match=message):
        EIGHT.read(wav(wave))


def test_a_file_that_breaks_off():
    whole = wav(tone(400, 2.0), format="FLAC", subtype="PCM_16")
    with pytest.raises((ValueError, soundfile.LibsndfileError)):
        EIGHT.read(whole[: len(whole) // 2])


def test_what_is_no_sound_file():
    with pytest.raises(soundfile.LibsndfileError):
        EIGHT.read(b"not a sound" * 100)


def test_masks_set_stripes_to_the_mean_and_leave_the_original():
    features = torch.ones(100, 40)
    stripes = masked(features, np.random.default_rng(0), frames=10, bins=6, share=0.3)
    assert features.all()
    frames, bins = (~stripes.any(1)).sum(), (~stripes.any(0)).sum()
    assert 0 < frames <= 30 and 0 < bins <= 12
    assert masked(features, np.random.default_rng(0), 0, 0, 0.0).all()
    assert masked(torch.ones(1, 40), np.random.default_rng(1), 10, 6, 0.3).shape == (1, 40)
