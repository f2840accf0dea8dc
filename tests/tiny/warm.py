"""Imported once by the process from which tests fork: whatever a first run imports is there."""

import tempfile
from pathlib import Path

from tiny import install, runs

from mptrain import files
from mptrain.train import train

files.folder = install.folder
install.family()
with tempfile.TemporaryDirectory() as folder:
    for precision in ("fp32", "fp16", "fp16_master"):
        train(runs.settings("tiny", precision, out=str(Path(folder) / precision)))
