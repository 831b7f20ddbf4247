"""Comparison of folders with results of benchmarks: of two versions, two allocations, or single nodes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.util.reading import read_json, read_text, reason
from hpctrain.util.text import columns, counted

TOLERANCE = 0.1  # share by which medians of equal machines may differ
Key = tuple[str, str, str, str]  # file, group, candidate, size
_MEMBERS = ("machine", "processor", "commit", "date")


@dataclass(frozen=True)
class Spread:
    """Median of a figure over its repeats, with the ends of its spread."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Folder:
    """Results of one folder: their figures, targets, and where and when they were measured."""

    path: Path
    figures: Mapping[Key, Spread]
    targets: Sequence[tuple[str, Mapping[str, Any]]]
    provenance: Mapping[str, Any]


@dataclass(frozen=True)
class Compared:
    """Figure in several folders, each compared with the first."""

    key: Key
    spreads: tuple[Spread, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(one.median / self.spreads[0].median if self.spreads[0].median else 1.0 for one in self.spreads)

    def verdicts(self, tolerance: float) -> tuple[str, ...]:
        """Return for each folder whether the figure differs by more than the tolerance, and the spreads do not meet."""
        first, found = self.spreads[0], []
        for one, ratio in zip(self.spreads, self.ratios):
            apart = one.low > first.high or one.high < first.low
            other = ratio > 1 + tolerance or ratio < 1 / (1 + tolerance)
            found.append("" if not (apart and other) else "longer" if ratio > 1 else "shorter")
        return tuple(found)


def read_folder(path: Path) -> Folder:
    """Return the results of a folder, or of one file. Raises ``UsageError`` if there are none, or one is unreadable."""
    files = [path] if path.is_file() else sorted(path.glob("*.json"))
    figures: dict[Key, Spread] = {}
    targets: list[tuple[str, Mapping[str, Any]]] = []
    provenance: Mapping[str, Any] = {}
    for file in files:
        try:
            content: Any = read_json(file)
            if not isinstance(content, dict) or "provenance" not in content:
                continue
            provenance = content["provenance"]
            targets += [(file.stem, each) for each in content.get("targets", ())]
            figures |= _figures(file)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UsageError(f"cannot read {file} as the result of a benchmark: {reason(error)}") from error
    if not figures and path.is_file():
        raise UsageError(f"{path} is not the result of a benchmark: give a folder that hpctrain bench has written")
    if not figures:
        raise UsageError(f"{path} has no results of benchmarks: hpctrain bench all_reduce --out {path} writes one")
    return Folder(path, figures, targets, provenance)


def _figures(file: Path) -> dict[Key, Spread]:
    table = file.with_suffix(".csv")
    if not table.is_file():
        return {}
    found = {}
    for row in csv.DictReader(io.StringIO(read_text(table))):
        median = float(row["median"])
        ends = [float(row[name]) if row[name] else median for name in ("low", "high")]
        found[file.stem, row["group"], row["candidate"], row["size"]] = Spread(median, *ends)
    return found


def compare(folders: Sequence[Folder]) -> list[Compared]:
    """Return the figures that all folders have. Raises ``UsageError`` if there are none."""
    first, *others = (folder.figures for folder in folders)
    common = [key for key in first if all(key in other for other in others)]
    if not common:
        raise UsageError(f"{', '.join(str(folder.path) for folder in folders)} have no figure in common")
    return [Compared(key, tuple(folder.figures[key] for folder in folders)) for key in common]


# Text, JSON and CSV ---------------------------------------------------------------------------------------------------


def lines_of(folders: Sequence[Folder], tolerance: float, *, everything: bool) -> list[str]:
    """Return the report as lines: of one folder its targets and figures, of several the figures that differ."""
    lines = []
    for folder in folders:
        facts = [str(folder.provenance[name]) for name in _MEMBERS if folder.provenance.get(name)]
        if load := folder.provenance.get("load_before"):
            facts.append(f"load before it {load[0] if isinstance(load, list) else load}")
        lines.append(f"{folder.path}: {', '.join(facts)}")
    if len(folders) == 1:
        rows = [["benchmark", "target", "measured", "wanted", ""]]
        for name, target in folders[0].targets:
            value = f"{float(target['value']):.3g}"
            rows.append([name, str(target["what"]), value, str(target["wanted"]), "" if target["met"] else "missed"])
        lines += ["", *columns(rows, right=(2, 3))] if len(rows) > 1 else []
        everything = True
    compared = compare(folders)
    shown = [each for each in compared if everything or any(each.verdicts(tolerance))]
    titles = [folder.path.name for folder in folders]
    titles = titles if len(set(titles)) == len(titles) else [str(folder.path) for folder in folders]
    head = ["benchmark", "candidate", "size", *titles]
    rows = [[*head, *(f"{title} / {titles[0]}" for title in titles[1:]), ""]]
    for each in shown:
        name, group, candidate, size = each.key
        what = f"{name} {group}" if group not in ("rows", "seconds") else name
        ratios = [f"{ratio:.2f}" for ratio in each.ratios[1:]]
        medians = [f"{one.median:.3g}" for one in each.spreads]
        rows.append([what, candidate, size, *medians, *ratios, " ".join(filter(None, each.verdicts(tolerance)))])
    if shown:
        lines += ["", "Medians, times in seconds:", *columns(rows, right=range(2, len(rows[0]) - 1))]
    if len(folders) > 1:
        other = sum(any(each.verdicts(tolerance)) for each in compared)
        lines += [
            "",
            f"{other} of {counted(len(compared), 'figure')} differ by more than {tolerance:.0%}, beyond spread",
        ]
    return lines


def json_of(folders: Sequence[Folder], tolerance: float) -> str:
    rows = [
        {
            **dict(zip(("file", "group", "candidate", "size"), each.key)),
            "medians": [one.median for one in each.spreads],
            "ratios": each.ratios,
            "verdicts": each.verdicts(tolerance),
        }
        for each in compare(folders)
    ]
    heads = [{"folder": str(folder.path), "provenance": folder.provenance} for folder in folders]
    return json.dumps({"folders": heads, "tolerance": tolerance, "figures": rows}, indent=1)


def csv_of(folders: Sequence[Folder]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [str(folder.path) for folder in folders]
    writer.writerow(["file", "group", "candidate", "size", *names])
    writer.writerows([*each.key, *(one.median for one in each.spreads)] for each in compare(folders))
    return text.getvalue()
