"""One run, one folder: what it was told, what it measured, how it ended.

    config.yaml       the composed configuration
    metrics.jsonl     one line per logged step, skipped step and evaluation; nothing in it depends on the clock
    summary.json      how it ended; written last
    counts.json       what rounding did to every product (count=true)
    checkpoints/      what is needed to go on

A folder is absent, resumable, finished, diverged or failed. Every file but metrics.jsonl is replaced as a whole;
metrics.jsonl is appended to, and cut back to the checkpoint that a run resumes from. So a kill at any moment leaves a
folder from which the same command ends with the same weights.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import reprlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mptrain.errors import UserError

SCHEMA = 1
STATUSES = ("finished", "diverged", "failed")
LARGEST_CONFIG = 1_000_000  # bytes
LOCKED = (errno.EACCES, errno.EAGAIN)
PASSING = (errno.ESTALE, errno.EBUSY, errno.EAGAIN, errno.EINTR)
"""What a network file system says of a rename that may succeed a moment later."""
LEFT_OVER = re.compile(r"\..+\.[0-9]+\.tmp")
"""What a kill leaves of a file that was being written."""
PAUSES = (0.05, 0.2, 0.5)  # seconds


class Record:
    """A run's folder."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self.config = self.folder / "config.yaml"
        self.metrics = self.folder / "metrics.jsonl"
        self.summary = self.folder / "summary.json"
        self.checkpoints = self.folder / "checkpoints"
        self._log: Any = None

    def read_summary(self) -> dict[str, Any] | None:
        """How the run ended, or None if it has not; raises UserError if the file is unreadable."""
        try:
            summary = json.loads(self.summary.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{self.summary} cannot be read ({error}); delete it to run again") from error
        if not isinstance(summary, dict) or summary.get("schema") != SCHEMA or summary.get("status") not in STATUSES:
            raise UserError(f"{self.summary} is not a summary of this version; name another folder with out=")
        return summary

    def state(self) -> str:
        """absent | resumable | finished | diverged | failed"""
        if (summary := self.read_summary()) is not None:
            return str(summary.get("status"))
        return "resumable" if self.config.exists() else "absent"

    def held(self) -> bool:
        """Whether another process is running it."""
        import fcntl

        try:
            lock = open(self.folder / "lock", "r+")  # noqa: SIM115 - closed below
        except OSError:  # whoever cannot write here is told so by a run of its own
            return False
        with lock:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                return error.errno in LOCKED
        return False

    @contextmanager
    def opened(
        self, config: Mapping[str, Any], cosmetic: set[str], later: Mapping[str, Any] | None = None
    ) -> Iterator[Record]:
        """Holds the folder for this process and writes config.yaml.

        cosmetic: keys that may change. later: values of keys that folders of older versions lack.

        Raises UserError for a configuration that yaml cannot hold, if another process holds the folder, if it belongs
        to another configuration (cosmetic keys apart), or if it cannot be written.
        """
        import fcntl

        config = {key: _plain(value, str(key)) for key, value in config.items()}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (self.folder / "lock").exists():
                self._refuse_strange()
            lock = open(self.folder / "lock", "a")  # noqa: SIM115 - held until the run ends
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.folder} cannot be used for this run ({_reason(error)}); give another one: out=FOLDER"
            ) from error
        try:
            try:
                # A lock of the process, not of the open file: workers that outlive a killed run do not hold it.
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in LOCKED:  # some network file systems
                    raise UserError(
                        f"{self.folder} cannot be locked ({_reason(error)}), so two runs might write there at once; "
                        "give a folder on another file system: out=FOLDER"
                    ) from error
                raise UserError(
                    f"{self.folder} is in use by another run; wait for it, or give another folder: out=FOLDER"
                ) from error
            self._claim(config, cosmetic, later or {})
            yield self
        finally:
            with suppress(OSError):  # a full disk has been reported when it mattered
                if self._log is not None:
                    self._log.close()
            self._log = None
            lock.close()

    def _claim(self, config: Mapping[str, Any], cosmetic: set[str], later: Mapping[str, Any]) -> None:
        import yaml

        if self.config.exists():
            try:
                if self.config.stat().st_size > LARGEST_CONFIG:
                    raise ValueError("too large for a configuration")
                before = yaml.safe_load(self.config.read_text(encoding="utf-8"))
                if not isinstance(before, dict):
                    raise ValueError("no mapping")
            except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
                raise UserError(
                    f"{self.config} cannot be read ({_reason(error)}); give another folder: out=FOLDER"
                ) from error
            if changes := differences({**later, **before}, config, cosmetic):
                raise UserError(
                    f"{self.folder} holds a run with another configuration ({'; '.join(changes[:8])}); "
                    "give another folder (out=FOLDER) or the same settings"
                )
        else:
            self._refuse_strange()
        for left_over in (*self.folder.glob(".*.tmp"), *self.folder.glob("*/.*.tmp")):
            if LEFT_OVER.fullmatch(left_over.name):
                left_over.unlink(missing_ok=True)
        if not self.summary.exists():
            write_atomically(self.config, yaml.safe_dump(dict(config), sort_keys=False))

    def _refuse_strange(self) -> None:
        """Raises UserError for a folder with something in it that no run has put there."""
        names = [path.name for path in self.folder.iterdir()]
        if "config.yaml" not in names and any(name != "lock" and not LEFT_OVER.fullmatch(name) for name in names):
            raise UserError(f"{self.folder} is not empty and holds no run of mptrain; give another folder: out=FOLDER")

    def abandon(self) -> bool:
        """Removes a run that never took a step, and its folder if nothing else is in it; returns whether it was one."""
        if self.checkpoints.exists() or self.metrics.exists():
            return False
        for path in (self.config, self.summary, self.folder / "lock"):
            path.unlink(missing_ok=True)
        for event in self.folder.glob("events.out.tfevents.*"):
            event.unlink()
        with suppress(OSError):
            self.folder.rmdir()
        return True

    def log(self, line: Mapping[str, Any]) -> None:
        """Appends one line to metrics.jsonl; a tensor of one number is taken for it."""
        if self._log is None:
            self._log = open(self.metrics, "a", encoding="utf-8")  # noqa: SIM115 - closed by `opened`
        with _naming(self.metrics):
            self._log.write(json.dumps(finite(line), allow_nan=False) + "\n")

    def flush(self) -> int:
        """Brings logged lines to the disk; returns the length of metrics.jsonl in bytes."""
        if self._log is None:
            return self.metrics.stat().st_size if self.metrics.exists() else 0
        with _naming(self.metrics):
            self._log.flush()
            os.fsync(self._log.fileno())
        return int(self._log.tell())

    def cut_log(self, length: int) -> None:
        """Drops what was logged after a checkpoint."""
        if self.metrics.exists():
            os.truncate(self.metrics, min(length, self.metrics.stat().st_size))

    def finish(self, status: str, reason: str | None, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Writes summary.json: finished | diverged | failed, why, and everything the table needs.

        Raises UserError for another status.
        """
        if status not in STATUSES:
            raise UserError(f"status={status}: give {', '.join(STATUSES)}")
        self.flush()
        summary = finite({"schema": SCHEMA, "status": status, "reason": reason, **fields})
        write_atomically(self.summary, json.dumps(summary, indent=2, allow_nan=False) + "\n")
        return summary

    def forget_failure(self) -> None:
        """A failed run may be tried again."""
        self.summary.unlink(missing_ok=True)


def finite(value: Any) -> Any:
    """The same data as strict JSON holds it: NaN and infinities as null, numbers of torch and NumPy as numbers."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _plain(value: Any, key: str) -> Any:
    """Data as yaml gives it back; UserError for what it cannot hold."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, key) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise UserError(
        f"configuration {key}: a {type(value).__name__} cannot be kept; give numbers, text or lists of them"
    )


def differences(before: Mapping[str, Any], now: Mapping[str, Any], ignore: set[str], prefix: str = "") -> list[str]:
    """The keys whose values differ, each as `key: before -> now`."""
    found = []
    for key in dict.fromkeys([*before, *now]):
        if prefix + key in ignore:
            continue
        a, b = before.get(key), now.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, ignore, f"{prefix}{key}.")
        elif a != b and (a == a or b == b):  # NaN is the same setting again
            found.append(f"{prefix}{key}: {_short(a)} -> {_short(b)}")
    return found


def _short(value: Any) -> str:
    """A value in a few words: a small yaml file may stand for an endless one."""
    return value[:200] if isinstance(value, str) else _SHORT.repr(value)[:400]


_SHORT = reprlib.Repr()
_SHORT.maxdict = _SHORT.maxlist = 12
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlevel = 3


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces a file as a whole: after a crash it is the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _naming(path):
            with open(temporary, "wb") as file:
                file.write(content.encode("utf-8") if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            _replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _replace(temporary: Path, path: Path) -> None:
    """Renames, and tries again after errors that pass."""
    for pause in PAUSES:
        try:
            return os.replace(temporary, path)
        except OSError as error:
            if error.errno not in PASSING:
                raise
            time.sleep(pause)
    os.replace(temporary, path)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Lets errors of the system say which file they are about."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _reason(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return error.strerror or lines[0] if isinstance(error, OSError) else lines[0]
