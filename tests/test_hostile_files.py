"""Damaged and hostile files: every parser accepts them or refuses them in words; nothing in a record runs code."""

import importlib.util
import pickle
import random
from pathlib import Path

import pytest
import torch
import yaml

from mptrain.errors import UserError
from mptrain.results import checkpoint
from mptrain.results.record import Record

SCRIPT = Path(__file__).parent.parent / "scripts" / "fuzz_parsers.py"
spec = importlib.util.spec_from_file_location("fuzz_parsers", SCRIPT)
fuzz = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fuzz)

BROKE = sorted((Path(__file__).parent / "broke").glob("*/*"))
"""What broke a parser once: a folder for each."""


@pytest.fixture(autouse=True)
def room(monkeypatch, tmp_path):
    monkeypatch.setattr(fuzz, "ROOM", tmp_path)


@pytest.mark.parametrize("path", BROKE, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_broke_once(path):
    fuzz.refused_in_words(fuzz.TARGETS[path.parent.name], path.read_bytes())


def test_every_parser_has_seeds_and_the_names_are_right():
    assert {path.parent.name for path in BROKE} <= fuzz.TARGETS.keys()
    assert all(fuzz.seeds(name) for name in fuzz.TARGETS)


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_damaged_input_is_refused_in_words(name):
    rng = random.Random(name)
    for _ in range(10 if name in ("command", "verb") else 100):
        fuzz.refused_in_words(fuzz.TARGETS[name], fuzz.mutated(rng.choice(fuzz.seeds(name)), rng))


def test_nothing_in_a_configuration_is_run_or_built(tmp_path):
    touched = tmp_path / "touched"
    for content in (
        f"!!python/object/apply:os.system ['touch {touched}']",
        yaml.safe_dump({"task": {"_target_": "os.system", "_args_": [f"touch {touched}"], "model": "os:system"}}),
    ):
        with pytest.raises(UserError):
            fuzz.config(content.encode())
    assert not touched.exists()


class Trap:
    def __init__(self, touched):
        self.touched = touched

    def __reduce__(self):
        return open, (self.touched, "w")


def test_nothing_in_a_checkpoint_is_run(tmp_path):
    """Neither in a pickle nor in torch's own container, though the checksum beside it fits."""
    touched = str(tmp_path / "touched")
    torch.save({"run": Trap(touched), "log_bytes": 0}, tmp_path / "trap")
    for content in ((tmp_path / "trap").read_bytes(), pickle.dumps(Trap(touched))):
        fuzz.checkpoint(content)
        state, notices = checkpoint.load_latest(tmp_path)
        assert state is None and "is no checkpoint" in notices[0]
    assert not Path(touched).exists()


def test_a_small_file_that_stands_for_an_endless_one(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 8)}]" for i in range(1, 30)]
    with pytest.raises(UserError, match="another configuration") as caught:
        fuzz.config("\n".join(lines).encode())
    assert len(str(caught.value)) < 20_000


@pytest.mark.parametrize("part", ["../../escape", "/etc/passwd", "a/b", "..", "x\n"])
def test_names_from_a_summary_stay_names(tmp_path, part):
    """Whatever a record calls itself, it is read where it lies and nothing is written anywhere."""
    content = fuzz.seeds("summary")[0].replace(b'"recipe": "r"', b'"recipe": ' + repr(part).replace("'", '"').encode())
    fuzz.summary(content)
    assert {path.name for path in tmp_path.iterdir()} == {"summary.json"}
    assert Record(tmp_path).read_summary()["status"] == "finished"


def test_a_folder_of_an_older_version(tmp_path):
    """Keys that it lacks mean their defaults; other values of them are another configuration."""
    old, now = {"steps": 3}, {"steps": 3, "parallel": {"batchnorm": "sync"}}
    record = Record(tmp_path / "run")
    with record.opened(old, set()):
        pass
    with (
        pytest.raises(UserError, match="parallel.batchnorm: sync -> local"),
        record.opened({"steps": 3, "parallel": {"batchnorm": "local"}}, set(), {"parallel": {"batchnorm": "sync"}}),
    ):
        pass
    with record.opened(now, set(), {"parallel": {"batchnorm": "sync"}}):
        assert yaml.safe_load(record.config.read_text()) == now


@pytest.mark.parametrize("failing", ["replace", "fsync"])
def test_a_rename_that_fails_leaves_the_old_file(tmp_path, monkeypatch, failing):
    """As on a network file system: a stale handle, or a disk that gives errors only when asked to be sure."""
    folder = tmp_path / "checkpoints"
    checkpoint.save(folder, 1, {"run": 1})

    def fail(*_):
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="Stale file handle") as caught:
        patched.setattr("os." + failing, fail)
        checkpoint.save(folder, 2, {"run": 2})
    assert "step-00000002.pt" in caught.value.filename
    assert checkpoint.load_latest(folder) == ({"run": 1}, [])
    assert not list(folder.glob("*.tmp")) and not list(folder.glob(".*"))
