"""A program of your own that trains with hpctrain: it goes on where it was, and leaves in time when its job ends.

    python jobs/program.py --folder runs/own
    mpiexec -n 2 python jobs/program.py --folder runs/own
    hpctrain submit slurm jobs/program.py --folder runs/own --nodes 2 --time 01:00:00 -- --folder runs/own --steps 5000
"""

import argparse

import hpctrain

job = hpctrain.init()  # before torch, whose import takes seconds in which a signal would kill

import torch  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--folder", required=True)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--rate", type=float, default=1e-3)
args = parser.parse_args()


class Points:
    """Draw points of the plane, and whether each lies within a ring; every rank draws others.

    Its state is the same on all ranks, so a run may go on with more of them, or fewer.
    """

    def __init__(self, count: int, rank: int) -> None:
        self.count, self.rank, self.position = count, rank, 0

    def __iter__(self):
        while True:
            generator = torch.Generator().manual_seed(self.position * 65536 + self.rank)
            self.position += 1
            points = torch.rand(self.count, 2, generator=generator) * 4 - 2
            yield points, (points.norm(dim=1) - 1.2).abs().lt(0.4).float()

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


torch.manual_seed(1)
layers = [torch.nn.Linear(2, 64), torch.nn.GELU(), torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)]
model = job.wrap(torch.nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate)
loader = Points(64, job.rank)

with job.run(model, optimizer, loader, checkpoints=args.folder, steps=args.steps, every=50) as run:
    for step, (points, within) in run:
        scores = model(points.to(job.device)).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, within.to(job.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)

if job.rank == 0:
    print(f"{args.folder}: {run.step} steps are done")
