"""Samples with pictures: clothes, tree crowns, emoji."""

import gzip
import io
import json
import struct
import xml.etree.ElementTree as ElementTree
import zlib
from pathlib import Path

import numpy as np
from datasets import ClassLabel, Features, Image, List, Value
from PIL import Image as Picture

from samples.packages import debian, npm, pypi
from samples.sample import Sample


def png(pixels: np.ndarray) -> dict:
    """An uncompressed PNG of bytes (h, w) or (h, w, 3): Parquet's compressor does better on all pictures at once."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = pixels.shape[:2]
    colour = {2: 0, 3: 2}[pixels.ndim]
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)  # 0: no filter
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines, 0)) + chunk(b"IEND", b"")
    return {"bytes": b"\x89PNG\r\n\x1a\n" + parts, "path": None}


# -------------------------------------------------------------------------------------------------------------- fashion


def fashion() -> list[dict]:
    folder = debian("dataset-fashion-mnist", "0.0~git20200523.55506a9-1") / "usr/share/datasets/fashion-mnist"
    rows = []
    for split, prefix, count in (("train", "train", 10_000), ("test", "t10k", 5_000)):
        images = idx(folder / f"{prefix}-images-idx3-ubyte.gz")[:count]
        labels = idx(folder / f"{prefix}-labels-idx1-ubyte.gz")[:count]
        rows += [
            {"image": png(image), "label": int(label), "split": split}
            for image, label in zip(images, labels, strict=True)
        ]
    return rows


def idx(file: Path) -> np.ndarray:
    """Bytes in the idx format of MNIST: two zeros, type 8, the number of axes, then each length as big-endian."""
    data = gzip.decompress(file.read_bytes())
    shape = struct.unpack_from(f">{data[3]}I", data, 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)


CLOTHES = ["T - shirt / top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]

FASHION = Sample(
    name="fashion",
    rows=fashion,
    features=Features({"image": Image(), "label": ClassLabel(names=CLOTHES), "split": Value("string")}),
    source="Debian dataset-fashion-mnist 0.0~git20200523.55506a9-1",
    changes="the first 10,000 training and 5,000 test pictures, as PNG",
    licence="MIT",
    copyright=("2017 Zalando SE",),
)


# ---------------------------------------------------------------------------------------------------------------- trees

BORDER = 1700
PHOTOGRAPHS: dict[str, list[tuple[str, int, int | None]]] = {  # parts: split, first column, column after the last
    "2019_YELL_2_528000_4978000_image_crop2": [("train", 0, BORDER), ("test", BORDER, None)],
    "2019_YELL_2_541000_4977000_image_crop": [("train", 0, None)],
    "OSBS_029": [("train", 0, None)],
    "SOAP_061": [("train", 0, None)],
}


def trees() -> list[dict]:
    wheel = pypi("deepforest", "2.1.0")
    rows = []
    for name, parts in PHOTOGRAPHS.items():
        photograph = Picture.open(io.BytesIO(wheel.read(f"deepforest/data/{name}.png"))).convert("RGB")
        boxes = voc_boxes(wheel.read(f"deepforest/data/{name}.xml"))
        for split, left, right in parts:
            part = photograph.crop((left, 0, right or photograph.width, photograph.height))
            encoded = io.BytesIO()
            part.save(encoded, "JPEG", quality=88)
            path = f"{name}_{left}.jpg" if len(parts) > 1 else f"{name}.jpg"
            image = {"bytes": encoded.getvalue(), "path": path}
            rows.append({"image": image, "objects": crowns(boxes, left, part.size), "split": split})
    return rows


def voc_boxes(xml: bytes) -> np.ndarray:
    """Boxes (n, 4) of a Pascal VOC annotation: xmin, ymin, xmax, ymax."""
    edges = ("xmin", "ymin", "xmax", "ymax")
    objects = ElementTree.fromstring(xml).findall("object")
    return np.array([[float(o.findtext(f"bndbox/{edge}", "")) for edge in edges] for o in objects])


def crowns(boxes: np.ndarray, left: int, size: tuple[int, int]) -> dict:
    """What a part of the photograph shows of each box; difficult where that is less than half of it."""
    moved = boxes - [left, 0, left, 0]
    cut = np.clip(moved, 0, [*size, *size])
    shown = area(cut) / area(moved)
    seen = shown > 0
    return {
        "bbox": cut[seen].astype(np.float32).tolist(),
        "category": [0] * int(seen.sum()),
        "difficult": (shown[seen] < 0.5).tolist(),
    }


def area(boxes: np.ndarray) -> np.ndarray:
    return np.prod(np.maximum(boxes[:, 2:] - boxes[:, :2], 0), axis=1)


TREES = Sample(
    name="trees",
    rows=trees,
    features=Features(
        {
            "image": Image(),
            "objects": {
                "bbox": List(List(Value("float32"), length=4)),
                "category": List(ClassLabel(names=["tree"])),
                "difficult": List(Value("bool")),
            },
            "split": Value("string"),
        }
    ),
    source="PyPI deepforest 2.1.0",
    changes=f"photographs as JPEG of quality 88, the first cut in two at column {BORDER}; one class for all crowns",
    licence="MIT",
    copyright=("2019 Ben Weinstein",),
)


# ---------------------------------------------------------------------------------------------------------------- emoji

ICONS = {  # vendor: npm package and version; the last one is the test split
    "noto": ("@iconify-json/noto", "1.2.9"),
    "twemoji": ("@iconify-json/twemoji", "1.2.5"),
    "openmoji": ("@iconify-json/openmoji", "1.2.29"),
    "fluent": ("@iconify-json/fluent-emoji-flat", "1.2.6"),
}
NAMES = ("emojibase-data", "17.0.0")
GROUPS = ["smileys-emotion", "people-body", "animals-nature", "food-drink", "travel-places", "activities", "objects",
          "symbols", "flags"]  # fmt: skip
COMPONENT = 2
"""number of the group of skin tones and hair, which are no pictures of their own"""


def emoji() -> list[dict]:
    names = npm(*NAMES)
    named = read_json(names, "meta/groups")
    labels = {
        language: {entry["hexcode"]: entry["label"] for entry in read_json(names, f"{language}/data")}
        for language in ("de", "fr", "es")
    }
    drawings = {vendor: Drawings(*package) for vendor, package in ICONS.items()}
    concepts = [
        entry
        for entry in read_json(names, "en/data")
        if entry.get("group", COMPONENT) != COMPONENT and all(entry["hexcode"] in found for found in drawings.values())
    ]
    return [
        {
            "image": png(rendered(drawings[vendor].svg(entry["hexcode"]))),
            "label": entry["label"],
            "tags": entry.get("tags", []),
            "group": GROUPS.index(named["groups"][str(entry["group"])]),
            "subgroup": named["subgroups"][str(entry["subgroup"])],
            "emoji": entry["emoji"],
            "hexcode": entry["hexcode"],
            **{f"label_{language}": labels[language].get(entry["hexcode"]) for language in labels},
            "vendor": vendor,
            "split": "test" if vendor == [*ICONS][-1] else "train",
        }
        for vendor in ICONS
        for entry in concepts
    ]


def read_json(package, name: str):
    return json.load(package.extractfile(f"package/{name}.json"))


class Drawings:
    """One vendor's pictures, found by code points."""

    def __init__(self, package: str, version: str) -> None:
        archive = npm(package, version)
        self.set = read_json(archive, "icons")
        self.names = {bare(code): name for code, name in read_json(archive, "chars").items()}

    def __contains__(self, hexcode: str) -> bool:
        return bare(hexcode) in self.names

    def svg(self, hexcode: str) -> str:
        name = self.names[bare(hexcode)]
        icons, aliases = self.set["icons"], self.set.get("aliases", {})
        icon = icons[name] if name in icons else icons[aliases[name]["parent"]] | aliases[name]
        width, height = (icon.get(side, self.set.get(side, 16)) for side in ("width", "height"))
        box = f"{icon.get('left', 0)} {icon.get('top', 0)} {width} {height}"
        spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        return f'<svg {spaces} width="{width}" height="{height}" viewBox="{box}">{icon["body"]}</svg>'


