"""Feeds the parsers damaged and hostile input; each has to accept it or refuse it in words, never to crash or hang.

    python scripts/fuzz_parsers.py                      # every parser, 60 seconds each
    python scripts/fuzz_parsers.py --seconds 30 summary checkpoint

With `pip install atheris` the search is guided by coverage; without, valid input is mutated at random. What breaks a
parser is printed, kept in the folder --keep, and belongs into tests/broke/PARSER/, which tests/test_hostile_files.py
replays.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOM = Path(tempfile.gettempdir()) / f"mptrain-fuzz-{os.getpid()}"
"""Where files lie for parsers that take a path."""


def place(name: str, content: bytes) -> Path:
    path = ROOM / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def summary(content: bytes) -> None:
    from mptrain.results.record import Record
    from mptrain.results.runs import Excluded, Run, read_run

    folder = place("summary.json", content).parent
    assert isinstance(read_run(str(folder), str(folder)), Run | Excluded)
    Record(folder).state()


def metrics(content: bytes) -> None:
    from mptrain.results.quantities import last_step

    assert last_step(place("metrics.jsonl", content).parent) is not None


def config(content: bytes) -> None:
    from mptrain.results.record import Record

    folder = place("run/config.yaml", content).parent
    with Record(folder).opened({"steps": 3, "task": {"name": "tiny"}}, set()):
        pass


def settings(content: bytes) -> None:
    import yaml

    from mptrain.config import check

    with contextlib.suppress(yaml.YAMLError, RecursionError, ValueError):
        values = yaml.safe_load(content.decode("utf-8", "replace"))
        if isinstance(values, dict):
            check(values)


def checkpoint(content: bytes) -> None:
    """With a checksum that fits, so that the content itself is looked at."""
    from mptrain.results.checkpoint import load_latest

    folder = place("step-00000001.pt", content).parent
    place("step-00000001.pt.sha256", hashlib.sha256(content).hexdigest().encode())
    load_latest(folder)


def annotation(content: bytes) -> None:
    from mptrain.data.voc import parse

    parse(content, "picture 7")


def captions(content: bytes) -> None:
    from mptrain.data.image_folder import metadata

    metadata(place("metadata.jsonl", content).parent)


def picture(content: bytes) -> None:
    from mptrain.data.pictures import decode

    decode(io.BytesIO(content), "picture 7", "RGB")


def command(content: bytes) -> None:
    from mptrain.compose import checked

    checked(["+recipe=resnet", *content.decode("utf-8", "replace").replace("\0", "").split("\n")[:5]])


def verb(content: bytes) -> None:
    """The command line of a verb that looks at one run."""
    from mptrain.compose import config

    config(["+recipe=resnet", *content.decode("utf-8", "replace").replace("\0", "").split("\n")[:5]])


def paper(content: bytes) -> None:
    """A recipe's block, and the overrides that follow from it."""
    import yaml
    from pydantic import ValidationError

    from mptrain.paper import Paper

    with contextlib.suppress(yaml.YAMLError, RecursionError, ValueError, ValidationError):
        for run in Paper.model_validate(yaml.safe_load(content.decode("utf-8", "replace"))).runs.values():
            assert all(isinstance(text, str) for text in run.overrides)


def quantities(content: bytes) -> None:
    """Everything that a claim may ask of a run whose counts and configuration are somebody else's."""
    from mptrain.results.named import Records
    from mptrain.results.quantities import quantity
    from mptrain.results.runs import Run, read_run

    folder = place("run/counts.json", content).parent
    place("run/config.yaml", content)
    place("run/metrics.jsonl", content)
    run = read_run(str(place("run/summary.json", seeds("summary")[0]).parent), str(folder))
    assert isinstance(run, Run)
    for name in ("training loss", "seconds", "counts.forward.flushed", "counts.grad_input.zero"):
        found = quantity(run, name)
        assert found is None or isinstance(found, (int, float))
    assert isinstance(Records([run]).config(run), dict)


def watched(content: bytes) -> None:
    """A part of watch.parquet; one that is damaged is set aside when a run goes on."""
    from mptrain.watch.store import Store, read_part

    part = place("watch.parquet/000000009.parquet", content)
    with contextlib.suppress(ValueError):
        read_part(part)
    with contextlib.redirect_stderr(io.StringIO()):
        Store(part.parent).cut(5)
    for left in part.parent.iterdir():
        left.unlink()


