"""Figures: the error without matplotlib, names of pictures, and atomic files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpctrain.errors import UsageError
from hpctrain.util.plotting import check_suffix, new_figure, save_figure


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"drawing needs matplotlib: pip install 'hpctrain\[plot\]'"):
        new_figure(4, 3)


def test_names_of_other_kinds_are_refused() -> None:
    check_suffix(Path("a.svg"))
    with pytest.raises(UsageError, match="cannot draw a.gif: its name must end in .png, .svg, .pdf"):
        check_suffix(Path("a.gif"))


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_figures_are_written_in_the_format_of_their_suffix(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("matplotlib")
    save_figure(new_figure(1, 1), tmp_path / f"a.{kind}")
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[kind]
    assert (tmp_path / f"a.{kind}").read_bytes().startswith(start)
    assert [path.name for path in tmp_path.iterdir()] == [f"a.{kind}"]


def test_a_figure_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(UsageError, match="cannot write .*a.svg: No such file or directory"):
        save_figure(new_figure(1, 1), tmp_path / "gone" / "a.svg")
