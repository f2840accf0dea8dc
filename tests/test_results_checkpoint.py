import os

import pytest
import torch

from mptrain.results import checkpoint, record


def write(folder, *steps):
    for step in steps:
        checkpoint.save(folder, step, {"step": step, "tensor": torch.full((50,), float(step))})


def test_the_last_two_are_kept_and_sorted_by_number(tmp_path):
    write(tmp_path, 8, 9, 10, 100000000)
    assert [path.name for path in checkpoint.listed(tmp_path)] == ["step-00000010.pt", "step-100000000.pt"]
    assert len(list(tmp_path.iterdir())) == 4
    state, notices = checkpoint.load_latest(tmp_path)
    assert state["step"] == 100000000 and notices == []


def test_nothing_there(tmp_path):
    assert checkpoint.load_latest(tmp_path / "absent") == (None, [])


def flipped(content, at):
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:100],
        lambda content: content[: len(content) // 2],
        lambda content: content[:-10],
        lambda content: flipped(content, len(content) // 2),
        lambda content: flipped(content, 5),
        lambda content: content + b"x",
    ],
)
def test_a_damaged_file_gives_way_to_the_one_before(tmp_path, damage):
    write(tmp_path, 5, 10)
    last = tmp_path / "step-00000010.pt"
    last.write_bytes(damage(last.read_bytes()))
    state, notices = checkpoint.load_latest(tmp_path)
    assert state["step"] == 5
    assert notices == ["step-00000010.pt is damaged (its checksum differs)"]


def test_a_missing_checksum_and_a_damaged_one(tmp_path):
    write(tmp_path, 5, 10, 15)
    (tmp_path / "step-00000015.pt.sha256").write_bytes(b"\xff\xfe")
    (tmp_path / "step-00000010.pt.sha256").unlink()
    state, notices = checkpoint.load_latest(tmp_path)
    assert state is None and len(notices) == 2 and all("cannot be read" in notice for notice in notices)


def test_files_load_in_a_bare_interpreter(tmp_path):
    write(tmp_path, 1)
    assert torch.load(tmp_path / "step-00000001.pt", weights_only=True)["step"] == 1


@pytest.mark.parametrize("step", ["open", "write", "fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_names_it(tmp_path, monkeypatch, step):
    write(tmp_path, 1, 2)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if step == "open":
        monkeypatch.setattr("builtins.open", fail)
    elif step == "write":
        real = open
        monkeypatch.setattr("builtins.open", lambda *args: Full(real(*args)))
    else:
        monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError) as caught:
        write(tmp_path, 3)
    assert caught.value.errno == 28 and caught.value.filename == str(tmp_path / "step-00000003.pt.sha256")
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


class Full:
    def __init__(self, file):
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.file.close()

    def write(self, content):
        self.file.write(content[: len(content) // 2])
        raise OSError(28, "No space left on device")


def test_left_over_temporary_files_are_no_checkpoints(tmp_path):
    write(tmp_path, 1)
    (tmp_path / f".step-00000002.pt.{os.getpid()}.tmp").write_bytes(b"half")
    (tmp_path / "step-2.pt.tmp").write_bytes(b"half")
    assert [path.name for path in checkpoint.listed(tmp_path)] == ["step-00000001.pt"]


def test_writing_is_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    record.write_atomically(path, "old")
    record.write_atomically(path, b"new")
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]
