"""Verb ``hpctrain docs``: shows the pages of the documentation, which come with the package, in the terminal."""

from __future__ import annotations

import argparse
import difflib
import json
import pydoc
import shutil
import sys
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from hpctrain.cli.main import add_verb
from hpctrain.errors import UsageError
from hpctrain.util.text import columns, printable, printable_lines

_EPILOG = """\
examples:
  hpctrain docs                     the pages, with their titles
  hpctrain docs settings            every setting with its default
  hpctrain docs --search walltime   lines of all pages that contain a text
"""
_LONGEST = 100  # columns of a page on a wider terminal


def add_parser(verbs: Any) -> None:
    what = "Show a page of the documentation in the terminal, or list the pages."
    parser = add_verb(verbs, "docs", what, _EPILOG)
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help="page to show (default: list them)")
    parser.add_argument("--search", metavar="TEXT", help="show the lines that contain a text, in capitals or not")
    parser.add_argument("--json", action="store_true", help="print JSON: the pages and their titles, or the lines")


def run(args: argparse.Namespace) -> int:
    """Print the list of pages, a page, or the lines that contain a text; return the exit code."""
    found = pages()
    if args.search is not None:
        return _search(found, args.search, args.topic, as_json=args.json)
    if args.topic is None:
        titles = {name: title_of(page) for name, page in found.items()}
        text = printable_lines("\n".join(columns(sorted(titles.items()))))
        print(json.dumps(titles, indent=1) if args.json else text)
        return 0
    if args.json:
        raise UsageError("--json lists the pages, or the lines of --search; leave out the topic")
    _show(_page(found, args.topic))
    return 0


def pages() -> dict[str, Traversable]:
    """Return the pages by name. Raises ``UsageError`` if this installation has none."""
    folder = resources.files("hpctrain") / "docs"
    found = [page for page in folder.iterdir() if page.name.endswith(".md")] if folder.is_dir() else []
    if not found:
        raise UsageError(f"this installation has no pages of documentation in {folder}; install hpctrain again")
    return {page.name.removesuffix(".md"): page for page in sorted(found, key=lambda page: page.name)}


def title_of(page: Traversable) -> str:
    """Return the first heading of a page."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return next((line.lstrip("# ").strip() for line in lines if line.startswith("#")), page.name)


def _page(found: dict[str, Traversable], topic: str) -> str:
    name = topic.removeprefix("docs/").removesuffix(".md").lower()
    if name not in found:
        near = [each for each in found if name and name in each] or difflib.get_close_matches(name, found)
        if len(near) != 1:
            advice = f"did you mean {', '.join(near[:5])}?" if near else "hpctrain docs lists them"
            raise UsageError(f"no page {printable(topic)}: {advice}")
        name = near[0]
    return found[name].read_text(encoding="utf-8")


def _search(found: dict[str, Traversable], text: str, topic: str | None, *, as_json: bool) -> int:
    if topic is not None:
        raise UsageError("--search looks through all pages; leave out the topic")
    hits = [
        (name, number, line.strip())
        for name, page in found.items()
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if text.lower() in line.lower()
    ]
    if as_json:
        print(json.dumps([{"page": name, "line": number, "text": line} for name, number, line in hits], indent=1))
    elif hits:
        print(printable_lines("\n".join(f"{name}:{number}: {line}" for name, number, line in hits)))
    else:
        print(f"no page contains {printable(text)}", file=sys.stderr)
    return 0 if hits else 1


def _show(text: str) -> None:
    """Print a page: on a terminal formatted and by pages, else as it is."""
    if not sys.stdout.isatty():
        sys.stdout.write(text)
        return
    try:
        from rich.console import Console
        from rich.markdown import Markdown
    except ImportError:  # an extra of the package
        pydoc.pager(text)
        return
    width = min(shutil.get_terminal_size((_LONGEST, 24)).columns, _LONGEST)
    console = Console(width=width, force_terminal=True)
    with console.capture() as captured:
        console.print(Markdown(text))
    pydoc.pager(captured.get())
