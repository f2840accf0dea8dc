"""Imported once by the process from which tests fork."""

import mptrain.train  # noqa: F401
