"""What rounding does to products, counted exactly."""

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mptrain.errors import UserError
from mptrain.precision.blocks import Shelf, runs
from mptrain.precision.counting import KINDS, Counter, count
from mptrain.precision.modes import Precision


def counts(**known):
    return [known.get(kind, 0) for kind in KINDS]


def hand_made(dtype=torch.float16):
    before = torch.tensor([
        0.0, -0.0,                                  # zero before
        2.0**-25, -(2.0**-25), 1e-9, -1e-9,         # the tie goes to the even zero; below it, flushed
        2.0**-25 * (1 + 2.0**-23), 2.0**-24,        # just over the tie: the smallest subnormal
        3e-5, -6.1e-5, 2.0**-14 - 2.0**-24,         # subnormal
        2.0**-14 - 2.0**-26, 2.0**-14, 1.0, -2.0,   # rounds up to, or is, normal
        65504.0, 65519.99, 65520.0, -1e30,          # the last two become infinite
        math.inf, -math.inf, math.nan,
    ])  # fmt: skip
    return before, before.to(dtype)


def test_every_kind_by_hand():
    found = count(*hand_made()).tolist()
    assert found == counts(values=22, zero=2, flushed=4, subnormal=5, overflowed=2, nonfinite=3)
    assert count(*hand_made()).dtype == torch.int64


def test_bfloat16_by_hand():
    before = torch.tensor([2.0**-134, 2.0**-134 * 1.5, 2.0**-133, 2.0**-126, 3.4e38, 3.3e38, 0.0, math.inf])
    found = count(before, before.bfloat16()).tolist()
    assert found == counts(values=8, zero=1, flushed=1, subnormal=2, overflowed=1, nonfinite=1)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_of_a_larger_tensor_pairs_of_a_sample_are_counted(order):
    before = torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(0)) * 2.0**-25
    after = before.half().contiguous(memory_format=order)
    counter = Counter(sample=100, shelf=Shelf())
    counter.add("a", "forward", before, after)
    small = torch.randn(100) * 2.0**-25
    counter.add("b", "forward", small, small.half())
    # 100 are six runs of 16, of 1,152 elements; with an odd distance of 193 five fit in
    sampled = torch.cat([before.flatten()[start : start + 16] for start in range(0, 5 * 193, 193)])
    before.zero_()  # whatever happens to it afterwards
    counter.settle()
    assert counter.totals["a", "forward"].tolist() == count(sampled, sampled.half()).tolist()
    assert counter.totals["b", "forward"].tolist() == count(small, small.half()).tolist()
    assert counter.sizes == {("a", "forward"): before.numel(), ("b", "forward"): 100}
    assert counter.totals["a", "forward"][KINDS.index("flushed")] > 20
    for few in (1, 15, 17):
        assert 0 < runs(before.flatten(), few).numel() <= 16


def test_negative_zero_after_rounding_is_a_flush():
    before = torch.tensor([-1e-9])
    after = before.half()
    assert after.item() == 0 and after.signbit().item()
    assert count(before, after).tolist() == counts(values=1, flushed=1)


def region(counter, **changes):
    return Precision.load("fp16", **changes).arithmetic(counter=counter)


def test_structural_zeros_are_not_flushed():
    counter = Counter()
    weight = nn.Parameter(torch.randn(100, 4))
    with region(counter):
        rows = nn.functional.embedding(torch.tensor([3, 5]), weight)
        y = nn.functional.linear(rows.relu(), torch.eye(4, requires_grad=True))
    y.sum().backward()
    assert all(row["flushed"] == 0 for row in counter.table())
    table = {row["direction"]: row for row in counter.table()}
    assert table["forward"]["zero"] == int((rows <= 0).sum())


@pytest.mark.parametrize("scale, kind", [(1.0, "flushed"), (2.0**10, "subnormal"), (2.0**14, "zero")])
def test_scaling_saves_gradients_that_would_be_flushed(scale, kind):
    counter = Counter()
    w = nn.Parameter(torch.ones(2, 3))
    x = torch.full((1, 3), 2.0**-13)
    with region(counter):
        y = nn.functional.linear(x, w)
    y.backward(torch.full((1, 2), 2.0**-13 * scale).half())
    table = {row["direction"]: row for row in counter.table()}
    expected = counts(values=6) if kind == "zero" else counts(values=6, **{kind: 6})
    assert [table["grad_weight"][kind] for kind in KINDS] == expected
    assert [table["forward"][kind] for kind in KINDS] == counts(values=2)
    assert "grad_input" not in table


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 10), nn.Linear(10, 3))


