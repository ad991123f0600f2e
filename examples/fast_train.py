"""slow_train.py with its faults mended: the same data, model and epochs.

    python3 examples/fast_train.py [--epochs 2] [--samples 1024]
    torchrun --nproc-per-node N examples/fast_train.py       one process per GPU

torchtuned.torch is optional here: without it the two lines that use it fall back to plain numbers.
"""

import argparse
import os
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4, fused=gpu)
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
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=gpu):
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
