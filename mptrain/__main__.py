"""`python -m mptrain` is `mptrain`."""

import sys

from mptrain.cli import main

sys.exit(main())
