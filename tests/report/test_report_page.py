"""HTML page of runs: what it contains, its size, what it does with hostile names and incomplete runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.watched_runs import MakeRun

from hpctrain.cli.main import main
from hpctrain.cli.report import sections_of
from hpctrain.report.page import render
from hpctrain.report.runs import ReportedRun, read_runs

MOST = 2_000_000  # bytes of a page
BROWSER = shutil.which("chromium-headless-shell") or shutil.which("chromium")


def page(runs: Sequence[ReportedRun]) -> str:
    return render("a title", sections_of(runs))


class _Texts(HTMLParser):
    """Collector of the texts of cells and headings, and of all addresses that elements name."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.headings: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self._now = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._now = tag
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "data", "action")]
        if tag in ("td", "h2"):
            (self.cells if tag == "td" else self.headings).append("")

    def handle_endtag(self, tag: str) -> None:
        self._now = ""

    def handle_data(self, data: str) -> None:
        if self._now in ("td", "h2"):
            (self.cells if self._now == "td" else self.headings)[-1] += data


def test_a_page_of_one_run_has_every_part(traced: Path) -> None:
    (traced / "config.toml").write_text("[train]\nsteps = 1000\n")
    html = page(read_runs([traced]))
    texts = _Texts(html)
    assert texts.headings == [
        "Runs",
        "Curves",
        "Use of time",
        "Starts, node-hours and energy",
        "Environment",
        "Settings",
    ]
    assert "validation_loss 2.22 in step 150" in texts.cells and "8,192.0 tokens/s" not in texts.cells
    assert "10,240.0 tokens/s" in texts.cells and "train.steps" in texts.cells
    assert len(html) < MOST


def test_a_page_requests_nothing(traced: Path) -> None:
    html = page(read_runs([traced]))
    assert all(address.startswith("#") for address in _Texts(html).addresses)
    assert "default-src 'none'" in html


def test_a_page_of_several_runs_compares_them(make_run: MakeRun) -> None:
    folders = [make_run("small", size=2), make_run("large", size=4, every=0.3, torch="2.13.0")]
    for folder, rate in zip(folders, (1e-3, 3e-3)):
        (folder / "config.toml").write_text(f'[run]\nfolder = "{folder}"\n[optimizer]\nlearning_rate = {rate}\n')
    html = page(read_runs(folders))
    texts = _Texts(html)
    assert "Scaling" in texts.headings and "Different settings" in texts.headings
    assert "Different environments" in texts.headings
    assert {"0.001", "0.003", "small", "large", "1.67", "83%"} <= set(texts.cells)
    assert str(folders[0]) not in texts.cells  # the folder differs anyhow


def test_failures_are_listed(make_run: MakeRun) -> None:
    died = {"ranks": [5], "hosts": ["n7"], "step": 90, "seconds": 0.2, "ranks_left": 7, "repeated_steps": 1}
    slow = {"rank": 3, "host": "n2", "cause": "loader", "first_step": 40, "slow_steps": 9, "seconds_lost": 3.0}
    facts: dict[str, Any] = {"recoveries": [died], "slow_ranks": [slow], "memory_errors": 2, "failed_saves": 1}
    folder = make_run(**facts, status="failed", reason="ValueError: <b>bad</b>", failed_rank=1)
    cells = _Texts(page(read_runs([folder]))).cells
    assert "rank 5 on n7 died in step 90; 7 ranks continued after 0.2 s" in cells
    assert "rank 3 on n2 was slow from step 40 on: loader, 3.0 s lost" in cells
    assert "2 memory errors found and repaired" in cells and "1 checkpoint could not be written" in cells
    assert "failed on rank 1: ValueError: <b>bad</b>" in cells


def test_names_and_values_from_files_are_only_text(make_run: MakeRun) -> None:
    name = "<script>alert(1)</script>$$x$$@{y}\x1b[31m"
    folders = [make_run(name.replace("/", "")), make_run("b")]
    for folder in folders:
        row = {"step": 201, "loss": 1.0, "</script><b>": 2.0, "step_seconds": 0.1, "unix_time": 1.0}
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        (folder / "config.toml").write_text(f'[a]\n"<i>" = "</pre><img src=x {folder.name[:1]}>"\n')
    texts = _Texts(page(read_runs(folders)))
    assert not {"b", "i", "img"} & set(texts.tags) and texts.tags.count("script") == 3
    assert "<script>alert(1)<script>$$x$$@{y}\\x1b[31m" in texts.cells


