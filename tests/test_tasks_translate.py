import numpy as np
import pytest
import sacrebleu
import torch

from mptrain.data.dataset import BatchKey, DataSpec, batches
from mptrain.data.words import END, START, UNKNOWN
from mptrain.errors import UserError
from mptrain.tasks.translate import build, greedy, length_limit, token_losses

SMALL = {"source_words": 90, "target_words": 90, "layers": 2, "width": 8, "longest": 40}


def small(name: str = "synthetic", folder=None, **options):
    torch.manual_seed(0)
    task = build(DataSpec(name, folder, seed=0), **SMALL | options)
    task.models["model"].eval()
    return task


def batch_of(task, *indices: int):
    return task.train_set.__getitems__(BatchKey(np.array(indices), (0,), True, False))


def test_nll_of_a_batch_is_the_sum_of_its_sentences_alone():
    task = small()
    network = task.models["model"]
    lengths = task.train_set.target.lengths
    short, long = int(lengths.argmin()), int(lengths.argmax())

    def nll(*indices: int) -> float:
        batch = batch_of(task, *indices)
        return token_losses(network(batch["source"], batch["source_lengths"], batch["target_in"]), batch).item()

    assert nll(short, long) == pytest.approx(nll(short) + nll(long), rel=1e-5)


def test_token_number_0_counts_where_it_is_real_and_not_where_it_pads():
    logits = torch.randn(2, 3, 5)
    batch = {"target_out": torch.tensor([[0, 0, 4], [3, 0, 0]]), "target_lengths": torch.tensor([3, 2])}
    scores = logits.log_softmax(-1)
    real = [(0, 0, 0), (0, 1, 0), (0, 2, 4), (1, 0, 3), (1, 1, 0)]
    assert token_losses(logits, batch).item() == pytest.approx(-sum(scores[place].item() for place in real), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_loss_is_fp32_for_half_logits(dtype):
    logits = torch.randn(1, 2, 5).to(dtype)
    batch = {"target_out": torch.tensor([[1, 2]]), "target_lengths": torch.tensor([2])}
    loss = token_losses(logits, batch)
    assert loss.dtype == torch.float32 and torch.equal(loss, token_losses(logits.float(), batch))


def test_training_loss_is_the_mean_over_real_tokens():
    task = small()
    batch = batch_of(task, 0, 1, 2)
    assert task.size(batch) == int(sum(task.train_set.target.lengths[:3] + 1))
    mean = next(task.losses(batch))[1].item() * task.size(batch)
    logits = task.models["model"](batch["source"], batch["source_lengths"], batch["target_in"])
    assert mean == pytest.approx(token_losses(logits, batch).item(), rel=1e-5)


def test_metric_and_perplexity_do_not_depend_on_the_batch_size():
    task = small()
    with torch.no_grad():
        results = [task.evaluate(batches(task.test_set, size)) for size in (1, 7, 64)]
    for result in results[1:]:
        assert result["bleu"] == results[0]["bleu"] and result["sentences"] == 64
        assert result["loss"] == pytest.approx(results[0]["loss"], rel=1e-5)
    assert results[0]["perplexity"] == pytest.approx(np.exp(results[0]["loss"]))


def test_greedy_stops_at_the_end_symbol_and_at_the_limit():
    task = small()
    network = task.models["model"]
    batch = batch_of(task, 0, 1)
    with torch.no_grad():
        network.output.weight.zero_()
        network.output.bias.zero_()
        network.output.bias[7] = 1.0
        words, weights = greedy(network, batch["source"], batch["source_lengths"])
        assert (
            [len(row) for row in words]
            == length_limit(batch["source_lengths"]).tolist()
            == [len(rows) for rows in weights]
        )
        assert {number for row in words for number in row} == {7}
        network.output.bias[END] = 2.0
        words, weights = greedy(network, batch["source"], batch["source_lengths"])
        assert words == [[], []] and [len(rows) for rows in weights] == [0, 0]


def test_greedy_is_the_likeliest_continuation_and_independent_of_the_batch():
    task = small()
    network = task.models["model"]
    together, _ = greedy(network, *(batch_of(task, 0, 1, 2)[k] for k in ("source", "source_lengths")))
    for row, index in enumerate((0, 1, 2)):
        batch = batch_of(task, index)
        (alone,), _ = greedy(network, batch["source"], batch["source_lengths"])
        assert alone == together[row]
        words = torch.tensor([[START, *alone]])
        best = network(batch["source"], batch["source_lengths"], words).argmax(-1)[0].tolist()
        assert best[: len(alone)] == alone


def test_bleu_is_that_of_detokenised_text(monkeypatch):
    task = small()
    numbers = [task.test_set.target[i].tolist() for i in range(64)]
    numbers[0] = numbers[0][:-1]
    order = iter(task.test_set.epoch(40, None))

    def oracle(network, source, lengths):
        rows = [numbers[i] for i in next(order)]
        return rows, [torch.zeros(len(row), source.shape[1]) for row in rows]

    monkeypatch.setattr("mptrain.tasks.translate.greedy", oracle)
    with torch.no_grad():
        score = task.evaluate(batches(task.test_set, 40))["bleu"]
    references = task.test_set.references
    hypotheses = [references[0].rsplit(" ", 1)[0], *references[1:]]
    assert score == sacrebleu.corpus_bleu(hypotheses, [references]).score < 100


def test_unknown_words_are_copied_from_where_attention_looked(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.en").write_text("a a b b\n" if split == "train" else "Zig a Zag\na b\n\n")
        (tmp_path / f"{split}.fr").write_text("x x y y\n" if split == "train" else "x\ny\n\n")
    task = small("wmt", tmp_path, copy_unknown=True, lower_source=True)
    known = task.test_set.target_vocabulary.numbers["x"]
    weights = torch.tensor([[0.1, 0.7, 0.15, 0.05], [0.2, 0.1, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]])
    assert task._sentence(0, [UNKNOWN, UNKNOWN, known], weights) == "Zag Zag x"  # unknown source words come first
    assert task._sentence(1, [UNKNOWN], torch.tensor([[0.3, 0.6, 0.1]])) == "b"  # the end of the sentence is no word
    assert task._sentence(2, [UNKNOWN], torch.tensor([[1.0]])) == "<unk>"
    task.copy_unknown = False
    assert task._sentence(0, [UNKNOWN], weights[:1]) == "<unk>"


def test_an_empty_source_is_translated_and_counts(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.en").write_text("a b\n\nc\n")
        (tmp_path / f"{split}.fr").write_text("x y\nz\nw\n")
    task = small("wmt", tmp_path)
    with torch.no_grad():
        assert task.evaluate(batches(task.test_set, 3))["sentences"] == 3
    assert len(task.train_set) == 2 and task.train_set.left_out == {"train:2": "an empty sentence"}


def test_label_smoothing_enters_the_training_loss_alone():
    plain, smooth = small(), small(label_smoothing=0.2)
    batch = batch_of(plain, 0, 1)
    assert next(plain.losses(batch))[1] != next(smooth.losses(batch))[1]
    with torch.no_grad():
        assert plain.evaluate([batch])["loss"] == smooth.evaluate([batch])["loss"]


def test_translations_are_written_down(tmp_path):
    task = small()
    with torch.no_grad():
        task.evaluate(batches(task.test_set, 64))
    task.finish(tmp_path)
    text = (tmp_path / "translations.txt").read_text()
    assert text.count("  translation: ") == 20 and task.test_set.sources[0] in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source_words": 3}, "task.source_words"),
        ({"dropout": 1.0}, "task.dropout"),
        ({"width": 7, "bidirectional": True}, "split"),
    ],
)
def test_mistakes_are_answered(options, message):
    with pytest.raises(UserError, match=message):
        small(**options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_all_padding_source_leaves_loss_and_gradients_finite_whatever_the_products_ran_in(dtype):
    task = small(residual=True, tie=True)
    batch = batch_of(task, 0, 1)
    batch["source_lengths"][0] = 0
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        ((name, loss),) = task.losses(batch)
    loss.backward()
    assert name == "model" and loss.dtype == torch.float32 and loss.isfinite()
    assert all(p.grad.isfinite().all() for p in task.models["model"].parameters())


def test_a_few_sentences_are_learned_by_heart():
    task = small(width=32, residual=True, tie=True)
    batch = batch_of(task, *range(8))
    adam = torch.optim.Adam(task.models["model"].parameters(), lr=1e-2)
    for _ in range(60):
        adam.zero_grad()
        ((_, loss),) = task.losses(batch)
        loss.backward()
        adam.step()
    assert loss.item() < 0.1
    words, _ = greedy(task.models["model"], batch["source"], batch["source_lengths"])
    assert words == [task.train_set.target[i].tolist() for i in range(8)]
