# A GAN: two models, two optimizers at different rates. Noise comes with the data.
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
args = parser.parse_args()

torch.manual_seed(0)
real = torch.randn(90, 4) @ torch.randn(4, 4) + 1
noise = torch.randn(90, 2)
loader = DataLoader(TensorDataset(real, noise), batch_size=16, shuffle=True)
netG = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4))
netD = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
optG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))
optD = torch.optim.Adam(netD.parameters(), lr=4e-3, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()

for epoch in range(4):
    for x, z in loader:
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

weights = {"G." + name: value for name, value in netG.state_dict().items()}
weights.update({"D." + name: value for name, value in netD.state_dict().items()})
torch.save(weights, args.out)