def test_a_run_that_has_made_no_step_has_a_page(make_run: MakeRun) -> None:
    folder = make_run(steps=0)
    (folder / "metrics.jsonl").unlink()
    assert "Curves" not in _Texts(page(read_runs([folder]))).headings


def test_two_hundred_runs_fit_into_a_page(make_run: MakeRun) -> None:
    assert len(page(read_runs([make_run(f"run{number}", 300) for number in range(200)]))) < MOST


# Command line ---------------------------------------------------------------------------------------------------------


def test_the_page_is_written_into_the_folder_of_the_run(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run()
    assert main(["report", str(folder)]) == 0
    size = (folder / "report.html").stat().st_size
    assert capsys.readouterr().out.startswith(f"wrote {folder / 'report.html'}, {size / 2**20:.2f} MiB")


def test_all_runs_below_a_folder_are_in_the_page(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a"), make_run("b")
    assert main(["report", str(tmp_path)]) == 0
    assert "<title>2 runs" in (tmp_path / "report.html").read_text()


def test_a_run_that_cannot_be_read_is_left_out(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run("a"), make_run("b"), make_run("damaged")
    (tmp_path / "damaged" / "run.json").write_text("{")
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("warning: left out: ") and "damaged" in said
    assert "<title>2 runs" in (tmp_path / "report.html").read_text()
    for name in ("a", "b"):
        (tmp_path / name / "run.json").write_text("{")
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "none.html")]) == 2
    assert "no run can be read" in capsys.readouterr().err and not (tmp_path / "none.html").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["RUN", "-o", "a.pdf"], "the name must end in .html"),
        (["RUN", "-o", "nowhere/a.html"], "cannot write nowhere/a.html"),
        (["nothing"], "nothing does not exist; name the folder of a run"),
        (["RUN/run.json"], "run.json is a file"),
        (["RUN", "--to", "csv", "-o", "a.html"], "must end in .csv"),
    ],
)
def test_wrong_input_is_one_line(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    folder = make_run()
    assert main(["report", *(word.replace("RUN", str(folder)) for word in arguments)]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


# Browser --------------------------------------------------------------------------------------------------------------

# A script that writes into the page: figures drawn when it is idle, and addresses requested.
PROBE = """<script>setTimeout(() => {
  const seen = {idle: Bokeh.documents.every((one) => one.is_idle), figures: Object.keys(Bokeh.index.roots).length,
    requests: performance.getEntriesByType("resource").map((one) => one.name),
    sizes: Array.from(document.querySelectorAll("section .figure")).map((one) => one.getBoundingClientRect().height)};
  const said = document.createElement("pre"); said.id = "seen"; said.textContent = JSON.stringify(seen);
  document.body.append(said);
}, 5000)</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="needs chromium-headless-shell, or chromium")
def test_a_browser_without_network_draws_every_figure(traced: Path) -> None:
    html = page(read_runs([traced]))
    probed, picture = traced / "probed.html", traced / "page.png"
    probed.write_text(html.replace("</body>", PROBE))
    done = _browse(probed, "--dump-dom")
    seen = json.loads(re.findall(r'<pre id="seen">(.*?)</pre>', done.stdout)[0])
    assert seen["idle"] and not seen["requests"]
    assert len(seen["sizes"]) == html.count('class="figure"') >= 8 and min(seen["sizes"]) > 100
    assert not re.findall(r"CONSOLE.*(?:error|refused|exception)", done.stderr, re.IGNORECASE)
    _browse(probed, f"--screenshot={picture}", "--window-size=1100,2400", "--hide-scrollbars")
    assert {"#0072b2", "#d55e00", "#009e73", "#56b4e9"} <= _colours(picture)


def _browse(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    fixed = ["--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=20000"]
    command = [BROWSER, *fixed, f"--user-data-dir={path.parent / 'browser'}", *options, path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def _colours(picture: Path) -> set[str]:
    """Return the colours of at least a thousandth of the picture."""
    import numpy as np
    from matplotlib.image import imread

    pixels = (imread(picture)[..., :3] * 255).round().astype(np.uint32).reshape(-1, 3)
    codes, counts = np.unique(pixels @ np.array([65536, 256, 1], np.uint32), return_counts=True)
    return {f"#{code:06x}" for code, count in zip(codes, counts) if count >= len(pixels) / 1000}
