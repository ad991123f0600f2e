"""A small image classifier that trains correctly and slowly: every fault in it is common in real scripts.

    python3 examples/slow_train.py [--epochs 2] [--samples 1024]
    torchtuned lint examples/slow_train.py

fast_train.py is the same training with the faults mended. Both run on synthetic data, on a GPU if there is one.
"""

import argparse
import math
import random
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIDE = 64  # of a stored picture, in pixels: 8 blocks of 8
COSINES = torch.tensor(
    [[math.cos(math.pi * (2 * x + 1) * u / 16) * (0.5 if u else 0.125**0.5) for u in range(8)] for x in range(8)]
)
TO_RGB = torch.tensor([[1, 0, 1.402], [1, -0.344, -0.714], [1, 1.772, 0]]) / 16


class Pictures(Dataset):
    """Pictures of ten kinds, told apart by their stripes, and kept the way JPEG keeps them: run lengths of cosine
    coefficients per block of 8 x 8. So reading one is real work for a CPU, part of it in Python."""

    def __init__(self, count):
        chance = random.Random(0)
        self.count = count
        self.files = [[self.encoded(kind, chance) for _ in range(5)] for kind in range(10)]

    @staticmethod
    def encoded(kind, chance):
        """Per block its mean, then pairs of (coefficients to go on, value), and a 0 that ends it."""
        data = bytearray()
        for _ in range(3 * (SIDE // 8) ** 2):
            data += bytes([128 + chance.randrange(-9, 9), 1 + kind % 5, 150 if kind < 5 else 106])
            for _ in range(6):
                data += bytes([1 + chance.randrange(6), 128 + chance.randrange(-12, 12)])
            data.append(0)
        return bytes(data)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        kind = index % 10
        data, values = self.files[kind][index // 10 % 5], [0.0] * (3 * SIDE * SIDE)
        at = block = 0
        while at < len(data):
            values[block], place, at = data[at] - 128.0, block, at + 1
            while data[at]:
                place += data[at]
                values[place] = data[at + 1] - 128.0
                at += 2
            block, at = block + 64, at + 1
        blocks = torch.tensor(values).view(3, SIDE // 8, SIDE // 8, 8, 8)
        pixels = (COSINES @ blocks @ COSINES.T).permute(0, 1, 3, 2, 4).reshape(3, -1)
        picture = (TO_RGB @ pixels).view(3, SIDE, SIDE)
        top, left = torch.randint(9, (2,)).tolist()
        picture = picture[:, top : top + 56, left : left + 56]
        return (picture.flip(2) if torch.rand(()) < 0.5 else picture), kind


def build():
    return nn.Sequential(
        nn.Conv2d(3, 16, 7, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def evaluate(model, loader, device):
    model.eval()
    right = 0
    for pictures, kinds in loader:
        scores = model(pictures.to(device))
        right += (scores.argmax(1).cpu() == kinds).sum().item()
    return right / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=1024)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.autograd.set_detect_anomaly(True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build().to(device)
    if torch.cuda.device_count() > 1:
        model = nn.DataParallel(model)
    train_loader = DataLoader(Pictures(args.samples), batch_size=64, shuffle=True)
    val_loader = DataLoader(Pictures(args.samples // 4), batch_size=64)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)

    start = time.perf_counter()
    for epoch in range(args.epochs):
        model.train()
        total = 0.0
        for pictures, kinds in train_loader:
            pictures, kinds = pictures.to(device), kinds.to(device)
            noise = torch.randn(pictures.shape).to(device)
            optimizer.zero_grad(set_to_none=False)
            loss = criterion(model(pictures + 0.1 * noise), kinds)
            loss.backward()
            optimizer.step()
            total += loss.item()
            torch.cuda.empty_cache()
        accuracy = evaluate(model, val_loader, device)
        print(f"epoch {epoch}: loss {total / len(train_loader):.3f}, accuracy {accuracy:.3f}")
    print(f"{time.perf_counter() - start:.2f} s")


if __name__ == "__main__":
    main()
