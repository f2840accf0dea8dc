import math

import pytest
import torch
import torch.nn.functional as F

from mptrain.models.lstm_lm import LSTMLanguageModel, log_uniform_probability, sampled_softmax_loss


def test_big_lstm_has_the_published_size():
    with torch.device("meta"):
        model = LSTMLanguageModel(793_471, 1024, 8192, layers=2, projection=1024)
    lstm = 2 * (4 * 8192 * (1024 + 1024) + 2 * 4 * 8192 + 1024 * 8192)
    assert sum(p.numel() for p in model.parameters()) == 2 * 793_471 * 1024 + 793_471 + lstm == 1_776_948_095


def test_tied_weights_are_one_parameter_and_need_equal_widths():
    model = LSTMLanguageModel(50, 8, 8, tied=True)
    assert model.output.weight is model.embedding.weight
    with pytest.raises(ValueError, match="not 16 and 8"):
        LSTMLanguageModel(50, 8, 16, tied=True)


@pytest.mark.parametrize("projection", [0, 6])
def test_two_windows_with_carried_state_equal_one_long_window(projection):
    torch.manual_seed(0)
    model = LSTMLanguageModel(50, 8, 12, layers=2, projection=projection)
    words = torch.randint(50, (3, 11))
    whole, (output, cell) = model(words)
    first, state = model(words[:, :4])
    second, state = model(words[:, 4:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    assert output.shape == (2, 3, projection or 12) and cell.shape == (2, 3, 12)
    torch.testing.assert_close(state, (output, cell))


def test_state_is_taken_in_the_type_of_the_activations():
    model = LSTMLanguageModel(50, 8, 8).bfloat16()
    state = torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)
    logits, _ = model(torch.randint(50, (2, 3)), state)
    assert logits.dtype == torch.bfloat16


def test_sampled_logits_are_those_of_the_whole_softmax():
    torch.manual_seed(0)
    model = LSTMLanguageModel(50, 8, 8)
    torch.nn.init.normal_(model.output.bias)
    words, targets, sampled = torch.randint(50, (3, 5)), torch.randint(50, (3, 5)), torch.tensor([0, 7, 49])
    whole, _ = model(words)
    some, _ = model(words, None, targets, sampled)
    torch.testing.assert_close(some[..., 0], whole.gather(2, targets[..., None])[..., 0])
    torch.testing.assert_close(some[..., 1:], whole[..., sampled])


def test_log_uniform_probabilities_sum_to_one():
    p = log_uniform_probability(torch.arange(793_471), 793_471)
    assert p.sum().item() == pytest.approx(1, abs=1e-12)
    assert p[0].item() == pytest.approx(math.log(2) / math.log(793_472))


def test_sampling_every_word_is_the_whole_softmax():
    """With every word drawn for certain nothing is corrected, and each target occurs once: itself is left out."""
    torch.manual_seed(0)
    logits, targets, everything = torch.randn(2, 4, 9), torch.randint(9, (2, 4)), torch.arange(9)
    candidates = torch.cat([logits.gather(2, targets[..., None]), logits], dim=2)
    loss = sampled_softmax_loss(candidates, targets, everything, tries=10**9, vocabulary=9)
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))


def test_sampled_softmax_corrects_by_the_expected_count():
    """Two candidates by hand: q = 1 - (1 - p)^tries of each."""

    def q(word):
        return 1 - (1 - math.log((word + 2) / (word + 1)) / math.log(101)) ** 5

    target, other = 1.5 - math.log(q(3)), 0.5 - math.log(q(0))
    loss = sampled_softmax_loss(
        torch.tensor([[[1.5, 0.5]]], dtype=torch.float16), torch.tensor([[3]]), torch.tensor([0]), 5, 100
    )
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(1 + math.exp(other - target)), rel=1e-6)
