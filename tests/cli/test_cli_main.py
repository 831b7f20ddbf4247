"""The command line as a whole: verbs, help, and one line of error per mistake."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import parsers

from hpctrain import __version__
from hpctrain.cli.main import VERBS, main, make_parser, with_reports
from hpctrain.cluster.launcher import without_launcher
from hpctrain.errors import DataError

ROOT = Path(__file__).resolve().parents[2]


def test_help_lists_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(verb in said and text in said for verb, text in VERBS.items())


COMMANDS = {each.prog: each for each in parsers()}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_verb_and_action_has_help_with_examples_that_can_be_typed(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*name.split()[1:], "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and f"usage: {name}" in said
    _, _, examples = said.partition("\nexamples:\n")
    typed = [line.strip() for line in examples.partition("\n\n")[0].splitlines()]
    found = [re.split(r" {2,}", line[line.index("hpctrain ") :])[0] for line in typed]
    assert found and all(f"{line} ".startswith(f"{name} ") for line in found)
    for line in found:
        words = shlex.split(line.partition(" && ")[0])[1:]
        make_parser(words).parse_args(words)


def test_version_is_printed_and_no_verb_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"hpctrain {__version__}\n"
    assert main([]) == 2 and "usage: hpctrain" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, said",
    [
        (["trian"], "invalid choice: 'trian': did you mean train? (see hpctrain --help)"),
        (["xyz"], "invalid choice: 'xyz' (choose from "),
        (["train"], "CONFIG.toml is missing: the settings of the run"),
        (["train", "a.toml", "--fast"], "unrecognized arguments: --fast"),
        (["checkpoint"], "see hpctrain checkpoint --help"),
    ],
)
def test_invalid_words_are_one_line_of_error(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("hpctrain: error: ") and said in err and err.count("\n") == 1


def test_invalid_words_on_another_rank_are_reported_if_rank_0_is_silent() -> None:
    """A rank prints nothing if its launcher ends it within the second that it waits for rank 0."""
    environ = {**without_launcher(), "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    for end, lines in (("", 1), ("from hpctrain.train.control import stop_request; stop_request.signal = 15;", 0)):
        code = f"import sys; {end} from hpctrain.cli.main import main; sys.exit(main(['trian']))"
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=30)
        assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == lines, done
        assert lines == 0 or done.stderr.startswith("hpctrain: error: rank 1 on "), done


def raising(error: BaseException) -> Callable[[], int]:
    def call() -> int:
        raise error

    return call


def test_an_HpctrainError_is_one_line_and_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert with_reports(raising(DataError("no such thing")), ["data", "show", "x"]) == 2
    assert capsys.readouterr() == ("", "hpctrain: error: no such thing\n")


def test_an_interrupt_is_one_line_and_a_bug_has_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert with_reports(raising(KeyboardInterrupt()), ["data"]) == 130
    assert capsys.readouterr().err == "hpctrain: interrupted\n"
    with pytest.raises(ZeroDivisionError):  # with its traceback, for the developers
        with_reports(raising(ZeroDivisionError("a bug")), ["data"])


def test_a_closed_pipe_causes_no_traceback() -> None:
    call = f"{sys.executable} -c 'import sys; from hpctrain.cli.main import main; sys.exit(main())' --help | true"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", call], capture_output=True, text=True, timeout=30)
    assert "Traceback" not in result.stderr


def test_the_command_starts_without_torch_and_mpi() -> None:
    code = "import sys; from hpctrain.cli.main import make_parser; make_parser(['train', 'x'])"
    check = "; assert not {'torch', 'mpi4py', 'h5py', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code + check], check=True, timeout=30)


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "calibrate", "--sizes", "x"],
        ["job", "profiles"],
        ["job", "slurm", str(ROOT / "jobs/gpt-tiny.toml"), "--time", "04:00:00", "--profile", "lumi"],
        ["submit", "slurm"],
        ["modulefile", "lua", "--root", "/a"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_verbs_of_a_login_node_load_no_libraries(words: list[str]) -> None:
    code = "import sys; from hpctrain.cli.main import main; main(sys.argv[1:])"
    check = "; assert not {'torch', 'mpi4py', 'h5py', 'numpy', 'tqdm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code + check, *words], check=True, capture_output=True, timeout=60)
