"""Examples of the pages in docs/: every command is accepted by the command line, every program runs on two ranks.

Guides and pages whose programs are whole have tests of their own, which compare results as well.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cli.main import make_parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_ENDS = ("|", "&&", "||", ";", ">", "2>&1", "&", "...", "…")


def commands(text: str) -> Iterator[str]:
    """Yield the lines of a page's indented and fenced blocks that call ``hpctrain``, from there on."""
    text = re.sub(r"\\\n\s*", "", text)
    blocks = re.findall(r"^```(?:bash|sh|console)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"^    (\S.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    for line in lines:
        found = re.match(
            r"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\w+=\$\()?(?:(?:srun|mpiexec|mpirun)[^|]* )?(hpctrain [a-z].*)", line
        )
        if found:
            yield found[1]


def words_of(command: str) -> list[str]:
    """Return the words after ``hpctrain``, up to the end of the command."""
    command = re.sub(r"\$\([^()]*\)", "VALUE", command).removesuffix(")")
    command = re.sub(r"(\S*)\{(\w+),(\w+)\}(\S*)", r"\1\2\4 \1\3\4", command)
    words = shlex.split(command, comments=True)[1:]
    ends = [words.index(end) for end in _ENDS if end in words]
    return words[: min(ends, default=len(words))]


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_commands_are_accepted(page: Path) -> None:
    for command in commands(page.read_text()):
        words = words_of(command)
        try:
            make_parser(words).parse_args(words)
        except SystemExit as ended:
            assert ended.code == 0, command
        except Exception as error:
            raise AssertionError(f"{command}: {error}") from error


def test_wrong_commands_are_found() -> None:
    text = "```bash\nstaged=$(srun -n 2 hpctrain stage copy --data a.h5)\n```\n\n    $ hpctrain nonsense $(a b)\n"
    text += "    mpiexec -n 2 \\\n        hpctrain train a{1,2}.toml --set x.y=1 # why\n"
    assert list(map(words_of, commands(text))) == [
        ["stage", "copy", "--data", "a.h5"],
        ["nonsense", "VALUE"],
        ["train", "a1.toml", "a2.toml", "--set", "x.y=1"],
    ]


# Programs -------------------------------------------------------------------------------------------------------------

PRELUDE = """
import torch, hpctrain
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from hpctrain import OffloadSettings, ParallelSettings
from hpctrain.models.gpt import GPT
from hpctrain.models.settings import GPTConfig

torch.manual_seed(0)
loss_of = cross_entropy
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
loader = DataLoader(TensorDataset(torch.randn(32, 8), torch.randint(0, 4, (32,))), 8)
tokens = torch.randint(0, 32, (8, 8))


def MyModel():
    return GPT(GPTConfig(layers=4, heads=4, width=16, context=8, vocab_size=32))


class MyLoader(list):
    def __init__(self, rank, size):
        super().__init__([(tokens, tokens)] * 2)
"""
WRAPPED = """
job = hpctrain.init()
job.wrap(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
TOWERS = """
job = hpctrain.init()
towers = nn.ModuleList([nn.Linear(8, 6), nn.Linear(8, 6)])
batch, scale = torch.randn(ROWS, 8), 1.0
model = lambda batch: tuple(tower(batch) for tower in towers)
"""
WEIGHTED = """
images, texts = model(batch)
strategy, model = None, nn.Linear(1, 1)
job.wrap(model)
"""
H5 = """
job = hpctrain.init()
import h5py
if job.rank == 0:
    with h5py.File("step_00001200.h5", "w") as file:
        file["/model/head.weight"] = [1, 2]
        file["/model/head.weight"].attrs["torch_dtype"] = b"float32"
job.comm.barrier()
"""
CORPUS = """
job = hpctrain.init()
import h5py
if job.rank == 0:
    with h5py.File("corpus.h5", "w") as file:
        file["tokens"] = [1, 2]
job.comm.barrier()
"""
JETS = """
import numpy as np
from hpctrain.data import write_ragged
job = hpctrain.init()
if job.rank == 0:
    made = [{"points": np.ones((1 + n % 7, 3), np.float32), "label": n % 2, "name": str(n)} for n in range(200)]
    write_ragged("jets.h5", train=made)
job.comm.barrier()
"""
SHARDS = """
import io, json, os, struct, tarfile
import numpy as np
from PIL import Image
job = hpctrain.init()
if job.rank == 0:
    os.makedirs("shards")
    for number in range(24):
        image = io.BytesIO()
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(image, "JPEG")
        with tarfile.open(f"shards/train-{number // 8:03d}.tar", "a") as archive:
            for name, data in {"jpg": image.getvalue(), "cls": b"%d" % (number % 10), "txt": b"x" * number}.items():
                info = tarfile.TarInfo(f"{number:04d}.{name}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    os.makedirs("mds/train")
    columns = {"column_names": ["label", "tokens"], "column_encodings": ["int", "ndarray:int32:6"]}
    ends = [28 + 32 * number for number in range(6)]
    data = struct.pack("<7I", 5, *ends) + b"".join(struct.pack("<q6i", n, *[n] * 6) for n in range(5))
    with open("mds/train/shard.00000.mds", "wb") as file:
        file.write(data)
    raw = {"basename": "shard.00000.mds", "bytes": len(data), "hashes": {}}
    entry = {**columns, "column_sizes": [8, 24], "format": "mds", "version": 2, "samples": 5, "raw_data": raw}
    with open("mds/train/index.json", "w") as file:
        json.dump({"version": 2, "shards": [entry]}, file)
job.comm.barrier()
"""
TENSOR = """
job = hpctrain.init()
comm, x = job.comm, torch.randn(2, 512)
model = nn.Module()
model.fc = nn.Linear(8, 16)
"""
APPLY = """
from hpctrain.parallel.tensor.plan import apply
job = hpctrain.init()
comm = job.comm
model = nn.Sequential()
model.mlp, model.head = nn.Sequential(), nn.Linear(8, 32)
model.mlp.fc, model.mlp.project = nn.Linear(8, 16), nn.Linear(16, 8)
tokens, targets = torch.randn(4, 8), torch.randint(0, 32, (4,))
"""
STEP = "model(torch.randn(4, 8)).sum().backward()\noptimizer.step()\n"
INDENTED = """
    for step, (inputs, targets) in run:
        cross_entropy(model(inputs), targets).backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
"""
# Code before and after each program of a page: pages begin where their text has come to. None: run elsewhere.
AROUND: dict[str, list[tuple[str, str] | None]] = {
    "asynchronous.md": [
        ("job = hpctrain.init()\n", ""),
        ("", ""),
        ("job = hpctrain.init()\njob.wrap(model, 'easgd')\n", ""),
        (WRAPPED + "best = model.state_dict()\n", ""),
    ],
    "checkpoint-format.md": [(H5, "assert array.tolist() == [1, 2]\n")],
    "communication.md": [
        ("job = hpctrain.init()\n", "assert bool((buffer == buffer[0]).all())\n"),
        ("job = hpctrain.init()\n", ""),
        (
            "job = hpctrain.init()\nloss, tokens, seed = torch.ones(1), torch.ones(1).long(), torch.ones(1)\n",
            "",
        ),
        (TOWERS.replace("ROWS", "3"), "assert towers[0].weight.grad is not None\n"),
        (TOWERS.replace("ROWS", "3 + job.rank") + WEIGHTED, "assert len(all_images) == 7\n"),
    ],
    "data-sets.md": [("", "assert len(open('jets.h5', 'rb').read()) > 1000\n"), (JETS, "assert step == 26\n")],
    "dead-ranks.md": [None],  # needs MPI with fault tolerance: tests/train/test_shrink.py
    "memory-errors.md": [(WRAPPED, "")],
    "offload.md": [("", STEP)],
    "pipelines.md": [("", "assert loss.ndim == 0\n"), None, ("", "")],  # Transformers: tests/ecosystem
    "reproducible.md": [("", "assert run.step == 4\n")],
    "sharding.md": [("", ""), (WRAPPED, INDENTED)],
    "stage.md": [(CORPUS, "assert list(file) == ['tokens']\n")],
    "tar-and-mds.md": [(SHARDS, "assert run.step == 6\n"), (SHARDS, "assert len(longest) == 23\n"), (SHARDS, "")],
    "tensor.md": [
        ("", "assert model(tokens).shape == (8, 8, 32)\n"),
        ("", ""),
        None,  # Transformers: tests/ecosystem
        (TENSOR, "assert logits.shape == (2, 50257)\n"),
        (APPLY, "assert loss.ndim == 0\n"),
        ("", ""),
    ],
}
# Their programs have tests of their own, or are signatures.
OTHERS = {
    *("README.md", "api.md", "your-own-script.md", "reading-checkpoints.md"),
    *("data-files.md", "integrations.md", "torch-backend.md"),
}
RUNNER = """
import json, os, sys
programs, root = json.load(open(sys.argv[1])), sys.argv[2]
import hpctrain
world = hpctrain.Communicator.world()
for number, (title, program) in enumerate(programs):
    folder = f"{root}/{number}"
    if world.rank == 0:
        os.makedirs(folder)
    world.barrier()
    os.chdir(folder)
    space = {"__name__": "page"}
    try:
        exec(compile(program, title, "exec"), space)
    except Exception:
        print("failed:", title, program, file=sys.stderr, sep="\\n")
        raise
    if "job" in space:
        space["job"].close()
    world.barrier()
    if world.rank == 0:
        print("done", title, flush=True)
"""


def programs_of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)


def test_every_page_with_programs_is_known() -> None:
    found = {page.name for page in PAGES if page.name != "README.md" and programs_of(page.name)}
    assert found == {*AROUND} | OTHERS - {"README.md"}
    assert {page: len(programs_of(page)) for page in AROUND} == {page: len(around) for page, around in AROUND.items()}


@pytest.mark.limit(180)
def test_every_program_runs_on_two_ranks(launch: Any, tmp_path: Path) -> None:
    programs = [
        (f"{page} {number}", PRELUDE + around[0] + program + around[1])
        for page, each in AROUND.items()
        for number, (program, around) in enumerate(zip(programs_of(page), each), 1)
        if around is not None
    ]
    (tmp_path / "programs.json").write_text(json.dumps(programs))
    done = launch(2, RUNNER, tmp_path / "programs.json", tmp_path / "root", timeout=150)
    assert done.returncode == 0, done
    assert done.stdout.count("done ") == len(programs) > 20, done
