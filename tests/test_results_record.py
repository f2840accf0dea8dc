import json
import os

import pytest
import torch
from tiny.runs import started

from mptrain.errors import UserError
from mptrain.results.record import Record, differences, finite

CONFIG = {"steps": 10, "optimizer": {"lr": 0.1}, "log_every": 5}


def opened(record, **changes):
    return record.opened({**CONFIG, **changes}, {"log_every"})


def test_states(tmp_path):
    record = Record(tmp_path / "deep" / "run")
    assert record.state() == "absent"
    with opened(record):
        assert record.state() == "resumable"
        for status in ("failed", "diverged", "finished"):
            record.finish(status, None, {})
            assert record.state() == status
        record.forget_failure()
    assert record.state() == "resumable"


def test_the_same_settings_open_it_again_and_others_do_not(tmp_path):
    record = Record(tmp_path / "run")
    with opened(record):
        pass
    with opened(record, log_every=1):
        pass
    with (
        pytest.raises(UserError, match="optimizer.lr: 0.1 -> 0.2; seed: None -> 1"),
        opened(record, optimizer={"lr": 0.2}, seed=1),
    ):
        pass


def test_a_foreign_folder_is_left_alone(tmp_path):
    mine = ("letter.txt", ".letter.tmp", ".letter.12.tmp", "deep/er/.letter.12.tmp")
    for name in mine:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("dear")
    with pytest.raises(UserError, match="not empty and holds no run"), opened(Record(tmp_path)):
        pass
    (tmp_path / "config.yaml").write_text("mine: too")
    with pytest.raises(UserError, match="another configuration"), opened(Record(tmp_path)):
        pass
    (tmp_path / "lock").unlink()
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {*mine, "config.yaml"}


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "run").write_text("")
    with (
        pytest.raises(UserError, match="cannot be used for this run .File exists.; give another one: out="),
        opened(Record(tmp_path / "run")),
    ):
        pass
    with pytest.raises(UserError, match="Not a directory"), opened(Record(tmp_path / "run" / "below")):
        pass


def test_impossible_names(tmp_path):
    for name in ("x" * 300, "null\0byte"):
        with pytest.raises(UserError, match="cannot be used for this run"), opened(Record(tmp_path / name)):
            pass


@pytest.mark.parametrize("content", ["steps: [", "- a\n- b\n", "", "\x00"])
def test_a_corrupt_configuration_is_said(tmp_path, content):
    with opened(record := Record(tmp_path / "run")):
        pass
    record.config.write_text(content)
    with pytest.raises(UserError, match="config.yaml cannot be read .*give another folder"), opened(record):
        pass
    assert record.config.read_text() == content


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"schema": 99}', "\udcff"])
def test_a_corrupt_summary_is_said(tmp_path, content):
    with opened(record := Record(tmp_path / "run")):
        pass
    record.summary.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match="summary.json"):
        record.read_summary()


def hold(folder, ready, leave):
    with opened(Record(folder)):
        ready.set()
        leave.wait(20)


def test_two_at_once(tmp_path):
    from tiny.runs import forkserver

    ready, leave = forkserver.Event(), forkserver.Event()
    other = started(hold, tmp_path / "run", ready, leave)
    assert ready.wait(60)
    with pytest.raises(UserError, match="in use by another run"), opened(Record(tmp_path / "run")):
        pass
    leave.set()
    other.join(20)
    with opened(Record(tmp_path / "run")):
        pass


def test_the_log_is_strict_json_and_can_be_cut(tmp_path):
    record = Record(tmp_path / "run")
    with opened(record):
        assert record.flush() == 0
        record.log({"loss": float("nan"), "all": [float("inf"), {"x": -float("inf")}], "step": 1})
        length = record.flush()
        record.log({"step": 2})
    assert length == len(record.metrics.read_text().splitlines()[0]) + 1
    with opened(record):
        record.cut_log(length)
        record.log({"step": 3})
        assert record.flush() == record.metrics.stat().st_size
    lines = [json.loads(line) for line in record.metrics.read_text().splitlines()]
    assert lines == [{"loss": None, "all": [None, {"x": None}], "step": 1}, {"step": 3}]
    with opened(record):
        record.cut_log(10**6)
    assert len(record.metrics.read_text().splitlines()) == 2


def test_left_over_temporary_files_are_removed(tmp_path):
    record = Record(tmp_path / "run")
    with opened(record):
        record.checkpoints.mkdir()
    for folder in (record.folder, record.checkpoints):
        (folder / ".step-00000001.pt.123.tmp").write_text("half")
    with opened(record):
        assert not list(record.folder.rglob("*.tmp"))


def test_abandoning(tmp_path):
    record = Record(tmp_path / "run")
    with opened(record):
        assert record.abandon()
    assert not record.folder.exists()
    with opened(record):
        record.log({"step": 1})
        assert not record.abandon()
    assert record.config.exists()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs user ids")
def test_a_folder_without_permission(tmp_path):
    """As a child without privileges: root may write anywhere."""
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0o555)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != folder.parent:
            folder.chmod(folder.stat().st_mode | 0o055)
    child = started(complain_without_privileges, closed, tmp_path / "said")
    child.join(60)
    closed.chmod(0o755)
    assert child.exitcode == 0


def complain_without_privileges(closed, said):
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    with (
        pytest.raises(UserError, match="cannot be used for this run .Permission denied.; give another one"),
        opened(Record(closed / "run")),
    ):
        pass


def test_differences():
    before = {"a": 1, "b": {"c": 2, "d": {"e": 3}}, "quiet": 1}
    assert differences(before, {"a": 1, "b": {"c": 2, "d": {"e": 3}}, "quiet": 2}, {"quiet"}) == []
    assert differences(before, {"a": 2, "b": {"c": 2, "d": {"e": 4, "f": 5}}}, {"quiet"}) == [
        "a: 1 -> 2",
        "b.d.e: 3 -> 4",
        "b.d.f: None -> 5",
    ]


def test_finite():
    assert finite({"a": (1.5, float("nan"))}) == {"a": [1.5, None]}


def test_settings_of_a_loop_of_one_s_own(tmp_path):
    settings = {"betas": (0.9, 0.999), "data": tmp_path, "clip": float("nan"), "lr": torch.tensor(0.5)}
    for _ in range(2):
        with Record(tmp_path / "run").opened(settings, set()) as record:
            record.log({"loss": torch.tensor(0.25, requires_grad=True)})
    assert record.metrics.read_text() == '{"loss": 0.25}\n' * 2
    with (
        pytest.raises(UserError, match="configuration a.b: a Tensor cannot be kept; give numbers, text or lists"),
        Record(tmp_path / "other").opened({"a": {"b": torch.ones(2)}}, set()),
    ):
        pass
    assert not (tmp_path / "other").exists()
    with pytest.raises(UserError, match="status=done: give finished, diverged, failed"):
        record.finish("done", None, {})
