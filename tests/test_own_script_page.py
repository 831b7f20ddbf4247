"""Code of docs/your-own-script.md: it runs unchanged, and trains the same as plain PyTorch."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "your-own-script.md"
PLAIN, OWN, NAMES = "A script in plain PyTorch", "The same script with hpctrain", "Names used in the examples below"
INSIDE = "Inside the communicator of a simulation"  # a complete program
MARK = "  # hpctrain"

# Runs each section of the page in a new namespace and an empty folder, and prints the values that the tests check.
SECTIONS = """
import json, os, sys
page, root = sys.argv[1:]
sections = json.load(open(page))
names = sections.pop("names")
for number, (title, blocks) in enumerate(sections.items()):
    space = {"__name__": "page"}
    exec(compile(names, "names", "exec"), space)
    job = space["job"]
    if job.rank == 0:
        os.makedirs(f"{root}/{number}")
    job.comm.barrier()
    os.chdir(f"{root}/{number}")
    for block in blocks:
        exec(compile(block, title, "exec"), space)
    run = space.get("run")
    found = {"title": title, "step": run and run.step, "facts": FACTS.get(title, lambda space: None)(space)}
    everyone = job.comm.all_gather_object(found)
    if job.rank == 0:
        print(json.dumps(everyone), flush=True)
    space["job"].close()
"""
FACTS = """
def same(space):
    weights = [one.detach() for one in space["model"].parameters()]
    return [float(sum(each.double().abs().sum() for each in weights))]

def metrics(space):
    return [json.loads(line) for line in open(space["run"].folder / "metrics.jsonl")]

FACTS = {
    "How batches are split over the ranks": lambda space: [space["samples"], space["weight"]],
    "Early stopping": lambda space: [space["run"].finished, space["epoch"]],
    "The best model": lambda space: metrics(space)[-1]["best"],
    "Evaluation": lambda space: [space["found"], space["worst"]],
    "Evaluation only": lambda space: space["loss"],
    "Random numbers: dropout, augmentations, shuffling": lambda space: [float(space["own"]), float(space["alike"])],
    "Schedulers, averages of weights and other states": lambda space: [
        space["history"]["losses"], sorted(space["run"].state.schedulers)
    ],
    "Several models and optimizers: a GAN": lambda space: sorted(space["run"].models),
    "Losses with parameters": lambda space: sorted(space["run"].models),
    "Gradient accumulation": same,
}
"""


def sections() -> dict[str, list[str]]:
    """Return the Python blocks of the page by heading."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title = part.partition("\n")[0]
        found[title] = re.findall(r"^```python\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
    return found


def script(title: str, folder: Path) -> Path:
    (block,) = sections()[title]
    path = folder / f"{'own' if title == OWN else 'plain'}.py"
    path.write_text(block, encoding="utf-8")
    return path


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def printed(stdout: str) -> list[tuple[float, ...]]:
    """Return epoch, loss and accuracy of each line that the scripts print."""
    rows = re.findall(r"^epoch (\d+): loss ([\d.]+), accuracy ([\d.]+)$", stdout, re.MULTILINE)
    return [tuple(map(float, row)) for row in rows]


def test_the_changed_lines_are_marked_and_counted() -> None:
    (plain,), (own,) = sections()[PLAIN], sections()[OWN]
    before, after = lines(plain), lines(own)
    unmarked = [line for line in after if not line.endswith(MARK)]
    gone = [line for line in difflib.ndiff(before, unmarked) if line[:2] in ("- ", "+ ")]
    assert [line for line in gone if line.startswith("+ ")] == [], "a changed line without a mark"
    marked = [line.removesuffix(MARK) for line in after if line.endswith(MARK)]
    assert not set(marked) & set(before)
    validate = plain[plain.index("    def validate") : plain.index("    for epoch in")].strip()
    told = re.search(r"^(\d+) lines are new .*?; (\d+) lines .*? are gone, (\d+) of", PAGE.read_text(), re.M | re.S)
    assert told is not None
    assert tuple(map(int, told.groups())) == (len(marked), len(gone), len(validate.splitlines()))


@pytest.mark.limit(200)
@pytest.mark.parametrize("precision, most", [("float32", 2e-5), pytest.param("bfloat16", 0.15, marks=pytest.mark.long)])
def test_both_scripts_train_the_same(launch: Any, tmp_path: Path, precision: str, most: float) -> None:
    import torch

    from hpctrain.checkpoint import load
    from hpctrain.checkpoint.tools.inspect import judge
    from hpctrain.cli.main import main

    call = ["--precision", precision] if precision == "float32" else ["--precision", precision, "--epochs", "3"]
    plain = launch(0, script(PLAIN, tmp_path), *call, cwd=tmp_path)
    own = launch(2, script(OWN, tmp_path), *call, "--folder", "run", cwd=tmp_path)
    assert plain.returncode == 0 and own.returncode == 0, (plain, own)
    expected, found = printed(plain.stdout), printed(own.stdout)
    assert len(found) == len(expected) and [row[0] for row in found] == [row[0] for row in expected]
    for one, other in zip(found, expected):
        assert one[1:] == pytest.approx(other[1:], abs=most)
    if precision == "bfloat16":
        return
    assert len(found) < 10, "the run has stopped early"
    judged = judge(tmp_path / "run")
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(sections()[OWN][0], str(PAGE), "exec"), names)
    model = names["make_model"]()
    load(judged.file, model=model)
    kept = torch.load(tmp_path / "best.pt", weights_only=True)
    assert min(row[1] for row in found) == pytest.approx(judged.value, abs=1e-6)
    for name, tensor in model.state_dict().items():
        assert torch.allclose(tensor, kept[name], rtol=5e-6, atol=2e-6), name
    call_export = ["checkpoint", "export", str(judged.file), "--to", "torch", "--model-only"]
    assert main([*call_export, "-o", str(tmp_path / "exported.pt")]) == 0
    exported = torch.load(tmp_path / "exported.pt", weights_only=True)
    assert all(torch.equal(exported[name], tensor) for name, tensor in model.state_dict().items())

    again = launch(2, tmp_path / "own.py", *call, "--folder", "run", cwd=tmp_path)
    assert again.returncode == 0 and printed(again.stdout) == [], again
    assert "the run was ended" in again.stderr and "the validation loss no longer falls" in again.stderr


