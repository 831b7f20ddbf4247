"""Arguments after ``--``, which are passed to the program that a job runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from hpctrain.cli.main import Parser


class WordsParser(Parser):
    """Parser whose own arguments end at ``--``; the words after it are stored in ``words``."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore
        """Parse the arguments before ``--``."""
        given = list(sys.argv[1:] if args is None else args)
        own = given[: given.index("--")] if "--" in given else given
        found, unknown = super().parse_known_args(own, namespace)
        found.words = given[len(own) + 1 :]
        return found, unknown
