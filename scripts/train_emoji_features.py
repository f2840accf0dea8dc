"""Train the small classifier whose features measure the GAN's faces, and write its weights into the package.

    python scripts/train_emoji_features.py            writes mptrain/models/emoji_features.npz
    python scripts/train_emoji_features.py --check    trains and compares the accuracy with the stored weights' instead

It learns the nine groups of the embedded emoji (faces, people, animals, food, ...) from all vendors' drawings but
every tenth concept's, on one thread, so that the same machine makes the same file.
"""

import argparse
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mptrain.data.emoji import read_emoji
from mptrain.models.emoji_features import WEIGHTS, EmojiClassifier, pretrained

STEPS, BATCH = 600, 64


def data() -> tuple[Tensor, Tensor, Tensor]:
    """Pictures (count, 3, 32, 32) in [0, 1], groups (count,), and which of them are held out."""
    emoji = read_emoji()
    concepts, vendors = emoji.pictures.shape[:2]
    groups = torch.tensor(emoji.groups).repeat_interleave(vendors)
    held_out = (torch.arange(concepts) % 10 == 0).repeat_interleave(vendors)
    return emoji.pictures.flatten(0, 1).float() / 255, groups, held_out


def train() -> EmojiClassifier:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    pictures, groups, held_out = data()
    pictures, groups = pictures[~held_out], groups[~held_out]
    network, generator = EmojiClassifier(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, STEPS)
    for _ in range(STEPS):
        some = torch.randint(len(pictures), (BATCH,), generator=generator)
        loss = F.cross_entropy(network(pictures[some] * 2 - 1), groups[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return network.eval()


@torch.no_grad()
def accuracy(network: EmojiClassifier) -> float:
    pictures, groups, held_out = data()
    return (network(pictures[held_out] * 2 - 1).argmax(1) == groups[held_out]).double().mean().item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the stored weights, write nothing")
    options = parser.parse_args()
    network = train()
    print(f"held-out concepts: {accuracy(network):.1%} right of nine groups")
    if options.check:
        stored = accuracy(pretrained())
        print(f"with the stored weights: {stored:.1%}")
        return int(abs(stored - accuracy(network)) > 0.02)
    np.savez(WEIGHTS, **{name: value.numpy() for name, value in network.state_dict().items()})
    print(f"{WEIGHTS}: {WEIGHTS.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