@pytest.mark.limit(200)
def test_a_killed_script_resumes(launch: Any, tmp_path: Path) -> None:
    """The script is killed after the loop of the third epoch on two ranks, and resumes in one process."""
    own = script(OWN, tmp_path)
    killed = f"""
import runpy, torch
kind = torch.optim.lr_scheduler.CosineAnnealingLR
plainly = kind.step

def step(scheduler, *args):
    plainly(scheduler, *args)
    if scheduler.last_epoch == 3:
        raise SystemExit(9)

kind.step = step
runpy.run_path({str(own)!r}, run_name="__main__")
"""
    call = ["--precision", "float32", "--epochs", "5"]
    whole = launch(0, own, *call, "--folder", "whole", cwd=tmp_path)
    first = launch(2, killed, *call, "--folder", "run", cwd=tmp_path)
    assert whole.returncode == 0 and first.returncode != 0, (whole, first)
    second = launch(0, own, *call, "--folder", "run", cwd=tmp_path)
    assert second.returncode == 0, second
    rows = dict((row[0], row) for row in [*printed(first.stdout), *printed(second.stdout)])
    for row in printed(whole.stdout):
        assert rows[row[0]] == pytest.approx(row, abs=2e-5)
    assert "resuming after step" in second.stderr


@pytest.mark.limit(200)
@pytest.mark.parametrize("ranks", [pytest.param(0, marks=pytest.mark.long), 2])
def test_every_section_runs(launch: Any, tmp_path: Path, ranks: int) -> None:
    found = sections()
    wanted = {title: blocks for title, blocks in found.items() if blocks and title not in (PLAIN, OWN, NAMES, INSIDE)}
    assert len(wanted) >= 25
    (names,) = found[NAMES]
    page = tmp_path / "sections.json"
    page.write_text(json.dumps({"names": names, **wanted}))
    done = launch(ranks, FACTS + SECTIONS, page, tmp_path / "root", cwd=tmp_path, timeout=150)
    assert done.returncode == 0, done
    told = {row[0]["title"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert list(told) == list(wanted)
    check(told, max(ranks, 1))


def check(told: dict[str, list[dict[str, Any]]], ranks: int) -> None:
    """Check the page's statements about its sections on every rank."""
    facts = {title: [one["facts"] for one in row] for title, row in told.items()}
    steps = {title: {one["step"] for one in row} for title, row in told.items()}
    assert all(len(each) == 1 for each in steps.values())

    split = facts["How batches are split over the ranks"]
    assert split == ([[1, 1.0]] if ranks == 1 else [[1, 0.0], [1, 2.0]]), "the last batch has one sample"
    assert steps["Epochs and resume"] == {12} and steps["A number of steps instead of epochs"] == {10}
    assert steps["Gradient accumulation"] == {4}, "four batches per epoch, two per update"
    assert len({*map(tuple, facts["Gradient accumulation"])}) == 1
    done, epoch = facts["Early stopping"][0]
    assert done and 2 <= epoch < 49
    assert facts["Several models and optimizers: a GAN"][0] == ["discriminator", "generator"]
    assert facts["Losses with parameters"][0] == ["center_loss", "model"]
    losses, schedulers = facts["Schedulers, averages of weights and other states"][0]
    assert len(losses) == 2 and schedulers == ["scheduler"]
    for title in ("Evaluation", "Evaluation only", "The best model"):
        assert all(one == facts[title][0] for one in facts[title]), title
    own, alike = zip(*facts["Random numbers: dropout, augmentations, shuffling"])
    assert len({*own}) == ranks and len({*alike}) == 1


def test_a_subset_of_the_ranks_trains(launch: Any, tmp_path: Path) -> None:
    (block,) = sections()[INSIDE]
    done = launch(3, block, cwd=tmp_path)
    assert done.returncode == 0, done
    rows = [json.loads(line) for line in (tmp_path / "runs/inside/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]

    failing = block.replace("model(batch).pow(2)", "model(batch).no_such_method()")
    lost = launch(3, failing, cwd=tmp_path / "runs")
    assert lost.returncode != 0 and not lost.survivors, lost
    assert lost.stderr.count("no_such_method") >= 1 and "ends the job" in lost.stderr


REFUSED = """
cases = {
    "batch_size=None": lambda: DataLoader(dataset, batch_size=None),
    "has num_workers=1": lambda: DataLoader(Stream(), batch_size=4, num_workers=1),
    "only a torch DataLoader can be split": lambda: [torch.randn(4, 8)],
}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(dataset)


for number, (said, make) in enumerate(cases.items()):
    try:
        job.run(model, optimizer, make(), checkpoints=f"runs/{number}", split="torch" in said or None)
    except ValueError as error:
        assert said in str(error) and error.everywhere, error
    else:
        raise SystemExit(f"not refused: {said}")
alone = DataLoader(dataset, batch_size=None, sampler=range(12))
with job.run(model, optimizer, alone, checkpoints="runs/alone", split=False) as run:
    for _, (inputs, label) in run:
        F.cross_entropy(model(inputs[None]), label[None]).backward()
        optimizer.step()
        optimizer.zero_grad()
assert run.step == 12
late = job.wrap(nn.Sequential(nn.Linear(8, 4)))
late[0] = nn.Linear(8, 4)
try:
    with job.run(late, torch.optim.SGD(late.parameters(), lr=0.1), loader, checkpoints="runs/late"):
        pass
except ValueError as error:
    assert "create them before job.wrap" in str(error)
    print("refused")
"""


def test_refusals_named_on_the_page_are_refused(launch: Any, tmp_path: Path) -> None:
    (names,) = sections()[NAMES]
    done = launch(2, names + REFUSED, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.count("refused") == 2, done


README = """
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
train_set = TensorDataset(torch.randn(701, 8), torch.randint(4, (701,)))
validation_loader = DataLoader(train_set, batch_size=300)


def MyModel():
    return torch.nn.Linear(8, 4)


def measure(batch):
    return cross_entropy(model(batch[0]), batch[1])


"""


@pytest.mark.limit(120)
def test_the_example_of_the_readme_runs(launch: Any, tmp_path: Path) -> None:
    text = (PAGE.parents[1] / "README.md").read_text(encoding="utf-8").partition("## In your own script\n")[2]
    code = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0]
    count = sum(line.startswith("+ ") for line in code.splitlines())
    assert text.strip().startswith({7: "Seven"}[count] + " lines are added")
    body = "".join(line[2:] + "\n" for line in code.splitlines())
    body += "if job.rank == 0:\n    print(accuracy, run.step, scheduler.last_epoch)\n"
    losses = []
    for ranks in (0, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        done = launch(ranks, README + body, cwd=folder)
        assert done.returncode == 0, done
        loss, *counts = done.stdout.splitlines()[0].split()
        assert counts == ["30", "10"], "three batches per epoch"
        losses.append(float(loss))
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
