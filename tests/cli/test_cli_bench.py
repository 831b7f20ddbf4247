"""``hpctrain bench`` as its help describes it: measuring, storing, printing, and the calibration in use."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from support.commands import Terminal
from support.jobs import JobStarter

from hpctrain.cli.bench import BenchProgress
from hpctrain.cli.main import main, make_parser
from hpctrain.comm.device.cuda_aware_probe import ProbeResult
from hpctrain.comm.tuning.table import AlgorithmTable, RankLayout
from hpctrain.train.calibration import Calibration, Measurement, mpi_name, path_of, store_calibration, this_machine

TABLE = AlgorithmTable(RankLayout(4, 1, 4), {("all_reduce", "window", "carried"): ((4096, "mpi"), (inf, "window"))})
TIMES = {"all_reduce/window/carried": {"mpi": {"4": 1e-6, "65536": 4e-5}, "window": {"4": 2e-6, "65536": 1e-5}}}
MEASUREMENT = Measurement(TABLE, TIMES, "2026-01-01T00:00:00+00:00")


@pytest.fixture(autouse=True)
def calibrations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Store the calibrations of these tests in a separate folder."""
    monkeypatch.setenv("HPCTRAIN_CALIBRATION", str(tmp_path / "store"))
    return tmp_path / "store"


@pytest.mark.parametrize(
    "text, sizes",
    [
        ("4", [4]),
        ("4,1K,64K", [4, 1024, 65536]),
        ("1M, 2K,1M", [2048, 2**20]),
        ("4G", [2**32]),
        ("007", [7]),
        ("4\n", [4]),
    ],
)
def test_sizes_are_parsed(text: str, sizes: list[int]) -> None:
    assert make_parser(["bench"]).parse_args(["bench", "calibrate", f"--sizes={text}"]).sizes == sizes


@pytest.mark.parametrize("text", ["", "4,", "-4", "0", "1.5K", "4k", "4KiB", "5G", "9999999999999", "٤", "1e6"])
def test_invalid_sizes_are_one_line_of_error_before_anything_starts(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "calibrate", f"--sizes={text}"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    assert "is not a size from 1 to 4G bytes: write sizes as 4,64K,1M (K is 1024)" in err


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_invalid_seconds_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "calibrate", f"--seconds={text}"]) == 2
    assert "is not a number of seconds above 0" in capsys.readouterr().err


