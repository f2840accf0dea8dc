"""Watch in somebody's own loop: what it sees, that it changes no bit, and which layers its alarms name."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as every_module

import mptrain
from mptrain.precision import blocks
from mptrain.watch import collection, store
from mptrain.watch.store import Store, read_part


def rows_of(watch, kind, layer=None, name=None):
    return [r for r in watch.rows if r["kind"] == kind and layer in (None, r["layer"]) and name in (None, r["name"])]


def train(model, optimizer, steps, watch=None, precision="fp32", scale="none", x=None, accumulate=1):
    arithmetic = mptrain.Precision.load(precision).arithmetic("cpu")
    scaler = mptrain.loss_scaler(scale)
    made = None if watch is None else watch(scaler=scaler, arithmetic=arithmetic)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            generator = torch.Generator().manual_seed(step * 10 + part)
            batch = torch.randn(8, 4, generator=generator) if x is None else x
            with arithmetic:
                loss = model(batch).float().square().mean() / accumulate
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if made is not None:
            made.step(loss)
    return made


class Net(nn.Module):
    """In-place ReLU, a module used twice, BatchNorm, dropout and a residual."""

    def __init__(self):
        super().__init__()
        self.a, self.shared, self.bn, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.relu, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.3)

    def forward(self, x):
        y = self.relu(self.a(x))
        y = self.drop(self.relu(self.shared(y))) + self.shared(y)
        return self.c(self.bn(y))


@pytest.mark.parametrize(("precision", "scale"), [("fp32", "none"), ("fp16", "dynamic"), ("bf16", "none")])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_watched_loop_ends_with_the_same_bits(precision, scale, accumulate, tmp_path):
    def run(watched):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        make = (lambda **kw: mptrain.Watch(model, optimizer, 2, tmp_path, **kw)) if watched else None
        watch = train(model, optimizer, 6, make, precision, scale, accumulate=accumulate)
        if watch:
            watch.close()
        return model.state_dict(), torch.get_rng_state()

    (plain, state), (watched, watched_state) = run(False), run(True)
    assert all(torch.equal(plain[key], watched[key]) for key in plain)
    assert torch.equal(state, watched_state)


def test_torchs_own_amp_two_optimizers_and_evaluations_in_between(tmp_path):
    """A loop as people write it; the third one of its steps overflows."""

    def run(watched):
        torch.manual_seed(0)
        model = Net()
        ends = [p for name, p in model.named_parameters() if name.startswith("c.")]
        rest = [p for name, p in model.named_parameters() if not name.startswith("c.")]
        optimizers = [torch.optim.AdamW(rest, 0.01), torch.optim.SGD(ends, 0.1, momentum=0.9)]
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        watch = mptrain.Watch(model, optimizers, 1, tmp_path, scaler=scaler, on_alarm=str) if watched else None
        for step in range(5):
            for part in range(2):
                x = torch.randn(8, 4) * (1e38 if (step, part) == (2, 1) else 1)
                with torch.autocast("cpu", torch.bfloat16):
                    loss = F.smooth_l1_loss(model(x).float(), torch.ones(8, 2)) / 2
                scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
            if watch:
                watch.step(loss)
                assert {r["scale"] for r in watch.rows} == {1024.0 if step < 3 else 512.0}
                assert rows_of(watch, "output", "a", "")[0]["count"] == 2 * 8 * 6
            model.eval()
            with torch.inference_mode():
                model(torch.ones(3, 4))
            model.train()
        if watch:
            moments = {(r["layer"], r["name"]) for r in rows_of(watch, "moment")}
            assert {("a", "weight.exp_avg_sq"), ("c", "bias.momentum_buffer")} <= moments
            watch.close()
        return [*model.state_dict().values(), torch.tensor(scaler.get_scale()), torch.get_rng_state()]

    assert all(map(torch.equal, run(True), run(False)))
    assert not every_module._global_forward_hooks


def test_what_is_seen_is_what_was_there(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    reference = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(8, 4)
    watch = train(model, optimizer, 1, lambda **kw: mptrain.Watch(model, optimizer, 1, tmp_path, **kw), x=x)
    hidden = reference[0](x)
    hidden.retain_grad()
    reference[2](hidden.relu()).square().mean().backward()
    (output,) = rows_of(watch, "output", "0", "")
    assert output["min"] == pytest.approx(hidden.min().item()) and output["min"] < 0  # before the in-place ReLU
    (after,) = rows_of(watch, "input", "2", "")
    assert after["min"] == 0 and after["zero"] == (hidden <= 0).sum().item()  # the same memory, later
    (back,) = rows_of(watch, "grad_output", "0")
    assert back["norm"] == pytest.approx(hidden.grad.norm().item(), rel=1e-5)
    assert back["zero"] == (hidden.grad == 0).sum().item()
    (gradient,) = rows_of(watch, "grad_weight", "2", "weight")
    assert gradient["norm"] == pytest.approx(reference[2].weight.grad.norm().item(), rel=1e-5)
    assert {r["name"] for r in rows_of(watch, "moment", "2")} == {
        "weight.exp_avg", "weight.exp_avg_sq", "bias.exp_avg", "bias.exp_avg_sq"}  # fmt: skip
    assert rows_of(watch, "loss")[0]["count"] == 1 and rows_of(watch, "input", "0")[0]["count"] == 32


@pytest.mark.parametrize("make", [mptrain.loss_scaler, lambda s: torch.amp.GradScaler("cpu", init_scale=s)])
def test_magnitudes_do_not_move_with_the_scale(make):
    norms = []
    for scale in (2.0**8, 2.0**16):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), make(scale)
        watch = mptrain.Watch(model, optimizer, scaler=scaler)
        scaler.scale(model(torch.ones(2, 4)).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        watch.step()
        (row,) = rows_of(watch, "grad_weight", name="weight")
        assert row["scale"] == scale
        norms.append((row["norm"], row["first_exponent"]))
    assert norms[0][0] == norms[1][0] == pytest.approx(2.0)
    assert norms[1][1] - norms[0][1] == 8  # the histogram is of the scaled tensor


def test_shared_modules_and_accumulation_are_taken_together():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = train(model, optimizer, 1, lambda **kw: mptrain.Watch(model, optimizer, 1, **kw), accumulate=3)
    (row,) = rows_of(watch, "output", "shared", "")
    assert row["calls"] == 6 and row["count"] == 6 * 8 * 6
    assert rows_of(watch, "grad_weight", "shared", "weight")[0]["calls"] == 1


def test_evaluation_in_between_is_not_seen_and_nothing_stays_attached(tmp_path):
    gc.collect()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = mptrain.Watch(model, optimizer, 1, tmp_path)
    with torch.no_grad():
        model(torch.ones(5, 4))
    model(torch.ones(2, 4)).sum().backward()
    watch.step()
    assert rows_of(watch, "output", "a", "")[0]["count"] == 12
    watch.close()
    assert not every_module._global_forward_hooks and not every_module._global_forward_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    watch = mptrain.Watch(model, optimizer, 1)
    del watch  # forgotten without a close
    gc.collect()
    assert not every_module._global_forward_hooks


def test_what_one_layer_hands_to_the_next_is_measured_once(monkeypatch):
    measured = []
    plain = collection.measure
    monkeypatch.setattr(collection, "measure", lambda t, *how: measured.append(t.shape) or plain(t, *how))
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3))
    watch = mptrain.Watch(model)
    model(torch.ones(2, 4)).sum().backward()
    watch.step()
    assert len(rows_of(watch, "input")) == len(rows_of(watch, "output")) == 3
    assert measured.count((2, 5)) == 4  # two outputs, two gradients; the inputs are the outputs
    assert rows_of(watch, "input", "1")[0]["norm"] == rows_of(watch, "output", "0")[0]["norm"]


def test_what_is_kept_is_measured_in_between_once_it_is_much(monkeypatch):
    def rows():
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        watch = train(model, optimizer, 2, lambda **kw: mptrain.Watch(model, optimizer, 1, sample=8, **kw), "fp16",
                      accumulate=3)  # fmt: skip
        return watch.rows

    plain = rows()
    settled = []
    monkeypatch.setattr(blocks.Shelf, "full", property(lambda shelf: shelf._used > 99))
    clear = blocks.Shelf.clear
    monkeypatch.setattr(blocks.Shelf, "clear", lambda shelf: settled.append(1) or clear(shelf))
    assert rows() == plain and len(settled) > 9


def test_two_optimizers_keep_their_own_gradients():
    a, b = nn.Linear(2, 2), nn.Linear(2, 1)
    first, second = torch.optim.SGD(a.parameters(), 1.0), torch.optim.SGD(b.parameters(), 1.0)
    watch = mptrain.Watch({"a": a, "b": b}, {"a": first, "b": second})
    b(a(torch.ones(1, 2)).detach()).sum().backward()
    second.step()
    expected = b.weight.grad.norm().item()
    (b(a(torch.ones(1, 2))).sum() * 100).backward()  # runs through b as well, for a alone
    first.step()
    watch.step()
    assert rows_of(watch, "grad_weight", "b", "weight")[0]["norm"] == pytest.approx(expected)
    assert rows_of(watch, "grad_weight", "a", "weight")[0]["norm"] > expected


def test_patterns_choose_layers_and_a_typo_is_told():
    model = Net()
    watch = mptrain.Watch(model, layers=["shared", "b*"])
    assert set(watch.names.values()) == {"shared", "bn"}
    watch.close()
    with pytest.raises(mptrain.UserError, match=r"'shard' matches no module.*shared"):
        mptrain.Watch(model, layers=["shard"])


def test_rows_after_the_resumed_step_are_dropped(tmp_path):
    written = Store(tmp_path / "watch.parquet")
    row = {"step": 1, "layer": "a", "kind": "loss", "name": "", "dtype": "float32", "exponents": [1, 2]}
    written.add([row, {**row, "step": 3}])
    written.flush()
    written.add([{**row, "step": 5}])
    written.flush()
    kept = Store(tmp_path / "watch.parquet").cut(2)
    assert [r["step"] for r in kept] == [1]
    parts = sorted((tmp_path / "watch.parquet").iterdir())
    assert [r["step"] for part in parts for r in read_part(part)] == [1]


def test_what_nobody_closed_is_written_all_the_same(tmp_path):
    model = nn.Linear(2, 2)
    for folder, closed in (("open", False), ("closed", True)):
        watch = mptrain.Watch(model, every=1, out=tmp_path / folder)
        for loss in (0.5, torch.tensor(0.25)):
            model(torch.ones(1, 2))
            watch.step(loss)
        assert not (tmp_path / folder / "watch.parquet").exists()
        if closed:
            watch.close()
        del watch
        gc.collect()
    (part,), (expected,) = ((tmp_path / f / "watch.parquet").glob("*") for f in ("open", "closed"))
    rows = read_part(part)
    assert rows == read_part(expected)
    assert [row["mean"] for row in rows if row["kind"] == "loss"] == [0.5, 0.25]


def test_long_loops_do_not_keep_all_rows(tmp_path, monkeypatch):
    row = {"step": 1, "layer": "a", "kind": "loss", "name": "", "dtype": "float32", "exponents": [1, 2]}
    keeper = Store(tmp_path / "watch.parquet")
    monkeypatch.setattr(store, "MOST_WAITING", 3)
    keeper.add([row, row])
    assert len(keeper.waiting) == 2
    keeper.add([row])
    monkeypatch.setattr(store, "LONGEST_WAIT", -1.0)
    keeper.add([{**row, "step": 2}])
    assert keeper.waiting == [] and len(list((tmp_path / "watch.parquet").iterdir())) == 2


def test_rows_of_two_runs_do_not_mix(tmp_path):
    model = nn.Linear(2, 2)
    for _ in range(2):
        first = mptrain.Watch(model, every=1, out=tmp_path / "a")
        first.resume(0)
        first.step(0.5)
        first.close()
    second = mptrain.Watch(model, every=1, out=tmp_path / "a")
    with pytest.raises(mptrain.UserError, match="holds the rows of an earlier run"):
        second.step(0.5)
    (tmp_path / "file").touch()
    with pytest.raises(mptrain.UserError, match="cannot be made"):
        mptrain.Watch(model, out=tmp_path / "file" / "below")
    with pytest.raises(mptrain.UserError, match=r"every=1.5: give a number of steps"):
        mptrain.Watch(model, every=1.5)


def alarms_of(model, x, scale="none", optimizer=torch.optim.SGD):
    made = []
    optimizer = optimizer(model.parameters(), 1e-3)
    train(model, optimizer, 1, lambda **kw: mptrain.Watch(model, optimizer, on_alarm=made.append, **kw),
          "fp16", scale, x)  # fmt: skip
    return {alarm.rule: alarm for alarm in made}


def deep(factor):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, bias=False) for _ in range(6)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
    model = nn.Sequential(*layers)
    with torch.no_grad():
        layers[3].weight.mul_(factor)  # the gradient becomes tiny on its way through this one
        layers[0].weight.mul_(1 / factor)  # and the activations are of ordinary size again
    return model


def test_exactly_the_flushed_layers_are_named():
    found = alarms_of(deep(2.0**-14), torch.randn(8, 4), scale=2.0**-12)
    assert found["underflow"].layers == ("0", "1", "2")
    assert "raise the loss scale" in found["underflow"].advice
    assert "underflow" not in alarms_of(deep(1.0), torch.randn(8, 4))


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.dead, self.out = nn.Embedding(100, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        nn.init.constant_(self.dead.bias, -100.0)

    def forward(self, _):
        x = self.table(torch.tensor([[3, 5, 0, 0, 0, 0]]))
        return self.out(x + F.relu(self.dead(x)))


def test_sparse_rows_dead_relus_and_padding_are_no_underflow():
    assert "underflow" not in alarms_of(Sparse(), torch.ones(1), scale=128)


def test_after_an_alarm_it_looks_more_often(tmp_path):
    model = deep(2.0**-14)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    watch = train(model, optimizer, 21, lambda **kw: mptrain.Watch(model, optimizer, 10, tmp_path, **kw,
                  on_alarm=lambda alarm: None), "fp16", 2.0**-12, torch.randn(8, 4))  # fmt: skip
    watch.close()
    steps = sorted({r["step"] for part in (tmp_path / "watch.parquet").iterdir() for r in read_part(part)})
    assert steps == [1, *range(2, 21, 2)]


def test_updates_lost_to_rounding_are_told():
    model = nn.Linear(4, 4).half()
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    made = []
    watch = mptrain.Watch(model, optimizer, on_alarm=made.append)
    model(torch.ones(1, 4).half()).sum().backward()
    optimizer.step()
    watch.step()
    assert rows_of(watch, "weight", name="weight")[0]["lost"] == 16
    assert [alarm.rule for alarm in made] == ["updates lost to rounding"]


def test_updates_that_half_weights_would_lose_are_counted_in_fp32():
    model = nn.Linear(5, 1, bias=False)
    model.weight.data = torch.tensor([[1.0, 1.0, -3.0, 0.0, 2.0]])
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    watch = mptrain.Watch(model, optimizer)
    model(torch.tensor([[2.0**-12, 2.0**-11, 2.0**-10, 2.0**-30, 0.0]])).sum().backward()
    optimizer.step()
    watch.step()
    # 1 / 2^-12 and 3 / 2^-10 are over 2048, 1 / 2^-11 is not; zero weighs nothing, and what has no gradient is left out
    (row,) = rows_of(watch, "weight")
    assert (row["small_updates"], row["lost"]) == (2, None)


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")  # torch's, about hooks it never meets here
def test_compiled_networks_run_as_written_while_they_are_looked_at(tmp_path):
    torch.compiler.reset()  # other tests may have used up the times that a layer's code is compiled
    gc.collect()  # a Watch that nobody closed holds hooks
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    seen = {}
    for name, wrap in (("plain", lambda m: m), ("compiled", lambda m: torch.compile(m, backend=counting))):
        graphs = []

        def counting(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        model = wrap(copy.deepcopy(plain))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with mptrain.Watch(model, optimizer, every=2, layers=["0", "2"]) as watch:
            for _ in range(6):
                optimizer.zero_grad()
                loss = model(torch.ones(4, 2)).sum()
                loss.backward()
                optimizer.step()
                watch.step(loss)
            seen[name] = [{k: v for k, v in row.items() if k != "step"} for row in watch.rows]
    assert seen["compiled"] == seen["plain"] and len(graphs) == 1
    model(torch.ones(5, 2))
    assert len(graphs) == 2  # compiled again, now that nobody looks


def test_tensorboard_shows_a_loop_of_ones_own(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    watch = train(model, optimizer, 20, lambda **kw: mptrain.Watch(model, optimizer, 10, tmp_path, **kw), "fp16", 8.0)
    watch.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    norms = events.Scalars("watch_grad_weight/weight/norm")
    assert [point.step for point in norms] == [1, 10, 20]
    assert norms[-1].value == pytest.approx(rows_of(watch, "grad_weight", name="weight")[0]["norm"])
    assert {point.value for point in events.Scalars("watch_grad_weight/products/flushed")} == {0.0}
    histogram = events.Histograms("watch_weight/weight/log2")[-1].histogram_value
    assert histogram.num == 8 and sum(histogram.bucket) == 8
    train(model, optimizer, 1, lambda **kw: mptrain.Watch(model, out=tmp_path / "quiet", tensorboard=False)).close()
    assert [path.name for path in (tmp_path / "quiet").iterdir()] == ["watch.parquet"]


def test_an_optimizer_may_hold_parameters_in_any_order():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    groups = [{"params": [model[1].weight]}, {"params": [model[0].weight], "lr": 0.0, "betas": (0.5, 0.9)}]
    optimizer = torch.optim.Adam(groups, 1.0)
    watch = train(model, optimizer, 1, lambda **kw: mptrain.Watch(model, optimizer, **kw))
    assert watch.alarms.betas == {("0", "weight"): (0.5, 0.9), ("1", "weight"): (0.9, 0.999)}
    for number, factor in (("0", 0.5), ("1", 0.1)):
        (moment,) = rows_of(watch, "moment", number, "weight.exp_avg")
        (gradient,) = rows_of(watch, "grad_weight", number)
        assert moment["norm"] == pytest.approx(factor * gradient["norm"], rel=1e-5)
    small = {row["layer"]: row["small_updates"] for row in rows_of(watch, "weight")}
    assert small == {"0": 16, "1": 0}
    watch.close()
