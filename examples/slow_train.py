"""A small image classifier that trains correctly and slowly: every fault in it is common in real scripts.

    python3 examples/slow_train.py [--epochs 2] [--samples 1024]
    torchtuned lint examples/slow_train.py

fast_train.py is the same training with the faults mended. Both run on synthetic data, on a GPU if there is one.
"""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    """Noisy pictures of ten kinds, told apart by their stripes, "decoded" with real work for the CPU."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        kind = index % 10
        generator = torch.Generator().manual_seed(index)
        picture = torch.randn(3, 32, 32, generator=generator)
        picture = picture * 0.3 + torch.sin(torch.arange(32) * 0.3 * (kind + 1))
        for _ in range(20):  # as slow as a small JPEG
            picture = picture.flip(2).contiguous()
        return picture, kind


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
