"""Entry point of ``python -m hpctrain``: the command, if its script is not in PATH."""

import sys

from hpctrain.cli.main import main

sys.exit(main())
