import itertools

import numpy as np
import pytest
import soundfile
import torch

from mptrain.data.dataset import BatchKey, DataSpec, batches
from mptrain.errors import UserError
from mptrain.tasks.speech import build, clip_losses, fitting_rows, frames_needed, greedy

SMALL = {
    "mels": 20, "channels": [2, 2], "kernels": [[5, 5], [5, 5]], "strides": [[2, 2], [2, 1]], "width": 8, "layers": 1,
    "ahead": 2,
}  # fmt: skip


def small(name: str = "synthetic", folder=None, **options):
    torch.manual_seed(0)
    return build(DataSpec(name, folder, seed=0), **SMALL | options)


@pytest.fixture
def folder(tmp_path):
    def write(split: str, clips: list[tuple[str, float, str]]):
        (tmp_path / split).mkdir(exist_ok=True)
        lines = ["file_name,transcription"]
        for name, seconds, text in clips:
            soundfile.write(
                tmp_path / split / name, np.random.default_rng(0).normal(0, 0.1, round(seconds * 8000)), 8000
            )
            lines.append(f"{name},{text}")
        (tmp_path / split / "metadata.csv").write_text("\n".join(lines), encoding="utf8")

    write("train", [("good.wav", 1.0, "good"), ("much.wav", 0.1, "much too much text"), ("five.wav", 1.0, "dial 555"),
                    ("none.wav", 1.0, "..."), ("long.wav", 3.0, "long")])  # fmt: skip
    write("test", [("fits.wav", 1.0, "fits"), ("much.wav", 0.1, "much too much text"), ("digits.wav", 1.0, "dial 555")])
    return tmp_path


def by_enumeration(text: str, scores: torch.Tensor) -> float:
    """Negative log of the summed probability of every path of classes that collapses to `text`."""
    total = 0.0
    for path in itertools.product(range(scores.shape[1]), repeat=len(scores)):
        merged = [c for c, _ in itertools.groupby(path) if c]
        if merged == [ord(c) - 96 for c in text]:
            total += float(torch.stack([scores[t, c] for t, c in enumerate(path)]).sum().exp())
    return -np.log(total)


def test_loss_is_the_probability_of_all_paths_that_spell_the_text():
    logits = torch.randn(2, 5, 3)
    losses = clip_losses(logits, torch.tensor([5, 4]), torch.tensor([[1, 1], [2, 0]]), torch.tensor([2, 1]))
    scores = logits.log_softmax(-1)
    expected = [by_enumeration("aa", scores[0]), by_enumeration("b", scores[1, :4])]
    assert losses.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_loss_of_half_logits_is_that_of_the_same_values_in_fp32(dtype):
    logits = torch.randn(2, 30, 29).to(dtype)
    lengths, text, text_lengths = torch.tensor([30, 20]), torch.randint(1, 29, (2, 6)), torch.tensor([6, 3])
    half, full = (clip_losses(x, lengths, text, text_lengths) for x in (logits, logits.float()))
    assert half.dtype == torch.float32 and torch.equal(half, full)


def test_greedy_merges_repeats_and_drops_blanks_within_the_length():
    path = torch.tensor([[0, 3, 3, 0, 3, 2, 0, 0, 5], [1, 1, 1, 1, 7, 7, 7, 7, 7]])
    logits = torch.nn.functional.one_hot(path, 8).float()
    assert greedy(logits, torch.tensor([8, 4])) == [[3, 3, 2], [1]]


@pytest.mark.parametrize(("text", "frames"), [("", 0), ("abc", 3), ("aab", 4), ("aaa", 5)])
def test_frames_needed_is_the_shortest_that_ctc_can_write(text, frames):
    assert frames_needed(text) == frames
    if text:
        numbers = torch.tensor([[ord(c) - 96 for c in text]])
        for there in (frames - 1, frames):
            loss = clip_losses(torch.zeros(1, there, 5), torch.tensor([there]), numbers, torch.tensor([len(text)]))
            fits = fitting_rows(torch.tensor([there]), numbers, torch.tensor([len(text)]))
            assert loss.isfinite().tolist() == fits.tolist() == [there >= frames]


def test_training_clips_that_cannot_be_used_are_named(folder):
    task = small("audiofolder", folder, longest=2.0)
    assert [clip.id for clip in task.train_set.clips] == ["good.wav"]
    reasons = task.train_set.left_out
    assert "output frames" in reasons["much.wav"] and "'5'" in reasons["five.wav"]
    assert "empty" in reasons["none.wav"] and "longer than 2.0 s" in reasons["long.wav"]


