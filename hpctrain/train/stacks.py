"""Stack dump of all threads of this process, in one write, so that the output of several ranks does not mix."""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile


def print_stacks(whose: str) -> None:
    """Write the stacks of all threads to standard error, under a heading that contains ``whose``."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    sys.stderr.flush()
    os.write(2, f"hpctrain: the stacks of {whose}:\n".encode() + text)
