"""Samples with words: parallel sentences, novels, speech."""

import gzip
import hashlib
import io
import json
import random
import re
import zlib
from collections import Counter
from itertools import groupby

from datasets import Audio, Features, Translation, Value

from samples.packages import debian, pypi
from samples.sample import Sample

# -------------------------------------------------------------------------------------------------------- homeassistant

HOME_ASSISTANT = "2024.3.3"  # the newest that Python 3.11 installs


def homeassistant(language: str) -> list[dict]:
    """Interface sentences of 2 to 30 English words, each English sentence once; one component in 15 is held out."""
    wheel = pypi("homeassistant", HOME_ASSISTANT)
    files = set(wheel.namelist())
    rows, seen = [], set()
    for file in sorted(files):
        found = re.fullmatch(r"homeassistant/components/([^/]+)/translations/en\.json", file)
        other = file.replace("/en.json", f"/{language}.json")
        if not found or other not in files:
            continue
        english, foreign = (dict(sentences(json.loads(wheel.read(name)))) for name in (file, other))
        for key, sentence in english.items():
            if foreign.get(key, "") in ("", sentence) or sentence.lower() in seen:
                continue
            if 2 <= len(sentence.split()) <= 30:
                seen.add(sentence.lower())
                split = "test" if held_out(found[1]) else "train"
                pair = {"en": sentence, language: foreign[key]}
                rows.append({"component": found[1], "translation": pair, "split": split})
    return without_leaks(rows)


def sentences(tree: dict, path: str = ""):
    """Every string of nested dictionaries under its path, white space made one blank."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from sentences(value, f"{path}{key}.")
        elif isinstance(value, str):
            yield path + key, " ".join(value.split())


def held_out(component: str) -> bool:
    return int(hashlib.sha256(component.encode()).hexdigest(), 16) % 15 == 0


def without_leaks(rows: list[dict]) -> list[dict]:
    """Leaves out test pairs of which one side also occurs in the training part, case and punctuation aside."""
    known = {side(row, language) for row in rows if row["split"] == "train" for language in row["translation"]}
    return [
        row
        for row in rows
        if row["split"] == "train" or not any(side(row, language) in known for language in row["translation"])
    ]


def side(row: dict, language: str) -> tuple[str, str]:
    return language, " ".join(re.findall(r"\w+", row["translation"][language].casefold()))


def homeassistant_sample(language: str) -> Sample:
    return Sample(
        name=f"homeassistant_en_{language}",
        rows=lambda: homeassistant(language),
        features=Features(
            {
                "component": Value("string"),
                "translation": Translation(languages=["en", language]),
                "split": Value("string"),
            }
        ),
        source=f"PyPI homeassistant {HOME_ASSISTANT}",
        changes="sentences of 2 to 30 English words that are translated, each once; white space made one blank",
        licence="Apache-2.0",
        copyright=("The Home Assistant Authors",),
    )


HOMEASSISTANT = [homeassistant_sample("de"), homeassistant_sample("fr")]

# --------------------------------------------------------------------------------------------------------------- austen


def austen() -> list[dict]:
    """Paragraphs of six novels, one after another: the first 90 % of all words, then 5 % and 5 %."""
    paragraphs = [
        (book, " ".join(lines))
        for book, text in sorted(r_data("r-cran-janeaustenr", "1.0.0-1", "janeaustenr").items())
        for filled, lines in groupby((str(line).strip() for line in text), key=bool)
        if filled
    ]
    total = sum(len(text.split()) for _, text in paragraphs)
    rows, words = [], 0
    for book, text in paragraphs:
        split = "train" if words < 0.9 * total else "validation" if words < 0.95 * total else "test"
        rows.append({"text": text, "book": book, "split": split})
        words += len(text.split())
    return rows


def r_data(package: str, version: str, name: str) -> dict:
    """Every object of an R package's data: an index of (offset, length) and compressed blocks with a 4-byte head."""
    from rdata import conversion, parser

    folder = debian(package, version) / "usr/lib/R/site-library" / name / "data"
    index = conversion.convert(parser.parse_data(gzip.decompress((folder / "Rdata.rdx").read_bytes())))
    blocks = (folder / "Rdata.rdb").read_bytes()
    return {
        key: conversion.convert(parser.parse_data(zlib.decompress(blocks[offset + 4 : offset + length])))
        for key, (offset, length) in index["variables"].items()
    }


