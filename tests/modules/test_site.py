"""``make site``: every page is there and reachable, links have targets, nothing is requested from outside."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.dist, pytest.mark.limit(400)]
NOT_SHOWN = {"docs/index.md"}


class _Page(HTMLParser):
    """Links, anchors and requested files of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.requested: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if "src" in found or (tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload")):
            self.requested.append(found.get("src") or found.get("href", ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, _Page]:
    """Return the pages of the site by their paths."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", ROOT / "docs", ROOT, folder / "out"]
    done = subprocess.run([*map(str, command), "-d", str(folder / "trees")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {path: _Page(path.read_text(encoding="utf-8")) for path in sorted((folder / "out").rglob("*.html"))}


def test_every_page_is_reachable_from_the_first(site: dict[Path, _Page]) -> None:
    (first,) = (path for path in site if path.match("docs/index.html"))
    root = first.parents[1]
    waiting, seen = [first], set()
    while waiting:
        path = waiting.pop()
        if path in seen or path not in site:
            continue
        seen.add(path)
        links = (urlsplit(link).path for link in site[path].links if not urlsplit(link).scheme)
        waiting += [(path.parent / unquote(link)).resolve() for link in links if link]
    written = [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md"), ROOT / "benchmarks/README.md"]
    expected = {(root / path.relative_to(ROOT)).with_suffix(".html") for path in written}
    assert expected <= seen


def test_links_have_targets_and_nothing_is_requested_from_outside(site: dict[Path, _Page]) -> None:
    wrong = []
    for path, page in site.items():
        assert not [address for address in page.requested if urlsplit(address).scheme not in ("", "data")], path
        for link in [*page.links, *page.requested]:
            parts = urlsplit(link)
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if parts.scheme or link == "#":
                continue
            if not there.exists() or (parts.fragment and there in site and parts.fragment not in site[there].anchors):
                wrong.append((path.name, link))
    assert not wrong


def test_the_reference_has_the_public_names(site: dict[Path, _Page]) -> None:
    (reference,) = (page for path, page in site.items() if path.match("docs/reference.html"))
    for name in (
        "hpctrain.init",
        "hpctrain.train.job.Job.wrap",
        "hpctrain.train.run.Run.log",
        "hpctrain.checkpoint.load",
    ):
        assert name in reference.anchors
    collectives = [each for each in reference.anchors if re.search(r"Communicator\.all_reduce$", each)]
    assert collectives, "inherited methods too"