def test_held_out_clips_count_in_the_metric_even_where_no_loss_exists(folder):
    task = small("audiofolder", folder)
    task.models["model"].eval()
    with torch.no_grad():
        result = task.evaluate(batches(task.test_set, 2))
        fits = task.test_set.__getitems__(BatchKey(np.array([0]), (0,), True, False))
        assert result["loss"] == pytest.approx(float(next(task.losses(fits))[1]), rel=1e-4)
    assert result["clips"] == 3 and result["left_out"] == 0
    assert task.heard.keys() == {"fits.wav", "much.wav", "digits.wav"}


def test_a_broken_held_out_clip_shows_beside_the_metric(folder):
    (folder / "test" / "fits.wav").write_bytes(b"broken")
    task = small("audiofolder", folder)
    with torch.no_grad():
        result = task.evaluate(batches(task.test_set, 2))
    assert result["clips"] == 2 and result["left_out"] == 1 and "fits.wav" in task.test_set.left_out


def test_metric_and_loss_do_not_depend_on_the_batch_size():
    task = small()
    task.models["model"].eval()
    with torch.no_grad():
        results = [task.evaluate(batches(task.test_set, size)) for size in (1, 7, 48)]
    for result in results[1:]:
        assert result["cer"] == results[0]["cer"] and result["loss"] == pytest.approx(results[0]["loss"], rel=1e-5)


def test_cer_is_all_edits_over_all_characters(monkeypatch):
    task = small()
    task.test_set.keep_fitting(lambda clip, frames: None if clip.id in ("192", "193") else "not needed here")
    texts = {i: clip.text for i, clip in enumerate(task.test_set.clips)}
    written = {0: "", 1: texts[1][1:] + "zz"}  # everything deleted; one deleted and two inserted
    monkeypatch.setattr(
        "mptrain.tasks.speech.greedy",
        lambda logits, lengths: [task.test_set.alphabet.encode(written[i]).tolist() for i in order],
    )
    order = task.test_set.epoch(2, None)[0].tolist()
    with torch.no_grad():
        cer = task.evaluate(batches(task.test_set, 2))["cer"]
    assert cer == pytest.approx((len(texts[0]) + 3) / (len(texts[0]) + len(texts[1])))


def test_loss_of_a_batch_is_that_of_its_clips_alone_weighted_by_characters():
    task = small()
    task.models["model"].eval()
    pair = task.train_set.__getitems__(BatchKey(np.array([4, 9]), (0,), True, False))
    alone = [task.train_set.__getitems__(BatchKey(np.array([i]), (0,), True, False)) for i in (4, 9)]
    sizes = [len(task.train_set.clips[i].text) for i in (4, 9)]
    assert [task.size(batch) for batch in (pair, *alone)] == [sum(sizes), *sizes]
    both, *single = (next(task.losses(batch))[1].item() for batch in (pair, *alone))
    assert both * sum(sizes) == pytest.approx(single[0] * sizes[0] + single[1] * sizes[1], rel=1e-5)


def test_a_batch_of_one_trains():
    task = small()
    next(task.losses(task.train_set.__getitems__(BatchKey(np.array([4]), (0,), True, True))))[1].backward()
    assert all(p.grad.isfinite().all() for p in task.models["model"].parameters())


def test_what_was_heard_is_written_down(tmp_path):
    task = small()
    with torch.no_grad():
        task.evaluate(batches(task.test_set, 48))
    task.finish(tmp_path)
    clip = next(iter(task.heard))
    assert f"{clip}\n  said:  " in (tmp_path / "heard.txt").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"longest": 0.0}, "task.longest"),
        ({"dropout": 1.0}, "task.dropout"),
        ({"kernels": [[4, 5], [5, 5]]}, "even"),
        ({"longest": 0.05}, "no training clip"),
    ],
)
def test_mistakes_are_answered(options, message):
    with pytest.raises(UserError, match=message):
        small(**options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_is_fp32_and_gradients_finite_whatever_the_products_ran_in(dtype):
    task = small()
    batch = task.train_set.__getitems__(BatchKey(np.array([0, 1]), (0,), True, True))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        ((name, loss),) = task.losses(batch)
    loss.backward()
    assert name == "model" and loss.dtype == torch.float32
    assert all(p.grad.isfinite().all() for p in task.models["model"].parameters())


def test_a_few_clips_are_learned_by_heart():
    task = small(width=48, channels=[4, 4])
    few = [i for i, clip in enumerate(task.train_set.clips) if len(clip.text) < 9][:4]
    batch = task.train_set.__getitems__(BatchKey(np.array(few), (0,), True, False))
    network = task.models["model"]
    adam = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(90):
        adam.zero_grad()
        ((_, loss),) = task.losses(batch)
        loss.backward()
        adam.step()
    written = greedy(*network(batch["spectrogram"], batch["lengths"]))
    assert [task.train_set.alphabet.decode(numbers) for numbers in written] == [
        task.train_set.clips[i].text for i in few
    ]
