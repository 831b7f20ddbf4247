"""A run for jobs, whose step time and failures are set by the job's environment."""

from __future__ import annotations

from pathlib import Path

STEPS = 300
EVERY = 50  # steps between checkpoints

# PACE: seconds per step until the job has been restarted once (PACE_AGAIN: always), or until a file "hurry" exists.
# HARM: "raise 1 5" is an exception of rank 1 in step 5, "kill 1 5" a SIGKILL; HARM_AGAIN: in every attempt. Its time is
# written to harm.txt. SHOW: each rank writes its host, CPUs, umask and environment into rank_N.json in its first step.
_MODEL = '''
import json, os, signal, socket, time, torch

class Model(torch.nn.Module):
    """Predict the next byte from the last one."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(256, 8)
        self.head = torch.nn.Linear(8, 256)
        self.passes = 0

    def forward(self, tokens):
        if self.training:
            self.passes += 1
            act(self.passes)
        return self.head(self.embedding(tokens))

def act(step):
    chain = os.environ.get("HPCTRAIN_CHAIN", "")
    again = "PBS_JOBID" in os.environ and chain not in ("", os.environ["PBS_JOBID"])
    first = os.environ.get("SLURM_RESTART_COUNT", "0") == "0" and not again
    if step == 1 and "SHOW" in os.environ:
        show()
    kind, rank, at = os.environ.get("HARM", "no 0 0").split()
    if step == int(at) and rank == own_rank() and (first or "HARM_AGAIN" in os.environ):
        with open("harm.txt", "w") as file:
            print(time.time(), file=file)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("harm was asked for")
    if (first or "PACE_AGAIN" in os.environ) and not os.path.exists("hurry"):
        time.sleep(float(os.environ.get("PACE", 0)))

def show():
    umask = os.umask(0)
    os.umask(umask)
    facts = {"host": socket.gethostname(), "cpus": sorted(os.sched_getaffinity(0)), "umask": umask}
    with open(f"rank_{own_rank()}.json", "w") as file:
        json.dump({**facts, "environment": dict(os.environ)}, file)

def own_rank():
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
    return next((os.environ[name] for name in names if name in os.environ), "0")
'''

_CONFIG = """\
[data]
files = ["{corpus}"]
[model]
factory = "paced_model:Model"
context = 16
[train]
steps = {steps}
batch = 4
seed = 3
evaluate_every = 0
[optimizer]
learning_rate = 0.01
[checkpoint]
every = {every}
[run]
folder = "run"
"""


def make_corpus(folder: Path) -> Path:
    """Pack a small corpus and return its path."""
    from hpctrain.data.pack import pack

    texts = folder / "texts"
    texts.mkdir()
    for number in range(12):
        (texts / f"{number}.txt").write_text("".join(f"{number} times {n} is {number * n}\n" for n in range(30)))
    pack([texts], folder / "corpus.h5", validation_fraction=0.2, progress=False)
    return folder / "corpus.h5"


def make_run(folder: Path, corpus: Path) -> None:
    """Write the model and its config, ``paced.toml``, into a folder."""
    (folder / "paced_model.py").write_text(_MODEL)
    (folder / "paced.toml").write_text(_CONFIG.format(corpus=corpus, steps=STEPS, every=EVERY))
