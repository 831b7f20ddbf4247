"""Be ``python -m hpctrain``: the command, where no program of that name is in PATH."""

import sys

from hpctrain.cli.main import main

sys.exit(main())