def ranks(content: bytes) -> None:
    """What a launcher sets in the environment."""
    from unittest.mock import patch

    from mptrain.parallel import place_of

    text = content.decode("utf-8", "replace").replace("\0", "").encode("utf-8", "replace").decode()
    values = [*text.split("\n"), "", "", ""][:3]
    with patch.dict(os.environ, dict(zip(("WORLD_SIZE", "RANK", "LOCAL_RANK"), values, strict=True))):
        size, rank, local = place_of()
        assert size >= 1 and 0 <= rank < size and local >= 0


TARGETS: dict[str, Callable[[bytes], None]] = {
    f.__name__: f
    for f in (
        summary, metrics, config, settings, checkpoint, annotation, captions, picture, command, verb, paper, quantities,
        watched, ranks,
    )
}  # fmt: skip


def seeds(name: str) -> list[bytes]:
    """Valid input to start from."""
    if name == "summary":
        example = {
            "schema": 1, "status": "finished", "reason": None, "recipe": "r", "precision": "fp16", "scale": "8",
            "precision_label": "fp16", "seed": 0, "device": "cpu", "backend": "emulated",
            "dtypes": {"matmul": "float16", "softmax": "float32", "norm": "float32", "loss": "float32"},
            "metric": {"name": "top1", "value": 0.5, "higher_is_better": True, "margin": 0.01},
            "throughput": {"value": 1.5, "unit": "images/s"}, "memory": {"peak_mib": 3.5, "how": "x"},
            "steps": {"attempted": 10, "applied": 9, "skipped": 1}, "final_scale": 8.0,
            "data": {"name": "d", "kind": "real"}, "eval_precision": "fp32",
            "environment": {"torch": "2.14", "tf32": {}}, "finished": "2026-11-30T05:00:00+00:00",
            "key": {"recipe": "r", "data": "d", "steps": 10, "batch_size": 8},
        }  # fmt: skip
        return [json.dumps(example).encode(), b'{"schema": 1, "status": "failed"}', b"[" * 3000]
    if name == "metrics":
        return [b'{"step": 1, "loss": 0.5}\n{"step": 2, "loss": null}\n{"st', b'{"step": {"a": 1e999}}\n']
    if name in ("config", "settings"):
        return [
            b"steps: 3\ntask: {name: tiny}\n", b"a: &a [1]\nb: [*a, *a]\n", b"!!python/object/apply:os.system [ls]\n",
            b"recipe: r\ntask: {name: x, a: 1}\noptimizer: {name: sgd, lr: .1}\nschedule: {name: cosine}\nscale: 8\n",
        ]  # fmt: skip
    if name == "checkpoint":
        import torch

        buffers = []
        for state in ({"run": {"a": torch.ones(2)}, "log_bytes": 3}, [1, "x"]):
            torch.save(state, buffer := io.BytesIO())
            buffers.append(buffer.getvalue())
        return [*buffers, b"cos\nsystem\n(S'ls'\ntR."]
    if name == "annotation":
        thing = "<object><name>dog</name><bndbox>" + "".join(
            f"<{edge}>{i}</{edge}>" for i, edge in enumerate(("xmin", "ymin", "xmax", "ymax"), 1)
        )
        return [f"<annotation><size><width>9</width></size>{thing}</bndbox></object></annotation>".encode()]
    if name == "captions":
        return [b'{"file_name": "1.png", "text": "a dog"}\n{"file_name": "2.png", "caption": "x"}\n', b"[1]\n"]
    if name == "picture":
        from PIL import Image

        found = []
        for kind in ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM"):
            Image.new("RGB", (5, 4), "red").save(buffer := io.BytesIO(), kind)
            found.append(buffer.getvalue())
        return found
    if name == "paper":
        return [
            b"runs: {fp32: {precision: fp32, printed: 0.9}, a: {precision: fp16, scale: 8, also: [steps=3]}}\n"
            b"claims:\n  - {claim: x, test: ratio, run: a, of: counts.forward.zero, above: 0.5}\nseeds: 2\n",
        ]
    if name == "quantities":
        counts = [{"layer": "a", "direction": "forward", "values": 9, "zero": 1, "flushed": 2, "subnormal": 0}]
        return [json.dumps(counts).encode(), b'{"step": 1, "loss": 0.5}\n{"step": 2, "loss": null}\n', b"a: {b: 1}\n"]
    if name == "watched":
        from mptrain.watch.store import REAL, TEXT, WHOLE, Store

        row = {**dict.fromkeys(TEXT, "a"), **dict.fromkeys(WHOLE, 1), **dict.fromkeys(REAL, 0.5), "exponents": [1]}
        store = Store(ROOM / "seed")
        store.cut(0)
        store.add([row, {**row, "step": 9}])
        store.flush()
        return [(ROOM / "seed" / "000000009.parquet").read_bytes()]
    if name == "ranks":
        return [b"2\n1\n0", b"1", b"two\n\n3"]
    return [b"steps=3\nscale=8", b"task.model='a:b'\nprecision=fp16,bf16", b"~clip\n++x.y={a:1}\nseed=range(3)"]


