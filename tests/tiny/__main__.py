"""`python tests/tiny ARGUMENTS` is `mptrain ARGUMENTS` with the tests' recipes.

`--modules FILE` as the first of them writes down what was imported.
"""

import atexit
import sys
from pathlib import Path

import install

from mptrain import cli, files

files.folder = install.folder
install.family()
if sys.argv[1:2] == ["--modules"]:
    listing = Path(sys.argv[2])
    del sys.argv[1:3]
    atexit.register(lambda: listing.write_text("\n".join(sys.modules)))
if sys.argv[1:2] == ["reproduce"]:
    from mptrain import reproduce

    reproduce.PROGRAM = [sys.executable, str(Path(__file__).parent)]
sys.exit(cli.main())
