"""Rebuilds the data samples inside the package (mptrain/data/samples) from public packages, named by version.

    python scripts/build_samples.py                  all of them
    python scripts/build_samples.py fashion austen   some of them
    python scripts/build_samples.py --check          rebuild, compare with the committed rows, write nothing

Users never need this: its results are committed. It runs apt-get (after `apt-get update`), dpkg-deb, pip and npm, and
imports, beyond what mptrain needs, `soundfile`, `rdata==1.0.0` (austen) and `resvg-py==0.5.0` (emoji).
"""

import argparse
import sys

from samples.pictures import EMOJI, FASHION, TREES
from samples.words import ASTERISK, AUSTEN, HOMEASSISTANT

SAMPLES = {sample.name: sample for sample in (FASHION, TREES, *HOMEASSISTANT, AUSTEN, ASTERISK, EMOJI)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"samples to build (default: all): {', '.join(SAMPLES)}")
    parser.add_argument("--check", action="store_true", help="compare with the committed files instead of writing")
    options = parser.parse_args()
    if unknown := set(options.names) - set(SAMPLES):
        parser.error(f"no sample named {', '.join(sorted(unknown))}; choose from {', '.join(SAMPLES)}")
    outdated = 0
    for sample in (SAMPLES[name] for name in options.names or SAMPLES):
        if options.check:
            current = sample.is_current()
            outdated += not current
            print(f"{sample.name}: {'same as committed' if current else 'DIFFERS from what is committed'}")
        else:
            rows = sample.write()
            print(f"{sample.name}: {rows} rows, {sample.file.stat().st_size / 1e6:.2f} MB")
    return 1 if outdated else 0


if __name__ == "__main__":
    sys.exit(main())
