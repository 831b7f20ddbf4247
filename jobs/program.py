"""Example of your own training program: it resumes from its checkpoints, and saves and exits before its job ends.

    python jobs/program.py --folder runs/own
    mpiexec -n 2 python jobs/program.py --folder runs/own
    hpctrain submit slurm jobs/program.py --folder runs/own --nodes 2 --time 01:00:00 -- --folder runs/own --steps 5000
"""

import argparse

import hpctrain

job = hpctrain.init()  # before the import of torch, which takes seconds during which a signal would kill

import torch  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--folder", required=True)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--rate", type=float, default=1e-3)
args = parser.parse_args()

torch.manual_seed(1)
points = torch.rand(8192, 2) * 4 - 2
within = (points.norm(dim=1) - 1.2).abs().lt(0.4).float()  # whether each point is in a ring
dataset = torch.utils.data.TensorDataset(points, within)
loader = torch.utils.data.DataLoader(dataset, batch_size=128, shuffle=True)  # 128 samples over all ranks

layers = [torch.nn.Linear(2, 64), torch.nn.GELU(), torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)]
model = job.wrap(torch.nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate)

with job.run(model, optimizer, loader, checkpoints=args.folder, steps=args.steps, every=50) as run:
    for step, (inputs, targets) in run:
        scores = model(inputs.to(job.device)).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, targets.to(job.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)

if job.rank == 0:
    print(f"{args.folder}: {run.step} steps are done")
