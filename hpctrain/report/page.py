"""HTML page of a report in one file, which a browser shows without a network."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from bokeh.embed import components
from bokeh.resources import Resources
from jinja2 import Environment

from hpctrain._version import __version__
from hpctrain.util import atomic


@dataclass
class Table:
    """Rows of a table; the first cell of each names it."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass
class Section:
    """Part of the page: a heading, sentences, figures of Bokeh, tables, and text with fixed columns."""

    title: str
    about: str = ""
    lines: list[str] = field(default_factory=list)
    figures: list[Any] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    columns: str = ""
    closed: bool = False  # shown after a click
    small: bool = False  # figures beside each other


def write_page(title: str, sections: Sequence[Section], path: Path) -> int:
    """Write the page, atomically; return its size in bytes. Raises ``OSError`` if this fails."""
    content = render(title, sections).encode()
    with atomic.replacing(path) as file:
        file.write(content)
    return len(content)


def render(title: str, sections: Sequence[Section]) -> str:
    """Return the page as HTML; all texts are escaped."""
    drawn = [each for section in sections for each in section.figures]
    script, divisions = components(tuple(drawn), wrap_script=False) if drawn else ("", ())
    bokeh = Resources(mode="inline", components=["bokeh"])
    source = resources.files("hpctrain.report").joinpath("page.html").read_text(encoding="utf-8")
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    return template.render(
        title=title,
        made=time.strftime("%Y-%m-%d %H:%M:%S"),
        version=__version__,
        sections=sections,
        figures=iter(divisions),
        bokeh=bokeh.js_raw if drawn else [],
        script=script,
        next=next,
    )
