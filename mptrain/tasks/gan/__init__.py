"""Generative adversarial training (paper, section 4.6 and figure 6): DCGAN draws faces.

The discriminator's loss is yielded first; the generator's is computed after the discriminator has moved, through a
discriminator that collects no gradients. The paper judged by eye: `samples.png` beside `real.png` is for that, and the
Fréchet distance in our own classifier's features puts a number to it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.utils import save_image

from mptrain import models
from mptrain.data import faces
from mptrain.data.dataset import Dataset, DataSpec
from mptrain.errors import UserError
from mptrain.models.emoji_features import FEATURES, pretrained
from mptrain.tasks.gan.frechet import Moments, frechet_distance
from mptrain.tasks.task import Task, at_least

GRID = 64
"""Pictures in samples.png and real.png."""

NORMS = ("all", "inner")
"""Where the discriminator has batch norm: see `mptrain.models.dcgan`."""

CHUNK = 128
"""Pictures drawn at once in evaluation, at least a grid."""


class GAN(Task):
    metric = "frechet"
    higher_is_better = False
    margin = 0.1
    unit = "images"

    def __init__(
        self,
        discriminator: nn.Module,
        generator: nn.Module,
        train_set: Dataset,
        test_set: Dataset,
        noise: int,
        d_every: int,
        g_every: int,
        real_label: float,
    ):
        self.discriminator, self.generator = discriminator, generator
        self.models = {"discriminator": discriminator, "generator": generator}
        self.train_set, self.test_set = train_set, test_set
        self.noise, self.d_every, self.g_every, self.real_label = noise, d_every, g_every, real_label
        self.batches_seen = 0
        self.classifier = pretrained()
        self.grids: dict[str, Tensor] = {}

    def losses(self, batch: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        turn, self.batches_seen = self.batches_seen, self.batches_seen + 1
        d_turn, g_turn = turn % self.d_every == 0, turn % self.g_every == 0
        drawn = self.generator(batch["noise"])
        if d_turn:
            on_real, on_drawn = self.discriminator(batch["pictures"]), self.discriminator(drawn.detach())
            yield "discriminator", discriminator_loss(on_real, on_drawn, self.real_label)
        if g_turn:
            with frozen(self.discriminator):
                on_drawn = self.discriminator(drawn)
            yield "generator", generator_loss(on_drawn)

    def size(self, batch: dict[str, Tensor]) -> int:
        return len(batch["pictures"])

    def evaluate(self, batches: Iterable[dict[str, Tensor]]) -> dict[str, float]:
        """Distance between the real pictures and as many drawn ones, always from the same noise."""
        real, drawn = Moments(FEATURES), Moments(FEATURES)
        shown: list[Tensor] = []
        for batch in batches:
            pictures = batch["pictures"]
            if real.count < GRID:
                shown.append(pictures.float().cpu())
            real.add(self.classifier.to(pictures.device).features(pictures))
        self.grids["real"] = torch.cat(shown)[:GRID]
        noise = torch.randn(real.count, self.noise, generator=torch.Generator().manual_seed(0))
        for some in noise.split(CHUNK):
            made = self.generator(some.to(pictures.device)).float()
            if drawn.count == 0:
                self.grids["samples"] = made[:GRID].cpu()
            drawn.add(self.classifier.features(made))
        return {"frechet": frechet_distance(real, drawn)}

    def state_dict(self) -> dict[str, Any]:
        return {"batches_seen": self.batches_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches_seen = state["batches_seen"]

    def finish(self, folder: Path) -> None:
        """Writes samples.png, drawn in the last evaluation, and real.png to hold against it."""
        for name, pictures in self.grids.items():
            save_image(pictures, folder / f"{name}.png", nrow=8, normalize=True, value_range=(-1, 1))


def discriminator_loss(on_real: Tensor, on_drawn: Tensor, real_label: float) -> Tensor:
    """Binary cross entropy of FP32 logits, summed over both halves; below 1 `real_label` smooths one side."""
    on_real, on_drawn = on_real.float(), on_drawn.float()
    as_real = F.binary_cross_entropy_with_logits(on_real, torch.full_like(on_real, real_label))
    return as_real + F.binary_cross_entropy_with_logits(on_drawn, torch.zeros_like(on_drawn))


def generator_loss(on_drawn: Tensor) -> Tensor:
    """The non-saturating loss (Goodfellow et al. 2014, section 3): drawn pictures should count as real."""
    return F.binary_cross_entropy_with_logits(on_drawn.float(), torch.ones_like(on_drawn, dtype=torch.float32))


@contextmanager
def frozen(network: nn.Module) -> Iterator[None]:
    """Inside, the network lets gradients through but its own trainable parameters collect none."""
    trainable = [parameter for parameter in network.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


def build(
    data: DataSpec,
    generator: str = "mptrain.models.dcgan:Generator",
    discriminator: str = "mptrain.models.dcgan:Discriminator",
    size: int = 32,
    generator_width: int = 24,
    discriminator_width: int = 16,
    features: int = 256,
    norm: str = "inner",
    noise: int = 100,
    d_every: int = 1,
    g_every: int = 1,
    real_label: float = 1.0,
) -> GAN:
    """Pictures of `size` pixels, noise of `noise` numbers, widths as in `mptrain.models.dcgan`; in the discriminator
    `features` units, and batch norm at `norm` of its layers. It learns from every `d_every`-th batch, the generator
    from every `g_every`-th. Raises UserError if an option does not fit."""
    if size < 8 or size & (size - 1):
        raise UserError(f"task.size={size} must be a power of two and at least 8; type task.size=32, 64 or 128")
    at_least(1, generator_width=generator_width, discriminator_width=discriminator_width)
    at_least(1, features=features, noise=noise, d_every=d_every, g_every=g_every)
    if norm not in NORMS:
        raise UserError(f"task.norm={norm} is unknown; type task.norm={' or task.norm='.join(NORMS)}")
    if min(d_every, g_every) > 1:
        raise UserError(
            f"task.d_every={d_every} and task.g_every={g_every} leave batches from which nobody learns; "
            "type task.d_every=1 or task.g_every=1"
        )
    if not 0.5 < real_label <= 1:
        raise UserError(f"task.real_label={real_label} must be above 0.5 and at most 1; type task.real_label=1.0")
    train_set, test_set = faces.load(data, size, noise)
    networks = (
        models.build(discriminator, size, train_set.channels, discriminator_width, features, norm),
        models.build(generator, size, train_set.channels, generator_width, noise),
    )
    return GAN(*networks, train_set, test_set, noise, d_every, g_every, real_label)
