"""What rounding flushes where 16-bit products are native: counted by a shadow of the step, which leaves no trace."""

import pytest
import torch
from torch import nn

import mptrain
from mptrain.precision.arithmetic import Arithmetic


def native(compute):
    return Arithmetic("cpu", compute, emulated=False)


def products(watch):
    return {(r["layer"], r["kind"]): r for r in watch.rows if r["name"] == "products"}


def test_what_the_shadow_counts_is_what_native_half_lost():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 12, bias=False), nn.Linear(12, 8, bias=False))
    with torch.no_grad():
        model[1].weight.mul_(2.0**-9)
    x = torch.randn(32, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    arithmetic = native("float16")
    watch = mptrain.Watch(model, optimizer, arithmetic=arithmetic, on_alarm=lambda alarm: None)

    def backward(region):
        with region:
            loss = model(x).float().square().sum() * 2.0**-4
        loss.backward()

    assert watch.wants_shadow
    watch.shadow(backward)
    assert all(p.grad is None for p in model.parameters())
    backward(arithmetic)
    watch.step()

    half = [p.detach().half().double() for p in model.parameters()]
    y0 = (x.half().double() @ half[0].T).half()
    y1 = (y0.double() @ half[1].T).half()
    g1 = (y1.float() * 2 * 2.0**-4).half().double()
    exact = {("1", "grad_weight"): g1.T @ y0.double(), ("1", "grad_input"): g1 @ half[1]}
    exact["0", "grad_weight"] = exact["1", "grad_input"].half().double().T @ x.half().double()
    counted = products(watch)
    for key, before in exact.items():
        assert counted[key]["flushed"] == ((before != 0) & (before.half() == 0)).sum().item(), key
    assert counted["1", "grad_input"]["flushed"] > 100
    lost = (model[0].weight.grad == 0) & (exact["0", "grad_weight"] != 0)
    assert counted["0", "grad_weight"]["flushed"] == pytest.approx(lost.sum().item(), abs=1)
    assert {row["calls"] for row in watch.rows} == {1}  # the shadow itself is not looked at


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x):
        return self.last(nn.functional.dropout(self.norm(self.first(x)), 0.5))


@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_it_leaves_gradients_buffers_and_random_numbers(compute):
    def run(watched):
        torch.manual_seed(0)
        model, scaler, arithmetic = Noisy(), mptrain.loss_scaler("dynamic"), native(compute)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        watch = mptrain.Watch(model, optimizer, 1, scaler=scaler, arithmetic=arithmetic) if watched else None
        for step in range(12):
            x = torch.randn(8, 6)

            def backward(region, x=x):
                with region:
                    loss = model(x).float().square().mean()
                scaler.scale(loss).backward()
                return loss.detach()

            optimizer.zero_grad()
            if watch:
                assert watch.wants_shadow == (step == 0 or step == 9)
                watch.shadow(backward)
            loss = backward(arithmetic)
            scaler.step(optimizer)
            scaler.update()
            if watch:
                watch.step(loss)
                assert bool(products(watch)) == (step == 0 or step == 9)
        return [*model.state_dict().values(), torch.get_rng_state()]

    assert all(map(torch.equal, run(True), run(False)))


def test_emulated_and_fp32_steps_need_none():
    model = nn.Linear(2, 2)
    for precision in ("fp16", "fp32"):
        watch = mptrain.Watch(model, arithmetic=mptrain.Precision.load(precision).arithmetic("cpu"))
        assert not watch.wants_shadow
        watch.shadow(lambda region: pytest.fail("nothing is to run"))
        watch.close()


@pytest.mark.gpu
def test_on_a_gpu_a_shadow_tells_what_is_flushed():
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False).cuda()
    arithmetic = mptrain.Precision.load("fp16").arithmetic("cuda")
    watch = mptrain.Watch(model, arithmetic=arithmetic, on_alarm=lambda alarm: None)
    x = torch.randn(32, 64, device="cuda")

    def backward(region):
        with region:
            loss = model(x).float().square().sum() * 2.0**-24
        loss.backward()

    watch.shadow(backward)
    backward(arithmetic)
    watch.step()
    row = products(watch)["", "grad_weight"]
    assert 0 < row["flushed"] < row["count"] == 64 * 64
    zeros = int((model.weight.grad == 0).sum())
    assert row["flushed"] == pytest.approx(zeros, rel=0.02)
