"""How each data sample is cut out of the public package it comes from; `scripts/build_samples.py` is the command."""
