# Evaluation only: loads weights of plain PyTorch, measures.
import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
args = parser.parse_args()

torch.manual_seed(0)


def make():
    return nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.3), nn.Linear(20, 4))


path = args.out + ".weights"
trained = make()
trained(torch.randn(64, 6))  # running statistics
if True:
    torch.save(trained.state_dict(), path)

model = make()
model.load_state_dict(torch.load(path))
inputs, labels = torch.randn(53, 6), torch.randint(4, (53,))
loader = DataLoader(TensorDataset(inputs, labels), batch_size=10)

model.eval()
loss, correct = 0.0, 0
with torch.no_grad():
    for x, y in loader:
        logits = model(x)
        loss += float(F.cross_entropy(logits, y, reduction="sum"))
        correct += int(logits.argmax(1).eq(y).sum())
found = {"loss": loss / len(inputs), "accuracy": correct / len(inputs)}

weights = {name: torch.tensor(value) for name, value in found.items()}
weights.update(model.state_dict())
torch.save(weights, args.out)