AUSTEN = Sample(
    name="austen",
    rows=austen,
    features=Features({"text": Value("string"), "book": Value("string"), "split": Value("string")}),
    source="Debian r-cran-janeaustenr 1.0.0-1",
    changes="lines joined to paragraphs",
    licence="MIT",
    copyright=("2016-2017 Julia Silge (the package; the novels are in the public domain)",),
)

# ------------------------------------------------------------------------------------------------------------- asterisk

HELD_OUT_CLIPS = 60
LONGEST_HELD_OUT = 8.0
LONGEST = 32.0
"""seconds"""
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SPOKEN = {str(value): name for value, name in enumerate(DIGITS)} | {"#": "pound", "*": "star"}


def asterisk() -> list[dict]:
    """Spoken prompts of one voice; sixty whose words no other clip has are held out."""
    import soundfile

    folder = debian("asterisk-core-sounds-en-wav", "1.6.1-1") / "usr/share/asterisk/sounds/en_US_f_Allison"
    rows = []
    for clip, transcript in sorted(transcripts().items()):
        file = folder / f"{clip}.wav"
        words = spoken(transcript)
        described = re.search(r"[\[(<]", transcript)  # a note on the clip, or a noise
        if not file.exists() or not words or described:
            continue
        sound, rate = soundfile.read(file, dtype="int16")
        if (seconds := len(sound) / rate) > LONGEST:
            continue
        encoded = io.BytesIO()
        soundfile.write(encoded, sound, rate, format="WAV", subtype="GSM610")
        audio = {"bytes": encoded.getvalue(), "path": f"{clip}.wav"}
        rows.append({"id": clip, "audio": audio, "text": words, "transcript": transcript, "seconds": seconds})
    count = Counter(row["text"] for row in rows)
    candidates = [row["id"] for row in rows if count[row["text"]] == 1 and row["seconds"] <= LONGEST_HELD_OUT]
    random.Random(0).shuffle(candidates)
    test = set(candidates[:HELD_OUT_CLIPS])
    return [row | {"split": "test" if row["id"] in test else "train"} for row in rows]


def transcripts() -> dict[str, str]:
    folder = debian("asterisk-core-sounds-en", "1.6.1-1") / "usr/share/doc/asterisk-core-sounds-en"
    lines = gzip.decompress((folder / "core-sounds-en.txt.gz").read_bytes()).decode("utf-8").splitlines()
    pairs = (line.partition(":") for line in lines if ":" in line and not line.startswith(";"))
    return {clip.strip(): transcript.strip() for clip, _, transcript in pairs}


def spoken(transcript: str) -> str:
    """The words in lower case, letters a to z and apostrophes, digits and keys of a telephone read one by one."""
    text = "".join(f" {SPOKEN[letter]} " if letter in SPOKEN else letter for letter in transcript.lower())
    words = (word.strip("'") for word in re.sub(r"[^a-z']+", " ", text).split())
    return " ".join(word for word in words if word)


ASTERISK = Sample(
    name="asterisk",
    rows=asterisk,
    features=Features(
        {
            "id": Value("string"),
            "audio": Audio(sampling_rate=8000),
            "text": Value("string"),
            "transcript": Value("string"),
            "seconds": Value("float32"),
            "split": Value("string"),
        }
    ),
    source="Debian asterisk-core-sounds-en-wav 1.6.1-1; Debian asterisk-core-sounds-en 1.6.1-1",
    changes="clips of words, of at most 32 seconds, coded as GSM 06.10 in WAV; text in plain words",
    licence="CC-BY-SA-3.0",
    copyright=("2003-2010 Allison Smith (recordings; funded by Digium, Inc.)",),
)