def refused_in_words(target: Callable[[bytes], None], content: bytes) -> None:
    """Runs it; an error of the user's is an answer, any other goes on up."""
    from mptrain.errors import UserError

    try:
        target(content)
    except UserError as error:
        assert str(error).strip(), "an error without words"


def mutated(content: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, dropped, doubled or cut off; numbers pushed to extremes."""
    new = bytearray(content)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(new) + 1)
        what = rng.randrange(5)
        if what == 0 and at < len(new):
            new[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            del new[at : at + rng.randint(1, 20)]
        elif what == 2:
            new[at:at] = new[max(0, at - rng.randint(1, 40)) : at] * rng.randint(1, 3)
        elif what == 3:
            new[at:at] = rng.choice([b"-1", b"9" * 30, b"null", b"NaN", b"1e999", b"[" * 50, b"{}", b"\xff\xfe", b'""'])
        else:
            del new[at:]
    return bytes(new)


def at_random(name: str, seconds: float, seed: int) -> int:
    rng, start, tried, pool = random.Random(seed), time.monotonic(), 0, seeds(name)
    for content in pool:
        refused_in_words(TARGETS[name], content)
    while time.monotonic() - start < seconds:
        content = mutated(rng.choice(pool), rng)
        try:
            refused_in_words(TARGETS[name], content)
        except BaseException:
            print(f"{name} breaks on {content!r}", file=sys.stderr)
            raise
        tried += 1
    return tried


def guided(name: str, seconds: float, keep: Path) -> None:
    """libFuzzer through atheris; it ends the process itself."""
    import atheris

    corpus = keep / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    for content in seeds(name):
        (corpus / hashlib.sha1(content).hexdigest()).write_bytes(content)
    with atheris.instrument_imports(include=["mptrain", "yaml", "json"]):
        refused_in_words(TARGETS[name], seeds(name)[0])
    limits = [f"-max_total_time={seconds:.0f}", "-timeout=300", "-rss_limit_mb=3000", "-print_final_stats=1"]
    atheris.Setup(
        [sys.argv[0], *limits, f"-artifact_prefix={keep}/{name}-", str(corpus)],
        lambda content: refused_in_words(TARGETS[name], content),
    )
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parsers", nargs="*", choices=[*TARGETS, []], help="unset: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each parser")
    parser.add_argument("--seed", type=int, default=0, help="of mutation at random")
    parser.add_argument("--keep", type=Path, default=Path("results/fuzz"), help="what broke, and the corpus")
    parser.add_argument("--guided", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.keep.mkdir(parents=True, exist_ok=True)
    if arguments.guided:
        guided(arguments.parsers[0], arguments.seconds, arguments.keep)
    try:
        import atheris  # noqa: F401

        by_coverage = True
    except ImportError:
        by_coverage = False
    failed = 0
    for name in arguments.parsers or TARGETS:
        if not by_coverage:
            print(f"{name}: {at_random(name, arguments.seconds, arguments.seed)} inputs, mutated at random", flush=True)
            continue
        call = [sys.executable, __file__, name, "--guided", "--seconds", str(arguments.seconds)]
        done = subprocess.run([*call, "--keep", str(arguments.keep)], capture_output=True, text=True)
        lines = (line.split()[-1] for line in done.stderr.splitlines() if "number_of_executed_units" in line)
        broke = "" if done.returncode == 0 else f", BROKE:\n{done.stderr[-3000:]}"
        print(f"{name}: {next(lines, 'an unknown number of')} inputs, guided by coverage{broke}", flush=True)
        failed += done.returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
