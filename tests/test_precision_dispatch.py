"""What is left to torch's own autocast kernels: the same bits, in whatever order a process meets regions."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from mptrain.precision import hardware, policy
from mptrain.precision.modes import Precision

native = pytest.mark.skipif(not hardware.cpu_has_bfloat16(), reason="this CPU has no BF16 kernels")
NAMES = ("bf16", "fp8", "fp16", "fp32", "tf32")


class Net(nn.Module):
    """Products of every kind, weights used twice, operations that CUDA's policy keeps in FP32, recomputed or not."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding="same"), nn.BatchNorm2d(16)
        self.rnn, self.layers = nn.LSTM(16, 16, batch_first=True), nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
        self.mix = nn.Parameter(torch.randn(16, 16))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def head(self, x):
        x = self.layers(self.layers(x).relu()).softmax(-1)
        x = x + torch.einsum("bti,ij->btj", x, self.mix) + x @ self.layers[0].weight
        return F.gelu(self.attention(x, x, x)[0]).mean(1)

    def forward(self, x, recomputed):
        x = self.norm(self.conv(x)).relu().flatten(2).transpose(1, 2)
        x = self.rnn(x)[0]
        return checkpoint(self.head, x, use_reentrant=False) if recomputed else self.head(x)


def trained(name, forward_only, recomputed=False):
    """The loss and the gradients of a step; the first layer's copy is made once without gradients before."""
    torch.manual_seed(0)
    model, x, y = Net(), torch.randn(16, 3, 6, 6), torch.randint(16, (16,))
    arithmetic = Precision.load(name).arithmetic(forward_only=forward_only)
    with arithmetic:
        with torch.no_grad():
            model.conv(x)
        loss = F.cross_entropy(model(x, recomputed).float(), y)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("name", NAMES)
def test_a_promise_changes_no_bit(name):
    plain = trained(name, False)
    for forward_only, recomputed in ((True, False), (True, True), (False, True)):
        for a, b in zip(plain, trained(name, forward_only, recomputed), strict=True):
            assert torch.equal(a, b)
    assert not torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()


@native
def test_products_stay_in_cpp_until_another_region_needs_a_stop(tmp_path):
    """In a process of its own: which kernels are replaced is remembered for good."""
    code = (
        "import sys, torch; sys.path.insert(0, 'tests'); torch.set_num_threads(1)\n"
        "from test_precision_dispatch import trained\n"
        "from mptrain.precision import dispatch\n"
        "found = [trained('bf16', True), trained('bf16', True, True)]\n"
        "names = {name for _, name in dispatch._installed}\n"
        "assert not names & {'linear', 'conv2d.padding', 'cross_entropy_loss'} and 'softmax.int' in names, names\n"
        "trained('fp16', True)\n"
        "assert ('cpu', 'linear') in dispatch._installed\n"
        "found += [trained('bf16', True), trained('bf16', False)]\n"
        "torch.save(found, sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "found.pt")], check=True, cwd=Path(__file__).parents[1])
    first, *others = torch.load(tmp_path / "found.pt")
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert torch.equal(a, b)


LOSSES = {
    "binary_cross_entropy_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "cosine_embedding_loss": lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(len(x))),
    "cross_entropy_loss": lambda x, y: F.cross_entropy(x.float(), y.argmax(1), label_smoothing=0.1),
    "hinge_embedding_loss": lambda x, y: F.hinge_embedding_loss(x, torch.ones_like(x)),
    "huber_loss": F.huber_loss,
    "kl_div": lambda x, y: F.kl_div(x, y.sigmoid(), reduction="batchmean"),
    "l1_loss": F.l1_loss,
    "margin_ranking_loss": lambda x, y: F.margin_ranking_loss(x, y, torch.ones_like(x)),
    "mse_loss": F.mse_loss,
    "multi_margin_loss": lambda x, y: F.multi_margin_loss(x, y.argmax(1)),
    "multilabel_margin_loss": lambda x, y: F.multilabel_margin_loss(x, y.argsort(1)),
    "nll_loss": lambda x, y: F.nll_loss(x, y.argmax(1)),
    "nll_loss2d": lambda x, y: F.nll_loss(x[:, :, None, None], y.argmax(1)[:, None, None]),
    "poisson_nll_loss": lambda x, y: F.poisson_nll_loss(x, y.sigmoid()),
    "smooth_l1_loss": F.smooth_l1_loss,
    "soft_margin_loss": lambda x, y: F.soft_margin_loss(x, torch.ones_like(x)),
    "triplet_margin_loss": lambda x, y: F.triplet_margin_loss(x, y, -y),
}


@native
@pytest.mark.parametrize("name", policy.CPU_AUTOCAST_FP32_TOO)
def test_losses_of_torch_are_those_of_cuda(name):
    """Of 16-bit numbers: in FP32, and the same bits as by our kernels, the gradient's too."""
    x, y = torch.randn(4, 5).bfloat16(), torch.randn(4, 5).bfloat16()
    found = []
    for forward_only in (False, True):
        arithmetic, leaf = Precision.load("bf16").arithmetic(forward_only=forward_only), x.clone().requires_grad_()
        assert (name in arithmetic.left_to_torch) is forward_only
        with arithmetic:
            loss = LOSSES[name](leaf, y)
        loss.backward()
        found.append((loss.detach(), leaf.grad))
        assert loss.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@native
def test_a_derivative_inside_is_torchs_whoever_came_before():
    """Without the promise it is computed as outside: an FP32 product's in FP32."""
    found = {}
    for forward_only in (False, True):
        arithmetic = Precision.load("bf16").arithmetic(forward_only=forward_only)
        torch.manual_seed(0)
        x, w = torch.randn(5, 7, requires_grad=True), torch.randn(7, 3, requires_grad=True)
        with arithmetic:
            with torch.autocast("cpu", enabled=False):
                y = torch.mm(x, w)
            (found[forward_only],) = torch.autograd.grad(y.sum(), w)
    exact = x.detach().t() @ torch.ones(5, 3)
    with torch.autocast("cpu", torch.bfloat16):
        torchs = torch.mm(x.detach().t(), torch.ones(5, 3)).float()
    assert torch.equal(found[False], exact) and torch.equal(found[True], torchs) and not torch.equal(exact, torchs)


@native
def test_regions_with_and_without_the_promise_nest():
    x, w = torch.randn(5, 7), torch.randn(7, 3, requires_grad=True)
    ours, theirs = (Precision.load("bf16").arithmetic(forward_only=promise) for promise in (False, True))
    half = Precision.load("fp16").arithmetic()
    results = []
    with theirs:
        results.append(torch.mm(x, w))
        with half:
            assert torch.mm(x, w).dtype == torch.float16 and not torch.is_autocast_cache_enabled()
        with ours:
            results.append(torch.mm(x, w))
        results.append(torch.mm(x, w))
        assert torch.is_autocast_cache_enabled()
    with ours, theirs:
        results.append(torch.mm(x, w))
    low = torch.mm(x.bfloat16(), w.bfloat16())
    assert all(torch.equal(result, low) and result.dtype == torch.bfloat16 for result in results)
