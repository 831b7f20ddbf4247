# A GAN: two models, two optimizers at different rates. Noise comes with the data.
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpctrain

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--folder", required=True)
parser.add_argument("--strategy", default="ddp")
args = parser.parse_args()

job = hpctrain.init(parallel=args.strategy)
torch.manual_seed(0)
real = torch.randn(90, 4) @ torch.randn(4, 4) + 1
noise = torch.randn(90, 2)
loader = DataLoader(TensorDataset(real, noise), batch_size=16, shuffle=True)
netG = job.wrap(nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4)))
netD = job.wrap(nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
optG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))
optD = torch.optim.Adam(netD.parameters(), lr=4e-3, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()

with job.run({"G": netG, "D": netD}, {"G": optG, "D": optD}, loader, checkpoints=args.folder, every=2) as run:
    for epoch in run.epochs(4):
        for step, (x, z) in run:
            ones, zeros = torch.ones(len(x), 1), torch.zeros(len(x), 1)
            fake = netG(z)
            netD.zero_grad()
            lossD = criterion(netD(x), ones)
            lossD.backward()
            lossD_fake = criterion(netD(fake.detach()), zeros)
            lossD_fake.backward()
            optD.step()
            netG.zero_grad()
            lossG = criterion(netD(fake), ones)
            lossG.backward()
            optG.step()
            run.log(D=lossD + lossD_fake, G=lossG)

weights = {"G." + name: value for name, value in job.state_dict(netG).items()}
weights.update({"D." + name: value for name, value in job.state_dict(netD).items()})
if job.rank == 0:
    torch.save(weights, args.out)