def run(model, x, counter, call=lambda m, x: m(x), **changes):
    model.zero_grad()
    x.grad = None
    handles = counter.watch([("", model)]) if counter is not None else []
    with region(counter, **changes):
        y = call(model, x)
    (y.float() ** 2).mean().backward()
    for handle in handles:
        handle.remove()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def test_counts_per_layer_and_direction_equal_those_by_hand():
    model, counter = network(), Counter()
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    run(model, x, counter)
    table = {(row["layer"], row["direction"]): row for row in counter.table()}
    assert {layer for layer, _ in table} == {"0", "3", "4"}
    sizes = {
        ("0", "forward"): 2 * 4 * 36, ("0", "grad_input"): 0, ("0", "grad_weight"): x.numel() + 108 + 4,
        ("3", "forward"): 20, ("3", "grad_input"): 288, ("3", "grad_weight"): 1450,
        ("4", "forward"): 6, ("4", "grad_input"): 20, ("4", "grad_weight"): 33,
    }  # fmt: skip
    assert {key: row["values"] for key, row in table.items()} == {k: v for k, v in sizes.items() if v}

    conv, linear, last = model[0], model[3], model[4]
    h = nn.functional.conv2d(x.half().float(), conv.weight.half().float(), conv.bias.half().float())
    expected = {("0", "forward"): (h, h.half())}
    z = h.half().relu().flatten(1)
    a = nn.functional.linear(z.float(), linear.weight.half().float(), linear.bias.half().float())
    b = nn.functional.linear(a.half().float(), last.weight.half().float(), last.bias.half().float())
    expected |= {("3", "forward"): (a, a.half()), ("4", "forward"): (b, b.half())}
    g = (b.half().float().detach() * 2 / 6).half().float()
    to_w, to_b = g.t() @ a.half().float(), g.sum(0)
    expected["4", "grad_weight"] = tuple(torch.cat([t.flatten() for t in pair]) for pair in
                                         ((to_w, to_b), (to_w.half(), to_b.half())))  # fmt: skip
    back = g @ last.weight.half().float()
    expected["4", "grad_input"] = back, back.half()
    for key, (before, after) in expected.items():
        assert [table[key][kind] for kind in KINDS] == count(before.detach(), after.detach()).tolist()


def test_slices_of_a_weight_are_weights():
    counter, module = Counter(), nn.MultiheadAttention(4, 2, bias=False)
    query, key = torch.randn(3, 2, 4), torch.randn(5, 2, 4)
    with region(counter):
        y, _ = module(query, key, key, need_weights=False)
    y.float().sum().backward()
    table = {row["direction"]: row["values"] for row in counter.table()}
    assert table["grad_weight"] == 4 * 16


@pytest.mark.parametrize("changes", [{}, {"accumulate": "float16"}])
def test_counting_changes_no_bit(changes):
    model, x = network(), torch.randn(2, 3, 8, 8, requires_grad=True)
    plain = [t.clone() for t in run(model, x, None, **changes)]
    for a, b in zip(plain, run(model, x, Counter(), **changes), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_is_not_counted_twice(use_reentrant):
    model, x = network(), torch.randn(2, 3, 8, 8, requires_grad=True)
    plain, twice = Counter(), Counter()
    run(model, x, plain)
    run(model, x, twice, lambda m, x: checkpoint(m, x, use_reentrant=use_reentrant))
    assert plain.table() == twice.table()


def test_names_with_a_prefix_and_errors_inside_a_module():
    class Fails(nn.Module):
        def forward(self, x):
            raise KeyError("mine")

    model, counter = nn.Sequential(nn.Linear(2, 2), Fails()), Counter()
    handles = counter.watch([("generator", model)])
    with region(counter):
        with pytest.raises(KeyError):
            model(torch.ones(1, 2))
        torch.mm(torch.ones(1, 2), torch.ones(2, 1))
    for handle in handles:
        handle.remove()
    assert [row["layer"] for row in counter.table()] == ["", "generator.0"]


def test_state_goes_on_where_it_was():
    model, x = network(), torch.randn(2, 3, 8, 8, requires_grad=True)
    straight, first, second = Counter(), Counter(), Counter()
    run(model, x, straight)
    run(model, x, straight)
    run(model, x, first)
    second.load_state_dict(first.state_dict())
    run(model, x, second)
    assert second.table() == straight.table()


@pytest.mark.parametrize("name", ["fp32", "tf32"])
def test_a_counter_where_nothing_is_rounded_is_refused(name):
    with pytest.raises(UserError, match="count=true"):
        Precision.load(name).arithmetic(counter=Counter())