def bare(hexcode: str) -> str:
    """Code points without the variation selector that asks for a picture, which not every vendor writes."""
    return "-".join(point for point in hexcode.lower().split("-") if point != "fe0f")


def rendered(svg: str, side: int = 32) -> np.ndarray:
    """The drawing (side, side, 3) on white, its empty margin cut off."""
    import resvg_py

    drawn = resvg_py.svg_to_bytes(svg_string=svg, width=128, height=128, skip_system_fonts=True)
    picture = Picture.open(io.BytesIO(bytes(drawn))).convert("RGBA")
    picture = picture.crop(picture.getchannel("A").getbbox())
    longest = max(picture.size)
    square = Picture.new("RGBA", (longest, longest), (255, 255, 255, 0))
    square.paste(picture, ((longest - picture.width) // 2, (longest - picture.height) // 2))
    paper = Picture.new("RGBA", (side, side), "white")
    paper.alpha_composite(square.resize((side, side), Picture.Resampling.LANCZOS))
    return np.asarray(paper.convert("RGB"))


EMOJI = Sample(
    name="emoji",
    rows=emoji,
    features=Features(
        {
            "image": Image(),
            "label": Value("string"),
            "tags": List(Value("string")),
            "group": ClassLabel(names=GROUPS),
            "subgroup": Value("string"),
            "emoji": Value("string"),
            "hexcode": Value("string"),
            "label_de": Value("string"),
            "label_fr": Value("string"),
            "label_es": Value("string"),
            "vendor": Value("string"),
            "split": Value("string"),
        }
    ),
    source="; ".join(f"npm {package} {version}" for package, version in (*ICONS.values(), NAMES)),
    changes="drawings that all four vendors have, rendered by resvg at 32 x 32 pixels on white, margins cut off",
    licence="Apache-2.0 AND CC-BY-4.0 AND CC-BY-SA-4.0 AND MIT",
    copyright=(
        "Google Inc (Noto Emoji, Apache-2.0)",
        "Twitter, Inc and other contributors (Twemoji, CC-BY-4.0)",
        "OpenMoji authors (OpenMoji, CC-BY-SA-4.0)",
        "Microsoft Corporation (Fluent Emoji, MIT)",
        "2017-2019 Miles Johnson (emojibase: names and tags, MIT)",
    ),
)