def test_show_without_a_calibration_is_an_error(capsys: pytest.CaptureFixture[str], calibrations: Path) -> None:
    assert main(["bench", "show"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("hpctrain: error: no calibration for ") and f" in {calibrations}/" in err
    assert err.endswith("create one with mpiexec -n 4 hpctrain bench calibrate\n")


def test_show_prints_the_calibration_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    here = this_machine(mpi_name())
    path = path_of(here)
    assert path is not None
    verdict = ProbeResult(False, "the exchange ended with status -11", here.mpi)
    store_calibration(Calibration(here).with_measurement(MEASUREMENT).with_verdict(verdict), path)
    assert main(["bench", "show"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:4] == [f"{path}: in use here", str(here), "", "4 ranks on 1 node, measured 2026-01-01T00:00:00+00:00"]
    assert "all_reduce  window  MPI's own  mpi up to 4 KiB, window above" in said
    assert "all_reduce window MPI's own mpi 1.00 4.00".split() in [line.split() for line in said]
    assert said[-1] == "MPI on GPUs: MPI is not given device pointers: the exchange ended with status -11"
    assert main(["bench", "show", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["in_use"] is True and tree["differences"] == [] and tree["file"] == str(path)
    assert AlgorithmTable.from_json(tree["measurements"][0]["table"]) == TABLE


def test_show_names_the_reason_why_a_file_is_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, path = this_machine(mpi_name()), tmp_path / "site.json"
    store_calibration(Calibration(replace(here, torch="1.0")).with_measurement(MEASUREMENT), path)
    assert main(["bench", "show", str(path)]) == 0
    assert f"{path}: not valid here: torch 1.0 (here {here.torch})" in capsys.readouterr().out
    store_calibration(Calibration(here).with_measurement(MEASUREMENT), path)
    assert main(["bench", "show", str(path)]) == 0
    assert f"{path}: not in use here" in capsys.readouterr().out
    path.write_text("nonsense")
    assert main(["bench", "show", str(path)]) == 2
    assert capsys.readouterr().err == f"hpctrain: error: {path} is damaged: it is not JSON\n"


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere() -> None:
    file, silent, terminal = io.StringIO(), io.StringIO(), Terminal()
    progress = BenchProgress(60.0, shown=True, stream=file)
    for seconds in (1.0, 9.0, 11.0, 15.0, 22.0):
        progress(seconds, "broadcast of 4 B")
    assert file.getvalue().splitlines() == [
        "measured for 11 of 60 s: broadcast of 4 B",
        "measured for 22 of 60 s: broadcast of 4 B",
    ]
    BenchProgress(60.0, shown=False, stream=silent)(30.0, "broadcast of 4 B")
    assert silent.getvalue() == ""
    progress = BenchProgress(60.0, shown=True, stream=terminal)
    progress(30.0, "broadcast of 4 B")
    progress.close()
    assert "of 60 s" in terminal.getvalue()


@pytest.mark.limit(180)
def test_one_process_has_no_algorithm_to_choose(launch: JobStarter, calibrations: Path) -> None:
    done = launch(0, "-m", "hpctrain", "bench", "calibrate", env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done
    assert done.stdout.startswith("1 rank on 1 node; ")
    assert "no choice of algorithms: start the calibration like the later jobs" in done.stdout
    assert "MPI on GPUs: not tried: no GPU is visible" in done.stdout
    assert list(calibrations.iterdir()) == []


JOB = """
import json
import hpctrain
from hpctrain.comm.tuning.measure import layout_of
from hpctrain.train.calibration import stored
job = hpctrain.init(device="cpu")
measured = stored(job.comm).measurements[layout_of(job.comm)]
tables = job.comm.all_gather_object(measured.table)
if job.rank == 0:
    print(json.dumps([table.to_json() for table in tables]))
"""


@pytest.mark.limit(300)
@pytest.mark.benchmark
def test_two_ranks_measure_and_later_jobs_use_the_calibration(launch: JobStarter, calibrations: Path) -> None:
    words = ["--seconds", "3", "--sizes", "4,64K", "--device", "cpu"]
    measured = launch(2, "-m", "hpctrain", "bench", "calibrate", *words, "--json", timeout=120)
    assert measured.returncode == 0, measured
    report: Any = json.loads(measured.stdout)
    (file,) = calibrations.iterdir()
    assert report["kept"] == str(file) and report["table"]["layout"] == {"size": 2, "nodes": 1, "local_size": 2}
    assert {rule.split("/")[0] for rule in report["table"]["rules"]} == {
        "all_reduce",
        "reduce_scatter",
        "reduce",
        "all_gather",
        "broadcast",
    }
    used = launch(2, JOB, timeout=120)
    assert used.returncode == 0, used
    assert json.loads(used.stdout) == [report["table"]] * 2
    shown = launch(0, "-m", "hpctrain", "bench", "show", timeout=120)
    assert f"{file}: in use here" in shown.stdout and "2 ranks on 1 node, measured" in shown.stdout, shown


@pytest.mark.limit(180)
def test_an_output_that_cannot_be_written_is_one_line_of_error(launch: JobStarter, tmp_path: Path) -> None:
    output = tmp_path / "thesis.txt"
    output.write_text("chapter 1")
    words = ["--seconds", "60", "--device", "cpu", "--output", str(output)]
    done = launch(2, "-m", "hpctrain", "bench", "calibrate", *words)
    assert done.returncode == 2 and done.stderr.count("hpctrain: error: ") == 1, done
    assert "thesis.txt is damaged" in done.stderr and output.read_text() == "chapter 1"
