# Workers, a collate_fn of one's own, dicts as batches.
import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
args = parser.parse_args()

torch.manual_seed(0)


class Texts(Dataset):
    def __init__(self):
        chance = torch.Generator().manual_seed(3)
        self.texts = [torch.randint(1, 30, (int(n),), generator=chance) for n in torch.randint(2, 9, (66,), generator=chance)]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        return {"ids": self.texts[i], "label": int(self.texts[i].sum()) % 2, "name": f"text {i}"}


def collate(samples):
    ids = nn.utils.rnn.pad_sequence([each["ids"] for each in samples], batch_first=True)
    return {
        "ids": ids,
        "mask": ids != 0,
        "labels": torch.tensor([each["label"] for each in samples]),
        "names": [each["name"] for each in samples],
    }


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 12)
        self.head = nn.Linear(12, 2)

    def forward(self, ids, mask):
        mask = mask.unsqueeze(2)
        return self.head((self.embed(ids) * mask).sum(1) / mask.sum(1))


loader = DataLoader(Texts(), batch_size=10, shuffle=True, num_workers=2, collate_fn=collate)
model = Bag()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)

for epoch in range(3):
    for batch in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["ids"], batch["mask"]), batch["labels"])
        loss.backward()
        optimizer.step()

torch.save(model.state_dict(), args.out)
