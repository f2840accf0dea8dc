import pytest
import torch

from mptrain.models.seq2seq import Seq2Seq, attend, length_mask, reverse_each


def small(**options) -> Seq2Seq:
    torch.manual_seed(0)
    return Seq2Seq(11, 13, **{"layers": 2, "width": 8} | options)


@pytest.mark.parametrize("layers", [3, 5])
def test_the_paper_size_counted_by_hand(layers):
    with torch.device("meta"):
        network = Seq2Seq(100_000, 40_000, layers, 1024)
    cells = 4 * 1024 * (1024 + 1024) + 2 * 4 * 1024  # four gates, weights from below and from before, two biases each
    attention = 1024 * 1024 + 2 * 1024 * 1024
    expected = 140_000 * 1024 + 2 * layers * cells + attention + (1024 + 1) * 40_000
    assert sum(p.numel() for p in network.parameters()) == expected


@pytest.mark.parametrize(
    "options", [{}, {"bidirectional": True}, {"bidirectional": True, "residual": True, "tie": True}]
)
def test_a_sentence_has_the_same_logits_alone_and_padded(options):
    network = small(**options).eval()
    lengths = torch.tensor([1, 6, 3])
    source, words = torch.randint(11, (3, 9)), torch.randint(13, (3, 5))
    together = network(source, lengths, words)
    for row, length in enumerate(lengths.tolist()):
        alone = network(source[row : row + 1, :length], lengths[row : row + 1], words[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-5, atol=1e-5)


def test_later_target_words_do_not_reach_earlier_logits():
    network = small(residual=True).eval()
    source, lengths, words = torch.randint(11, (2, 4)), torch.tensor([4, 2]), torch.randint(13, (2, 6))
    whole = network(source, lengths, words)
    torch.testing.assert_close(whole[:, :3], network(source, lengths, words[:, :3]), rtol=1e-5, atol=1e-5)


def test_decoding_word_by_word_equals_teacher_forcing():
    network = small(bidirectional=True, residual=True).eval()
    source, lengths, words = torch.randint(11, (2, 4)), torch.tensor([4, 2]), torch.randint(13, (2, 5))
    memory, mask = network.encode(source, lengths)
    state, steps = network.first_state(memory, mask), []
    for step in range(5):
        logits, weights, state = network.decode(words[:, step : step + 1], memory, mask, state)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 1))
        steps.append(logits)
    torch.testing.assert_close(torch.cat(steps, 1), network(source, lengths, words), rtol=1e-5, atol=1e-5)


def test_attention_by_hand():
    memory = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [9.0, 9.0]]])
    query = torch.tensor([[[2.0, 0.0]]])
    context, weights = attend(query, memory, torch.tensor([[True, True, False]]))
    first = torch.tensor(2.0).sigmoid()
    torch.testing.assert_close(weights, torch.stack([first, 1 - first, torch.tensor(0.0)]).view(1, 1, 3))
    torch.testing.assert_close(context, torch.stack([first, 1 - first]).view(1, 1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_sentence_without_any_word_gives_zeros_and_finite_gradients(dtype):
    query = torch.randn(2, 3, 4, dtype=dtype, requires_grad=True)
    memory = torch.randn(2, 5, 4, dtype=dtype, requires_grad=True)
    context, weights = attend(query, memory, length_mask(torch.tensor([0, 2]), 5))
    assert context.dtype == dtype and weights.dtype == torch.float32
    assert not context[0].any() and not weights[0].any()
    context.float().sum().backward()
    assert query.grad.isfinite().all() and memory.grad.isfinite().all()


def test_an_empty_sentence_in_a_batch_leaves_loss_and_gradients_finite():
    network = small(bidirectional=True)
    network(torch.randint(11, (2, 4)), torch.tensor([0, 4]), torch.randint(13, (2, 3))).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in network.parameters())


def test_state_is_kept_in_fp32_where_weights_are_half():
    network = small().bfloat16()
    memory, mask = network.encode(torch.randint(11, (2, 4)), torch.tensor([4, 2]))
    state = network.first_state(memory, mask)
    assert {part.dtype for pair in state for part in pair} == {torch.float32}
    logits, _, _ = network.decode(torch.randint(13, (2, 3)), memory, mask, state)
    assert logits.dtype == torch.bfloat16


def test_reverse_each_turns_the_real_part_only():
    x = torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7], [8, 9, 9, 9]])
    turned = reverse_each(x, torch.tensor([3, 4, 1]))
    assert turned.tolist() == [[3, 2, 1, 0], [7, 6, 5, 4], [8, 9, 9, 9]]


def test_residual_layers_add_their_input():
    network = small(residual=True, layers=1).eval()
    for p in network.decoder.parameters():
        torch.nn.init.zeros_(p)
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(network.decoder(x)[0], x)


def test_tied_output_shares_the_embedding():
    network = small(tie=True)
    assert network.output.weight is network.target_embedding.weight


def test_an_odd_width_cannot_be_split_over_two_directions():
    with pytest.raises(ValueError, match="split"):
        small(width=7, bidirectional=True)
