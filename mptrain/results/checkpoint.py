"""Checkpoints: plain tensors and containers, written whole or not at all, the last two kept.

Beside each file lies its SHA-256, since a file cut short or with one bit flipped may still load; a
bad one is passed over, with a notice, for the one before.
"""

from __future__ import annotations

import hashlib
import io
import re
from pathlib import Path
from typing import Any

import torch

from mptrain.results.record import write_atomically

_NAME = re.compile(r"step-(\d+)\.pt$")
KEPT = 2


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Writes step-<step>.pt and drops all but the last two."""
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:08d}.pt"
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    write_atomically(folder / f"{path.name}.sha256", hashlib.sha256(content).hexdigest() + "\n")
    write_atomically(path, content)
    for old in listed(folder)[:-KEPT]:
        old.unlink(missing_ok=True)
        Path(f"{old}.sha256").unlink(missing_ok=True)
    return path


def listed(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    found = [(int(m[1]), path) for path in folder.glob("step-*.pt") if (m := _NAME.match(path.name))]
    return [path for _, path in sorted(found)]


def load(path: Path) -> dict[str, Any]:
    """One checkpoint, on the CPU; raises ValueError if it is damaged, OSError if it cannot be read at all."""
    try:
        content = path.read_bytes()
        checksum = Path(f"{path}.sha256").read_text(encoding="utf-8").strip()
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"{path.name} cannot be read ({error})") from error
    if hashlib.sha256(content).hexdigest() != checksum:
        raise ValueError(f"{path.name} is damaged (its checksum differs)")
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch's reader raises whatever its parsing runs into
        raise ValueError(f"{path.name} is no checkpoint ({type(error).__name__})") from error
    if not isinstance(state, dict):
        raise ValueError(f"{path.name} is no checkpoint")
    return state


def load_latest(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest checkpoint that is whole, and what was passed over on the way to it."""
    notices: list[str] = []
    for path in reversed(listed(folder)):
        try:
            return load(path), notices
        except ValueError as error:
            notices.append(str(error))
    return None, notices
