"""Keep the words behind ``--`` for the program that a job runs: they are not this command's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from hpctrain.cli.main import Parser


class WordsParser(Parser):
    """Be a parser whose arguments end at ``--``; what stands behind it comes into ``words``."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore
        """Parse what stands before ``--``."""
        given = list(sys.argv[1:] if args is None else args)
        own = given[: given.index("--")] if "--" in given else given
        found, unknown = super().parse_known_args(own, namespace)
        found.words = given[len(own) + 1 :]
        return found, unknown
