"""What native 16-bit kernels flush in loops that know nothing else of mptrain: torch's autocast, halved networks."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mptrain


def deep(factor=2.0**-14):
    """Six products; the gradient becomes tiny on its way through the fourth, activations stay of ordinary size."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6)))
    for layer in model:
        nn.init.orthogonal_(layer.weight)
    with torch.no_grad():
        model[3].weight.mul_(factor)
        model[0].weight.mul_(1 / factor)
    return model


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.dead, self.out = nn.Embedding(100, 4, padding_idx=0), nn.Linear(4, 4), nn.Linear(4, 1)
        nn.init.constant_(self.dead.bias, -100.0)

    def forward(self, _):
        x = self.table(torch.tensor([[3, 5, 0, 0, 0, 0]]))
        return self.out(x + F.relu(self.dead(x)))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.up = nn.Conv2d(2, 4, 3, padding="same", groups=2), nn.ConvTranspose2d(4, 3, 3, 2, 1, 1)
        self.norm, self.attention = nn.BatchNorm2d(3), nn.MultiheadAttention(12, 2, batch_first=True)
        self.row, self.out = nn.Linear(12, 6), nn.Linear(6, 3, bias=False)

    def forward(self, x):
        x = F.relu(self.norm(self.up(F.relu(self.conv(x), inplace=True))), inplace=True).flatten(2)[:, :, :12]
        return self.out(self.row(x + self.attention(x, x, x, need_weights=False)[0]))


def amp(dtype=torch.float16):
    return torch.autocast("cpu", dtype)


