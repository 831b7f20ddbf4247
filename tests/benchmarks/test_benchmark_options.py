"""Options of the benchmarks; their Makefile: targets that it lists, programs that it starts, calls that it refuses."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any

import offload
import pytest
from asynchronous_members import GPT
from asynchronous_members import Name as Member
from benchmark_helpers import FOLDER, jobs_of_make, make
from fsdp_step_memory import CANDIDATES
from fsdp_step_memory import Name as Sharded
from harness.run import main
from pipeline_candidates import WORDS
from pipeline_candidates import Name as Pipeline
from support.programs import be_alone

from hpctrain.errors import UsageError

OPERATIONS = ("pingpong", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "overlap")
TARGETS = re.findall(r"^([a-z_-]+): ##", (FOLDER / "Makefile").read_text(), re.M)
BENCHMARKS = set(TARGETS) - {"help", "compare", "claims"}
PROGRAMS = {
    "fsdp-step": "fsdp_step",
    "ddp-step": "ddp_step",
    "plan": "planning",
    "torch-backend": "torch_backend",
    "compile": "compile_step",
    "memory-errors": "memory_errors",
    "dead-ranks": "dead_ranks",
    **dict.fromkeys(OPERATIONS, "communication"),
}


def parse(program: str, words: list[str]) -> Any:
    return importlib.import_module(program).parse(words)


def options_of(target: str, *variables: str) -> Any:
    """Return the parsed options of the last program that a target of the Makefile starts with these variables."""
    _, program, *words = jobs_of_make(target, *variables)[-1]
    return parse(Path(program).stem, words)


@pytest.mark.parametrize(
    "program, words, message",
    [
        ("asynchronous", "--rounds 1", "1 rounds: at least 2 are needed"),
        ("asynchronous", "--task mnist", "no task is called 'mnist': known are digits, gpt"),
        ("asynchronous", "--parts run", "no part is called 'run': known are race, exchange, pace"),
        ("asynchronous", "--without adam", "no member is called 'adam': known are ddp, easgd, easgd-4, easgd-async"),
        ("asynchronous", "--only ddp --without ddp", "every task, part or member is left out"),
        ("checkpoint", "--size 1K", "--size 1K: give one size, at least 1 MiB"),
        ("checkpoint", "--size 1M,2M", "give one size"),
        ("checkpoint", "--size x", "'x' is not a number of bytes"),
        ("checkpoint", "--rounds 0", "0 rounds: at least 1 is needed"),
        ("checkpoint", "--parts wriet", "no part is called 'wriet': known are write, read, background"),
        ("checkpoint", "--without DCP", "no candidate is called 'DCP': known are raw pwrite"),
        ("checkpoint", "--only-write", "--only-write needs --folder"),
        ("communication", "broadcst", "invalid choice: 'broadcst'"),
        ("communication", "all_reduce --sizes 4,x", "'x' is not a number of bytes"),
        ("communication", "all_reduce --sizes ,", "no sizes given"),
        ("communication", "all_reduce --without glo", "no candidate is called 'glo': known are hpctrain"),
        ("communication", "all_reduce --rounds 0", "0 rounds: at least 1 is needed"),
        ("communication", "all_reduce --rounds x", "argument --rounds: invalid int value"),
        ("communication", "all_reduce --dtype complex64", "invalid choice: 'complex64'"),
        ("fits", "--ranks 1", "at least 2 of each are needed"),
        ("fits", "--steps 1", "at least 2 of each are needed"),
        ("fits", "--budget x", "'x' is not a number of bytes"),
        ("forecast", "--without gpt", "no case is called 'gpt': known are mlp ddp on 2, "),
        ("fsdp_step", "--rounds 1", "1 rounds: at least 2 are needed"),
        ("fsdp_step", "--batch 0", "--batch 0: at least 1 sequence is needed"),
        ("fsdp_step", "--memory fsdp", "--memory needs --folder"),
        ("fsdp_step", "--memory fsdp2 --folder x", "no candidate is called 'fsdp2': known are alone, ddp, zero1"),
        ("fsdp_step", f"--without {','.join(CANDIDATES)}", "every candidate is left out"),
        ("offload", "--without gloo", "no candidate is called 'gloo': known are torch, bfloat16"),
        ("pipeline", "--without gloo", "no candidate is called 'gloo': known are alone, naive, gpipe, 1f1b"),
        ("pipeline", f"--without {','.join(WORDS)}", "every candidate is left out"),
        ("planning", "--without gpt", "no case is called 'gpt': known are gpt ddp on 1, "),
        ("planning", "--steps 5", "5 steps: at least 6 are needed"),
        ("tensor", "--rounds 1", "1 rounds: at least 2 are needed"),
        ("torch_backend", "--parts step", "no part is called 'step': known are collectives, steps"),
        ("torch_backend", "--batches 0", "--batches 0: give numbers of sequences, at least 1, as in 1,4"),
        ("torch_backend", "--sizes 4,x", "'x' is not a number of bytes"),
        ("compile_step", "--batch 0", "--batch 0: at least 1 sequence is needed"),
        ("compile_step", "--without fsdp2", "no candidate is called 'fsdp2': known are alone, ddp, zero1, zero2, fsdp"),
        ("torch_backend_start", "--ranks 0", "--ranks 0: at least 1 is needed"),
        ("tensor", "--without gloo", "no candidate is called 'gloo': known are alone, torch-dtensor"),
    ],
)
def test_wrong_options_are_refused(program: str, words: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse(program, words.split())


@pytest.mark.parametrize(
    "program, words, message",
    [
        ("asynchronous", ["--quick"], "asynchronous needs 2 ranks or more, not 1"),
        ("communication", ["broadcast"], "broadcast needs 2 ranks or more, not 1"),
        ("fsdp_step", ["--quick"], "fsdp-step needs 2 ranks or more"),
        ("multinode", [], "at least 2 nodes are needed: make -C benchmarks multinode simulates two"),
        ("pipeline", ["--quick"], "pipeline needs 2 ranks or more, not 1"),
        ("tensor", ["--quick"], "tensor needs 2 ranks or more, not 1"),
        ("compile_step", ["--quick"], "compile needs 2 ranks or more, not 1"),
        ("torch_backend", ["--quick"], "torch-backend needs 2 ranks or more, not 1"),
    ],
)
def test_one_rank_is_refused(
    comm: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    program: str,
    words: list[str],
    message: str,
) -> None:
    be_alone(monkeypatch, comm)
    module = importlib.import_module(program)
    assert main(module.parse, module.run, words) == 2
    assert message in capsys.readouterr().err


def test_sizes_are_parsed_with_their_units() -> None:
    for text in ("512MiB", "512M", "536870912"):
        assert parse("checkpoint", ["--size", text]).size == parse("checkpoint", []).size == 512 * 2**20
    assert parse("fits", ["--budget", "64MiB"]).budget == 64 * 2**20 and parse("fits", []).budget is None


# Makefile -------------------------------------------------------------------------------------------------------------


def test_help_lists_every_benchmark_and_variable() -> None:
    text = (FOLDER / "Makefile").read_text()
    printed = make("help").stdout
    named = set(re.findall(r"^  make (\S+) +[A-Za-z]", printed, re.M))
    assert named >= {*OPERATIONS, "ddp-step", "startup", "checkpoint", "corruption", "compare"}
    assert set(re.findall(r"^([A-Z]+) +\?=", text, re.M)) == set(re.findall(r"^  ([A-Z]+) += ", printed, re.M))


@pytest.mark.parametrize(
    "words, expected",
    [
        ("asynchronous ROUNDS=5 TASK=gpt ONLY=ddp,easgd,hogwild", {"rounds": 5, "task": [GPT]}),
        ("asynchronous ONLY=ddp,easgd,hogwild WITHOUT=hogwild", {"names": [Member.DDP, Member.EASGD]}),
        ("kill KILLS=3 FORM=foreground SEED=4", {"kills": 3, "form": "foreground", "seed": 4}),
        ("dead-ranks KILLS=3 ROUNDS=2 SEED=4 MPI=openmpi", {"kills": 3, "rounds": 2, "seed": 4}),
        (
            "offload ROUNDS=5 WITHOUT=torch,alone",
            {"rounds": 5, "names": [offload.OURS, offload.OURS_16, offload.TORCH_16]},
        ),
        (
            "pipeline ROUNDS=5 WITHOUT=naive,interleaved,torch-gpipe,torch-1f1b,gpipe,1f1b,zb-h1",
            {"rounds": 5, "names": [Pipeline.ALONE, Pipeline.FEW_ONE_F_ONE_B, Pipeline.FEW_ZERO_BUBBLE]},
        ),
        (
            "compile ROUNDS=5 BATCH=2 COMPILER=aot_eager WITHOUT=zero1",
            {"rounds": 5, "batch": 2, "compiler": "aot_eager", "without": ["hpctrain ZeRO-1, compiled"]},
        ),
        ("tensor ROUNDS=5 WITHOUT=alone", {"rounds": 5, "names": ["hpctrain tensor", "torch DTensor + gloo"]}),
    ],
)
def test_variables_become_valid_options(words: str, expected: dict[str, Any]) -> None:
    found = vars(options_of(*words.split(), "NP=3"))
    assert {name: found[name] for name in expected} == expected


def test_torch_backend_on_two_nodes_does_not_start_jobs_of_one_node() -> None:
    assert [line[:2] for line in jobs_of_make("torch-backend")] == [
        ["1", "benchmarks/torch_backend_start.py"],
        ["2", "benchmarks/torch_backend.py"],
    ]
    assert [line[:2] for line in jobs_of_make("torch-backend", "NODES=2", "NP=4")] == [
        ["4", "benchmarks/torch_backend.py"]
    ]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_variables_become_options_of_collectives(operation: str) -> None:
    variables = ["NP=3", "SIZES=4,64K", "ROUNDS=5", "DEVICE=cuda", "DTYPE=bfloat16", "ALGORITHMS=auto,ring"]
    words = jobs_of_make(operation, *variables, "WITHOUT=gloo,hpctrain outside", "MPI=openmpi")[-1]
    assert words[:2] == ["3", "benchmarks/communication.py"]
    args = parse("communication", words[2:])
    assert (args.operation, args.sizes, args.rounds, args.device) == (operation, [4, 65536], 5, "cuda")
    assert (args.dtype, args.algorithms) == ("bfloat16", ["auto", "ring"])
    assert args.without == ["gloo", "hpctrain outside"]


def test_asynchronous_makes_its_data_first() -> None:
    data, job = jobs_of_make("asynchronous", "NP=3")
    assert len(data) == 1 and job[:2] == ["3", "benchmarks/asynchronous.py"]


def test_checkpoint_first_writes_on_other_rank_counts_and_then_measures(tmp_path: Path) -> None:
    variables = ["NP=3", "SIZE=16MiB", "ROUNDS=5", "WITHOUT=torch.save,torch DCP", f"FOLDER={tmp_path}"]
    *before, last = jobs_of_make("checkpoint", *variables)
    assert [line[0] for line in before] == ["1", "2", "4"] and last[0] == "3"
    folders = set()
    for line in (*before, last):
        assert line[1] == "benchmarks/checkpoint.py"
        args = parse("checkpoint", line[2:])
        assert (args.size, args.only_write) == (16 * 2**20, line is not last)
        folders.add(args.folder)
    assert (args.rounds, args.without) == (5, ["torch.save", "torch DCP"])
    (folder,) = folders
    assert folder.parent == tmp_path and not folder.exists()  # deleted again


def test_fsdp_step_measures_memory_in_one_job_per_candidate_and_then_times_all() -> None:
    *weighed, timed = jobs_of_make("fsdp-step", "NP=3", "BATCH=4", "ROUNDS=5", "WITHOUT=alone,torch-fsdp")
    assert all(line[:2] == ["3", "benchmarks/fsdp_step.py"] for line in (*weighed, timed))
    options = [parse("fsdp_step", line[2:]) for line in weighed]
    left = [name for name in Sharded if name not in (Sharded.ALONE, Sharded.TORCH_FSDP)]
    assert [one.names[0] for one in options] == left
    args = parse("fsdp_step", timed[2:])
    assert (args.rounds, args.batch, args.names, args.memory) == (5, 4, left, None)
    assert {one.folder for one in (*options, args)} == {args.folder} and not args.folder.exists()  # deleted again
    (alone,) = jobs_of_make("fsdp-step", f"WITHOUT={','.join(CANDIDATES)}")  # make knows all candidates
    assert alone[2:5:2] == ["--folder", "--without"]


@pytest.mark.parametrize("target", sorted(BENCHMARKS))
def test_every_benchmark_takes_the_folder_of_its_results(target: str, tmp_path: Path) -> None:
    program, *options = jobs_of_make(target, f"OUT={tmp_path}")[-1][1:]
    assert program == f"benchmarks/{PROGRAMS.get(target, target)}.py"
    assert parse(Path(program).stem, options).out == tmp_path
    usual = [word for word in options if word not in ("--out", str(tmp_path))]
    assert parse(Path(program).stem, usual).out == FOLDER / "results"


def test_a_relative_folder_begins_where_the_command_was_typed() -> None:
    words = jobs_of_make("guard", "OUT=my folder")[-1]
    assert words[2:] == ["--out", f"{os.environ['PWD']}/my folder"]


def test_compare_needs_two_results() -> None:
    done = make("compare", "A=old.json")
    assert done.returncode == 2
    assert "make -C benchmarks compare A=old.json B=new.json" in done.stdout


def test_make_collects_every_file_with_benchmark_tests() -> None:
    """make collects only these files, because importing all of them takes long."""
    root = FOLDER.parent
    found = re.search(r"^\t\$\(PYTEST\) (.*) -m benchmark --cases", (root / "Makefile").read_text(), re.M)
    assert found
    places = [root / word for word in found[1].split()]
    marked = [path for path in root.glob("tests/**/test_*.py") if "pytest.mark.benchmark" in path.read_text()]
    assert len(marked) > 5 and all(any(map(path.is_relative_to, places)) for path in marked), marked
