"""slow_train.py with its faults mended: the same data, model and epochs.

    python3 examples/fast_train.py [--epochs 2] [--samples 1024]
    torchrun --nproc-per-node N examples/fast_train.py       one process per GPU

torchtuned.torch is optional here: without it the two lines that use it fall back to plain numbers.
"""

import argparse
import math
import os
import random
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

try:
    from torchtuned.torch import loader_args, tune
except ImportError:

    def loader_args():
        return {"num_workers": 1, "pin_memory": torch.cuda.is_available(), "persistent_workers": True}

    def tune(**asked):
        torch.backends.cudnn.benchmark = asked.get("cudnn_benchmark", False)


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


@torch.inference_mode()
def evaluate(model, loader, device):
    model.eval()
    right = torch.zeros((), device=device)
    for pictures, kinds in loader:
        scores = model(pictures.to(device, non_blocking=True))
        right += (scores.argmax(1) == kinds.to(device, non_blocking=True)).sum()
    return right.item() / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=1024)
    args = parser.parse_args()

    torch.manual_seed(0)
    loading = loader_args()
    tune(cudnn_benchmark=True, loader_workers=loading["num_workers"])
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else torch.device("cpu")
    model = build().to(device)
    training_set, sampler = Pictures(args.samples), None
    if "LOCAL_RANK" in os.environ:
        torch.distributed.init_process_group("nccl" if gpu else "gloo")
        model = DistributedDataParallel(model, device_ids=[device.index] if gpu else None)
        sampler = DistributedSampler(training_set)
    train_loader = DataLoader(training_set, batch_size=64, shuffle=sampler is None, sampler=sampler, **loading)
    val_loader = DataLoader(Pictures(args.samples // 4), batch_size=64, **loading)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4, **({"fused": True} if gpu else {}))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, epochs=args.epochs, steps_per_epoch=len(train_loader)
    )

    start = time.perf_counter()
    for epoch in range(args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros((), device=device)
        for pictures, kinds in train_loader:
            pictures, kinds = pictures.to(device, non_blocking=True), kinds.to(device, non_blocking=True)
            noise = torch.randn(pictures.shape, device=device)
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=gpu):
                loss = criterion(model(pictures + 0.1 * noise), kinds)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach()
        accuracy = evaluate(model, val_loader, device)
        print(f"epoch {epoch}: loss {total.item() / len(train_loader):.3f}, accuracy {accuracy:.3f}")
    print(f"{time.perf_counter() - start:.2f} s")
    if "LOCAL_RANK" in os.environ:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