def looked_at(model, x, region, scale=1.0, factor=1.0, steps=1, **options):
    """Watch after a few steps of a loop with torch's scaler."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    watch = mptrain.Watch(model, optimizer, scaler=scaler, on_alarm=lambda alarm: None, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        with region:
            loss = model(x).float().square().sum() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        watch.step(loss)
    watch.close()
    return watch


def products(watch):
    return {(r["layer"], r["kind"]): r for r in watch.rows if r["name"] == "products"}


def found(watch):
    return {alarm.rule: alarm for alarm in watch.alarms.found}


def test_exactly_the_flushed_layers_are_named_in_a_loop_of_three_lines():
    alarm = found(looked_at(deep(), torch.randn(8, 4), amp(), 2.0**-12, 2.0**-8))["underflow"]
    assert alarm.layers == ("0", "1", "2") and "raise the loss scale" in alarm.advice
    assert not found(looked_at(deep(1.0), torch.randn(8, 4), amp()))


def test_a_network_of_halves_needs_no_autocast():
    model, x = deep().half(), torch.randn(8, 4).half()
    with torch.no_grad():
        model[0].weight.mul_(2.0**-4)
    watch = mptrain.Watch(model, (), on_alarm=lambda alarm: None)
    loss = model(x).float().sum() * 2.0**-14
    loss.backward()
    watch.step(loss)
    watch.close()
    assert found(watch)["underflow"].layers == ("0", "1", "2")


def test_sparse_rows_dead_relus_and_padding_are_no_underflow():
    assert "underflow" not in found(looked_at(Sparse(), torch.ones(1), amp(), 128.0))


def test_layers_behind_a_relu_that_ends_what_is_left_are_named_too():
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(5) for m in (nn.Linear(32, 32), nn.ReLU())), nn.Linear(32, 4))
    watch = looked_at(model, torch.randn(16, 32), amp(), factor=1e-5 / 16)
    silent = {n for n, m in model.named_children() if isinstance(m, nn.Linear) and not m.weight.grad.any()}
    assert silent and silent <= set(found(watch)["underflow"].layers)


def test_products_are_those_of_the_emulation():
    """Which counts by other means, and in attention, which the native kernel fuses, more of them."""
    x, counted = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(1)), []
    for region in (amp(), mptrain.Precision.load("fp16").arithmetic("cpu")):
        torch.manual_seed(0)
        counted.append(products(looked_at(Mixed(), x, region, factor=2.0**-18)))
    native, emulated = counted
    assert native.keys() == {key for key in emulated if key[1] != "output"}
    for (layer, kind), row in native.items():
        for column in ("count", "zero", "flushed", "subnormal"):
            other = emulated[layer, kind][column]  # kernels add in another order
            assert row[column] == pytest.approx(other, abs=4) or (layer == "attention" and row[column] < other)
    assert sum(row["flushed"] for row in native.values()) > 100


def test_what_is_flushed_is_exact():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 12, bias=False), nn.Linear(12, 8, bias=False))
    x = torch.randn(32, 16)
    rows = products(looked_at(model, x, amp(), factor=2.0**-18))
    half = [p.detach().half().double() for p in model.parameters()]
    y0 = (x.half().double() @ half[0].T).half().double()
    y1 = (y0 @ half[1].T).half()
    g1 = (y1.float() * 2 * 2.0**-18).half().double()
    exact = {("1", "grad_weight"): g1.T @ y0, ("1", "grad_input"): g1 @ half[1]}
    exact["0", "grad_weight"] = exact["1", "grad_input"].half().double().T @ x.half().double()
    for key, before in exact.items():
        assert rows[key]["flushed"] == ((before != 0) & (before.half() == 0)).sum().item() > 0, key
        assert rows[key]["first_exponent"] == before[before != 0].abs().log2().floor().min()
        assert sum(rows[key]["exponents"]) == before.numel()


def test_a_region_of_ours_is_found_without_being_told():
    rows = products(looked_at(deep(), torch.randn(8, 4), mptrain.Precision.load("fp16").arithmetic("cpu"), 2.0**-20))
    assert rows["3", "grad_input"]["flushed"] == rows["3", "grad_input"]["count"] == 32
    assert rows["3", "output"]["flushed"] == 0
    region = mptrain.Precision.load("fp16").arithmetic("cpu")
    looked_at(deep(), torch.randn(8, 4), region)
    assert region.counter is None


@pytest.mark.parametrize("make", [mptrain.loss_scaler, lambda s: torch.amp.GradScaler("cpu", init_scale=s)])
def test_the_scaler_that_steps_is_found_without_being_told(make):
    norms = {}
    for scale in (2.0**4, 2.0**10):
        model, scaler = deep(1.0), make(scale)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        watch = mptrain.Watch(model, optimizer, 1)
        for step in range(2):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean()
            scaler.scale(loss).backward()
            if step:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            scaler.step(optimizer)
            scaler.update()
            watch.step(loss)
            rows = [row for row in watch.rows if row["kind"] == "grad_weight" and row["name"] == "weight"]
            assert {row["scale"] for row in rows} == {scale}
            norms[scale, step] = [row["norm"] for row in rows]
        watch.close()
    for step in range(2):
        assert norms[2.0**4, step] == pytest.approx(norms[2.0**10, step], rel=1e-5)


def test_nothing_left_by_the_loss():
    alarm = found(looked_at(deep(1.0), torch.randn(8, 4), amp(), 2.0**-30))["underflow"]
    assert alarm.layers == tuple("012345") and "no gradient reaches any of 6 layers" in alarm.evidence
    assert "raise the loss scale" in alarm.advice
    assert "underflow" not in found(looked_at(deep(1.0), torch.randn(8, 4), amp(), factor=0.0))


def test_no_higher_scale_is_advised_that_would_not_help():
    model = deep(1.0)
    with torch.no_grad():  # half of a gradient becomes tiny, far below what the other half leaves room for
        model[3].weight[:, :2].mul_(2.0**-20)
        model[2].weight.copy_(torch.tensor([2.0**-22, 2.0**-22, 1, 1]).diag())
    alarm = found(looked_at(model, torch.randn(8, 4), amp()))["underflow"]
    assert "2" in alarm.layers
    assert alarm.advice.startswith("move to BF16: at ") and "2 would still lose " in alarm.advice


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(4, 4))

    def forward(self, x):
        return self.last(checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers(reentrant):
    ends = []
    for every in (1, 100):  # in the second step one looks and the other does not
        torch.manual_seed(0)
        model = Checkpointed(reentrant)
        watch = looked_at(model, torch.ones(3, 4), amp(), steps=2, every=every)
        ends.append([p.detach() for p in model.parameters()])
        for name in ("first", "inner.0", "inner.3", "last"):
            kinds = [row["kind"] for row in watch.rows if row["layer"] == name and row["name"] != "products"]
            assert kinds.count("input") == kinds.count("output") == kinds.count("grad_output") == 1 or every > 1
            assert {row["calls"] for row in watch.rows} == {1}
    orders = {row["layer"]: row["order"] for row in watch.rows if row["layer"]}
    assert sorted(orders, key=orders.__getitem__) == ["first", "inner.0", "inner.3", "last"]
    assert all(map(torch.equal, *ends))


def test_native_kernels_are_looked_beside_now_and_then_and_more_often_after_an_alarm():
    counted = []
    for factor in (1.0, 2.0**-14):
        model = deep(factor)
        steps = []
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        watch = mptrain.Watch(model, optimizer, 2, on_alarm=lambda alarm: None)
        for _ in range(42):
            with amp():
                loss = model(torch.ones(2, 4)).float().sum() * 2.0**-12
            loss.backward()
            watch.step(loss)
            if products(watch) and watch.rows[0]["step"] == watch.done:
                steps.append(watch.done)
        counted.append(steps)
        watch.close()
    assert counted[0] == [1, 20, 40] and len(counted[1]) > 20


def test_a_compiled_network_is_looked_at_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = list(warnings.filters)
        model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), backend="eager")
        watch = looked_at(model, torch.ones(2, 4), amp(), steps=2, every=1)
        assert {row["layer"] for row in watch.rows} == {"", "0", "2"}
        assert warnings.filters == before


def test_fp8_counts_its_operands_and_the_16_bit_products_around():
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
    with torch.no_grad():
        model[2].weight[:, :8].mul_(2.0**-34)
    precision = mptrain.Precision.load("fp8")
    precision.prepare(model)
    watch = looked_at(model, torch.randn(16, 16), precision.arithmetic("cpu"))
    rows = products(watch)
    assert {rows["1", kind]["dtype"] for kind in ("input", "weight")} == {"float8_e4m3fn"}
    assert rows["1", "grad_output"]["flushed"] == 16 * 8
    assert {k: rows[k]["dtype"] for k in rows if k[0] != "1"} == {
        ("0", "grad_weight"): "bfloat16", ("2", "grad_weight"): "bfloat16", ("2", "grad_input"): "bfloat16"
    }  # fmt: skip
    alarm = found(watch)["underflow"]
    assert alarm.layers == ("1",) and "no loss scale helps" in alarm.advice


@pytest.mark.gpu
def test_on_a_gpu_too():
    model = deep().cuda()
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**-12)
    watch = mptrain.Watch(model, (), scaler=scaler, on_alarm=lambda alarm: None)
    with torch.autocast("cuda", torch.float16):
        loss = model(torch.randn(8, 4, device="cuda")).float().square().sum() * 2.0**-8
    scaler.scale(loss).backward()
    watch.step(loss)
    watch.close()
    assert found(watch)["underflow"].layers == ("0", "1", "2")
    assert products(watch)["3", "grad_input"]["first_exponent"] < -25
