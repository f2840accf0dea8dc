"""Contrastive training of pictures and captions (CLIP, Radford et al. 2021), from a laptop's size to ViT-H-14.

Each picture of a batch has to find its caption among all captions of the batch, and each caption its picture. Recall@k
is how often the right one is among the k nearest of the whole held-out set, both ways.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from mptrain.data import hard_batches, image_text
from mptrain.data.dataset import Dataset, DataSpec
from mptrain.errors import UserError
from mptrain.models.clip import CLIP, ConvolutionalTower, TextTransformer, VisionTransformer
from mptrain.tasks.task import Task

STEMS = ("patch", "convolutions")
POOLS = ("token", "mean")
NORMS = ("batch", "group", "layer")


class ContrastiveTask(Task):
    metric = "recall@10"
    higher_is_better = True
    margin = 0.01
    unit = "pairs"

    def __init__(self, model: CLIP, train_set: Dataset, test_set: image_text.ImageText):
        self.model = model
        self.models = {"model": model}
        self.train_set, self.test_set = train_set, test_set

    def losses(self, batch: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        pictures, captions, scale = self.model(batch["pictures"], batch["words"], batch["lengths"])
        pictures, captions = self.together(pictures), self.together(captions)
        yield "model", contrastive_loss(scale * (pictures @ captions.T).float())

    def size(self, batch: dict[str, Tensor]) -> int:
        return len(batch["pictures"])

    def evaluate(self, batches: Iterable[dict[str, Tensor]]) -> dict[str, float]:
        """Recall@10 as the mean of both directions; each direction at 1 and 10; the loss of the set as one batch."""
        pictures, captions = [], []
        for batch in batches:
            picture, caption, scale = self.model(batch["pictures"], batch["words"], batch["lengths"])
            pictures.append(picture)
            captions.append(caption)
        logits = scale * (torch.cat(pictures) @ torch.cat(captions).T).float()
        found = {"recall@1": 0.0, "recall@10": 0.0}
        for name, table in {"picture_to_caption": logits, "caption_to_picture": logits.T}.items():
            rank = ranks(table)
            for k in (1, 10):
                found[f"{name}@{k}"] = (rank <= k).double().mean().item()
                found[f"recall@{k}"] += found[f"{name}@{k}"] / 2
        return found | {"loss": contrastive_loss(logits).item(), "scale": scale.item()}


def contrastive_loss(logits: Tensor) -> Tensor:
    """Mean cross entropy of the diagonal, by rows and by columns (Radford et al. 2021, figure 3)."""
    right = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, right) + F.cross_entropy(logits.T, right)) / 2


def ranks(logits: Tensor) -> Tensor:
    """Rank of each row's diagonal element, from 1. Ties and NaN count as worse, so a dead network scores nothing."""
    return len(logits) - (logits < logits.diagonal()[:, None]).sum(1)


def build(
    data: DataSpec,
    tower: str = "vit",
    stem: str = "patch",
    pool: str = "token",
    norm: str = "layer",
    size: int = 32,
    patch: int = 8,
    image_width: int = 192,
    image_layers: int = 4,
    image_heads: int = 3,
    words: int = 4000,
    length: int = 24,
    text_width: int = 128,
    text_layers: int = 2,
    text_heads: int = 4,
    dimension: int = 128,
    hard: str | None = None,
    hard_from: int = 300,
    hard_count: int = 10,
) -> ContrastiveTask:
    """`tower` vit is a vision transformer (layer norm; `stem` and `pool` as there), convnet a convolutional one of
    `image_layers` stages, `image_width` maps in the first (batch, group or layer norm). A caption has at most `length`
    words, START and END included; `words` is the size of the vocabulary. `hard` (shuffled or undivided, see
    `hard_batches`) spoils `hard_count` training batches from number `hard_from` on, the first being 0. Raises UserError
    if options do not fit."""
    if tower == "vit":
        check_vit(norm, stem, pool, size, patch, image_width, image_heads)
        image: torch.nn.Module = VisionTransformer(
            size, patch, image_width, image_layers, image_heads, dimension, stem, pool
        )
    elif tower == "convnet":
        check_convnet(norm, size, image_width, image_layers)
        image = ConvolutionalTower(image_width, image_layers, dimension, norm)
    else:
        raise UserError(f"task.tower={tower} is unknown; type task.tower=vit or task.tower=convnet")
    divides("text_width", text_width, "text_heads", text_heads)
    if length < 3:
        raise UserError(f"task.length={length} leaves no room for a word; type task.length=3 or more")
    train_set, test_set = image_text.load(data, size, words, length)
    hardened = hard_batches.harden(train_set, hard, hard_from, hard_count)
    text = TextTransformer(words, length, text_width, text_layers, text_heads, dimension)
    return ContrastiveTask(CLIP(image, text), hardened, test_set)


def check_vit(norm: str, stem: str, pool: str, size: int, patch: int, width: int, heads: int) -> None:
    if norm != "layer":
        raise UserError(f"task.norm={norm} does not go with task.tower=vit; type task.norm=layer or task.tower=convnet")
    if stem not in STEMS:
        raise UserError(f"task.stem={stem} is unknown; type task.stem={' or task.stem='.join(STEMS)}")
    if pool not in POOLS:
        raise UserError(f"task.pool={pool} is unknown; type task.pool={' or task.pool='.join(POOLS)}")
    if stem == "convolutions" and (patch < 2 or patch & (patch - 1) or width % patch):
        raise UserError(
            f"task.stem=convolutions halves the picture: task.patch={patch} must be 2, 4, 8 or 16 and divide "
            f"task.image_width={width}"
        )
    divides("size", size, "patch", patch)
    divides("image_width", width, "image_heads", heads)


def check_convnet(norm: str, size: int, width: int, stages: int) -> None:
    if norm not in NORMS:
        raise UserError(f"task.norm={norm} is unknown; type task.norm={', task.norm='.join(NORMS)}")
    if width % 8:
        raise UserError(f"task.image_width={width} must be a multiple of 8, the maps of a group")
    if size < 2**stages:
        raise UserError(f"task.image_layers={stages} halves {size} pixels to nothing; type fewer")


def divides(whole: str, amount: int, part: str, count: int) -> None:
    if count < 1 or amount < 1 or amount % count:
        raise UserError(f"task.{whole}={amount} must be a multiple of task.{part}={count}")
