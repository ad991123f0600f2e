"""Each rule on code that has the fault, and on its near misses: code that looks like it and is right."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from torchtuned.lint.command import lint
from torchtuned.lint.rules import RULES

# What surrounds a case: a training loop on a GPU. {setup} stands before it, {step} in each step, {after} behind it.
PROGRAM = """
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
{setup}
device = torch.device("cuda")

def train(model, loader, optimizer, scaler, criterion, args, rank):
    total = 0.0
    losses = []
    for epoch in range(10):
        for i, (x, y) in enumerate(loader):
            x, y = x.to(device), y.to(device)
            output = model(x)
            loss = criterion(output, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
{step}
{after}
"""


def program(*, setup: str = "", step: str = "pass", after: str = "") -> str:
    return PROGRAM.format(
        setup=textwrap.dedent(setup),
        step=textwrap.indent(textwrap.dedent(step), " " * 12),
        after=textwrap.dedent(after),
    )


def codes(folder: Path, text: str, *, hinted: bool = False) -> list[str]:
    path = folder / "train.py"
    path.write_text(text)
    result = lint([path], hinted=hinted)
    assert not result.errors
    return [one.rule.code for one in result.findings]


LOADER = "loader = DataLoader(Pictures(), batch_size=4{})"
FAULTS: dict[str, list[dict[str, str]]] = {
    "TL001": [
        {"setup": LOADER.format("")},
        {"setup": LOADER.format(", num_workers=0")},
        {"setup": "NONE = 0\n" + LOADER.format(", num_workers=NONE")},
        {"setup": "import torch.utils.data as data\nloader = data.DataLoader(Pictures(), 4, True)"},
        {"setup": "from torch.utils.data import *\nloader = DataLoader(Pictures(), 4, True)"},
        {"setup": "options = {'batch_size': 4}\nloader = DataLoader(Pictures(), **options)"},
        {"setup": "from functools import partial\nmake = partial(DataLoader, batch_size=4)\nloader = make(Pictures())"},
        {"setup": "from torch.utils.data.dataloader import DataLoader as Load\nloader = Load(Pictures())"},
    ],
    "TL002": [
        {"setup": LOADER.format(", num_workers=4, persistent_workers=True")},
        {"setup": LOADER.format(", num_workers=4, pin_memory=False, persistent_workers=True")},
        {"setup": "loader = DataLoader(Pictures(), 4, True, None, None, 8, persistent_workers=True)"},
    ],
    "TL003": [
        {"setup": LOADER.format(", num_workers=4, pin_memory=True")},
        {"setup": LOADER.format(", num_workers=args.workers, pin_memory=True")},
        {"setup": "o = {'num_workers': 4}\no.update({'pin_memory': True})\nloader = DataLoader(Pictures(), **o)"},
    ],
    "TL004": [
        {"setup": "net = nn.DataParallel(Net())"},
        {"setup": "from torch.nn.parallel import DataParallel as DP\nnet = DP(Net()).cuda()"},
        {"setup": "def build(args):\n    if args.many:\n        return torch.nn.DataParallel(Net())"},
        {"setup": "net = nn.DataParallel(Net(), device_ids=[0, 1])"},
    ],
    "TL005": [
        {"setup": "scaler = torch.cuda.amp.GradScaler()"},
        {"step": "with torch.cuda.amp.autocast():\n    pass"},
        {"setup": "from torch.cuda import amp\ncontext = amp.autocast(enabled=True)"},
        {"setup": "from torch.cuda.amp import custom_fwd\n@custom_fwd\ndef forward(ctx):\n    pass"},
        {"setup": "import torch as t\nscaler = t.cuda.amp.GradScaler()"},
    ],
    "TL006": [
        {
            "setup": "scaler = torch.amp.GradScaler('cuda')",
            "step": "with torch.autocast('cuda', dtype=torch.bfloat16):\n    pass",
        },
        {
            "setup": "scaler = torch.amp.GradScaler('cuda')",
            "step": "with torch.amp.autocast('cuda', torch.bfloat16):\n    pass",
        },
    ],
    "TL007": [
        {"step": "total += loss.item()"},
        {"step": "total += loss.detach().item()"},
        {"step": "right = (output.argmax(1) == y).sum().item()"},
        {"step": "accuracy = metric(output, y)\ntotal += accuracy.item()"},
        {"step": "losses.append(loss.item())"},
        {"step": "bar.set_postfix(loss=f'{loss.item():.3f}')"},
        {"step": "if args.amp:\n    total += loss.item()\nelse:\n    total -= loss.item()"},
        {"step": "if rank == 0:\n    log(loss.item())"},
        {"step": "parts = {'a': loss, 'b': output.mean()}\nlog({k: v.item() for k, v in parts.items()})"},
    ],
    "TL008": [
        {"step": "outputs.append(output.detach().cpu())"},
        {"step": "outputs.append(output.to('cpu'))"},
        {"step": "outputs.append(output.to(torch.device('cpu')))"},
        {"setup": "HOST = 'cpu'", "step": "outputs.append(output.to(device=HOST))"},
        {"step": "outputs.append(output.cpu().numpy())"},
    ],
    "TL009": [{"step": "values = loss.detach().numpy()"}, {"step": "values = output.argmax(1).tolist()"}],
    "TL010": [
        {"step": "accuracy = (output.argmax(1) == y).float().mean()\ntotal += float(accuracy)"},
        {"step": "total += float(loss)"},
        {"step": "total += float(loss.detach() * 2)"},
    ],
    "TL011": [
        {"step": "print(loss)"},
        {"step": "print(output)"},
        {"step": "print('loss', loss)"},
        {"step": "print(f'{i}: {loss:.3f}')"},
        {"step": "print('{}: {}'.format(i, loss))"},
        {"step": "print('%d: %.3f' % (i, loss))"},
    ],
    "TL012": [
        {"setup": "torch.autograd.set_detect_anomaly(True)"},
        {"setup": "from torch import autograd\nautograd.set_detect_anomaly(mode=True)"},
        {"step": "with torch.autograd.detect_anomaly():\n    pass"},
        {"setup": "import lightning as L\ntrainer = L.Trainer(detect_anomaly=True)"},
    ],
    "TL013": [
        {"after": "with torch.profiler.profile():\n    train(1, 2, 3, 4, 5, 6, 7)"},
        {"after": "with torch.autograd.profiler.profile(use_cuda=True) as prof:\n    train(1, 2, 3, 4, 5, 6, 7)"},
        {"setup": "import pytorch_lightning as pl\ntrainer = pl.Trainer(profiler='pytorch')"},
        {"after": "p = torch.profiler.profile()\np.start()\ntrain(1, 2, 3, 4, 5, 6, 7)\np.stop()"},
    ],
    "TL014": [
        {"setup": "import os\nos.environ['CUDA_LAUNCH_BLOCKING'] = '1'"},
        {"setup": "from os import environ\nenviron.setdefault('CUDA_LAUNCH_BLOCKING', '1')"},
        {"setup": "import os\nos.environ['CUDA_LAUNCH_BLOCKING'] = str(1)"},
        {"setup": "import os\nos.environ.update({'CUDA_LAUNCH_BLOCKING': '1'})"},
        {"setup": "import os\nos.environ.update(A='2', CUDA_LAUNCH_BLOCKING='1')"},
    ],
    "TL015": [
        {"step": "torch.cuda.empty_cache()"},
        {"after": "for x in val_loader:\n    torch.cuda.empty_cache()"},
        {"step": "if torch.cuda.is_available():\n    torch.cuda.empty_cache()"},
        {"setup": "def free():\n    torch.cuda.empty_cache()", "step": "free()"},
    ],
    "TL016": [{"step": "optimizer.zero_grad(set_to_none=False)"}, {"step": "optimizer.zero_grad(False)"}],
    "TL017": [
        {"step": "total += loss"},
        {"step": "total += loss * x.size(0)"},
        {"step": "losses.append(loss)"},
        {"step": "total += loss / 4"},
        {"step": "total = total + loss"},
        {
            "setup": "seen = {'loss': [], 'right': []}\nfor x in loader:\n    loss = net(x)\n    loss.backward()\n"
            "    seen['loss'].append(loss)"
        },
    ],
    "TL018": [
        {"step": "noise = torch.randn(4, 4).to(device)"},
        {"step": "noise = torch.zeros(4, 4).cuda()"},
        {"step": "noise = torch.ones(x.shape).to(x.device)"},
        {"step": "noise = torch.arange(4).to('cuda:0')"},
        {"step": "t = torch.randint(0, 9, (4,)).long().to(device)"},
        {"step": "noise = torch.randn(4)\nnoise = noise.to(device)"},
        {"setup": "WHERE = 'cuda' if torch.cuda.is_available() else 'cpu'", "step": "x = torch.ones(4).to(WHERE)"},
        {"setup": "class Net(nn.Module):\n    def forward(self, x):\n        return x + torch.rand(4).to(x.device)"},
    ],
    "TL019": [
        {
            "after": "def validate(model, loader):\n    model.eval()\n"
            "    for x, y in loader:\n        model(x.to(device))"
        },
        {"after": "def evaluate(model, val_loader):\n    for x in val_loader:\n        total += model(x)"},
        {"after": "model.eval()\ntotal = 0\nfor x in val_loader:\n    total += model.forward(x)"},
        {"after": "model.train(False)\nfor x in val_loader:\n    model(x)"},
        {"after": "model.eval()\nwith tqdm(val_loader) as bar:\n    for x in bar:\n        model(x)"},
        {"after": "def validate(net, val_loader):\n    for x in val_loader:\n        net(x)"},
        {
            "after": """
            class Runner:
                def validate(self):
                    self.model.eval()
                    for x in self.val_loader:
                        self.model(x)
            """
        },
    ],
    "TL020": [
        {
            "setup": "net = nn.parallel.DistributedDataParallel(Net())",
            "after": """
            for i, x in enumerate(loader):
                loss = net(x) / 4
                loss.backward()
                if (i + 1) % 4 == 0:
                    optimizer.step()
            """,
        },
        {
            "setup": "from accelerate import Accelerator\naccelerator = Accelerator()",
            "after": """
            for i, x in enumerate(loader):
                loss = net(x) / args.accumulation
                accelerator.backward(loss)
                if i % args.accumulation == 0:
                    optimizer.step()
            """,
        },
        {
            "setup": "net = nn.parallel.DistributedDataParallel(Net())",
            "after": """
            for i, x in enumerate(loader):
                net(x).backward()
                last = (i + 1) % 4 == 0
                if last:
                    optimizer.step()
            """,
        },
        {
            "setup": "net = nn.parallel.DistributedDataParallel(Net())",
            "after": """
            for step in range(1000):
                for part in range(4):
                    net(next(batches)).backward()
                optimizer.step()
            """,
        },
    ],
    "TL101": [{}],
    "TL102": [
        {"setup": "optimizer = torch.optim.Adam(p, weight_decay=1e-4)"},
        {"setup": "optimizer = torch.optim.Adam(p, 1e-3, (0.9, 0.99), 1e-8, 0.01)"},
    ],
    "TL103": [{"setup": "from torch import optim\noptimizer = optim.AdamW(p, lr=1e-3)"}],
    "TL104": [
        {"setup": "net = nn.Conv2d(3, 8, 3)"},
        {"setup": "from torchvision.models import resnet18\nnet = resnet18()"},
    ],
    "TL105": [{}],
    "TL106": [
        {"setup": "batch_size = 2  # more does not fit on my card"},
        {"after": "try:\n    train()\nexcept torch.cuda.OutOfMemoryError:\n    pass"},
        {"after": "try:\n    train()\nexcept RuntimeError as e:\n    if 'out of memory' in str(e):\n        pass"},
    ],
    "TL107": [{"setup": "optimizer = torch.optim.SGD(p, lr=1e-3)"}],
}

NEAR_MISSES: dict[str, list[dict[str, str]]] = {
    "TL001": [
        {"setup": LOADER.format(", num_workers=args.workers")},
        {"setup": LOADER.format(", num_workers=0 if args.debug else 8")},
        {"setup": LOADER.format(", **args.loader")},
        {"setup": "def make(data, **options):\n    return DataLoader(data, **options)"},
        {"setup": "from torch.utils.data import TensorDataset\nloader = DataLoader(TensorDataset(a, b), 4)"},
        {
            "setup": "from torch.utils.data import TensorDataset, random_split\n"
            "a, b = random_split(TensorDataset(x, y), [1, 2])\nloader = DataLoader(a, 4)"
        },
        {
            "setup": "from torch.utils.data import IterableDataset\n"
            "class Stream(IterableDataset):\n    pass\nloader = DataLoader(Stream(), 4)"
        },
        {
            "setup": "from torch.utils.data import IterableDataset\n"
            "class Stream(IterableDataset[int]):\n    pass\nloader = DataLoader(Stream.from_files(names), 4)"
        },
        {
            "setup": "class Kept:\n    def __getitem__(self, i):\n        return self.x[i], self.y[i]\n"
            "loader = DataLoader(Kept(), 4)"
        },
        {"setup": "from mine import DataLoader\nloader = DataLoader(Pictures())"},
        {"setup": "options = dict(num_workers=4) if args.cuda else {}\nloader = DataLoader(Pictures(), **options)"},
        {"setup": "first = next(iter(DataLoader(Pictures())))"},
        {
            "after": "def check(net, data):\n    loader = DataLoader(data, 4)\n"
            "check(net, torch.utils.data.TensorDataset(a))"
        },
        {"after": "def predict(x):\n    return [net(y) for y in DataLoader(Pictures(x))]"},
        {"after": "def fit(data):\n    loader = DataLoader(data, 4)"},
        {"setup": "few = DataLoader(Pictures())\nfor epoch in range(3):\n    x = next(iter(few))"},
    ],
    "TL002": [
        {"setup": LOADER.format(", num_workers=4, pin_memory=True")},
        {"setup": LOADER.format(", num_workers=4, pin_memory=args.pin")},
    ],
    "TL003": [
        {"setup": LOADER.format(", num_workers=4, persistent_workers=args.workers > 0")},
        {
            "after": "def check():\n    loader = DataLoader(Pictures(), num_workers=4, pin_memory=True)\n"
            "    for x in loader:\n        pass"
        },
        {"setup": "test_loader = DataLoader(Pictures(), num_workers=4)", "after": "evaluate(test_loader)"},
        {
            "after": "def run():\n    data = DataLoader(Pictures(), num_workers=4)\n    for epoch in range(3):\n"
            "        fit(data)\n        data = DataLoader(Pictures(), num_workers=4)"
        },
    ],
    "TL004": [
        {"setup": "net = nn.parallel.DistributedDataParallel(Net())"},
        {"setup": "plain = net.module if isinstance(net, nn.DataParallel) else net"},
        {"setup": "class DataParallel:\n    pass\nnet = DataParallel()"},
        {"after": "def predict(net):\n    return nn.DataParallel(net)"},
        {"setup": "net = nn.DataParallel(Net(), device_ids=[args.gpu])"},
        {"setup": "count = 1\nnet = nn.DataParallel(Net(), list(range(count)))"},
        {"after": "def wrap(net, how):\n    if how == 'dp':\n        return nn.DataParallel(net)"},
    ],
    "TL005": [
        {"setup": "scaler = torch.amp.GradScaler('cuda')"},
        {"setup": "from torch.amp import autocast\ncontext = autocast('cuda')"},
        {
            "setup": "try:\n    from torch.amp import autocast\n"
            "except ImportError:\n    from torch.cuda.amp import autocast\n"
            "context = autocast('cuda')"
        },
        {
            "setup": "if NEW:\n    scaler = torch.amp.GradScaler('cuda')\n"
            "else:\n    scaler = torch.cuda.amp.GradScaler()"
        },
    ],
    "TL006": [
        {
            "setup": "scaler = torch.amp.GradScaler('cuda', enabled=args.half)",
            "step": "with torch.autocast('cuda', dtype=torch.bfloat16):\n    pass",
        },
        {"setup": "scaler = torch.amp.GradScaler('cuda')", "step": "with torch.autocast('cuda'):\n    pass"},
        {
            "setup": "scaler = torch.amp.GradScaler('cuda')",
            "step": "with torch.autocast('cuda', dtype=kind):\n    pass",
        },
    ],
    "TL007": [
        {"step": "if i % 100 == 0:\n    print(loss.item())"},
        {"step": "if args.verbose:\n    print(loss.item())"},
        {"step": "if i % 10:\n    continue\nprint(loss.item())"},
        {"step": "if (i + 1) % args.every == 0 and rank == 0:\n    print(loss.item())"},
        {"after": "    for x in loader:\n        pass\n    print(loss.item())"},
        {"step": "count += config.size.item()"},
        {"step": "import numpy as np\nvalue = np.mean(history).item()"},
        {"step": "assert loss.item() > 0"},
        {"step": "try:\n    pass\nexcept RuntimeError:\n    print(loss.item())"},
        {"after": "with torch.no_grad():\n    for x in val_loader:\n        total += model(x).item()"},
    ],
    "TL008": [
        {"step": "if i % 100 == 0:\n    save(output.cpu())"},
        {"step": "if i % 100 == 0:\n    save(model.cpu().state_dict())"},
        {"step": "names = y_names.cpu()"},
    ],
    "TL009": [{"step": "shape = output.shape\nrows = shape.numpy()"}, {"step": "labels = table.tolist()"}],
    "TL010": [
        {"step": "rate = float(args.rate)"},
        {"step": "size = int(x.size(0))"},
        {"step": "n = float(len(output))"},
    ],
    "TL011": [
        {"step": "print(i, len(loader))"},
        {"step": "print(loss.shape, output.dtype)"},
        {"step": "if i % 100 == 0:\n    print(loss)"},
        {"step": "value = loss.detach\nloss = 3.0\nprint(loss)"},
    ],
    "TL012": [
        {"setup": "torch.autograd.set_detect_anomaly(False)"},
        {"setup": "torch.autograd.set_detect_anomaly(args.debug)"},
        {"setup": "if args.debug:\n    torch.autograd.set_detect_anomaly(True)"},
    ],
    "TL013": [
        {
            "after": "with torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=1, active=3)):\n"
            "    train(1, 2, 3, 4, 5, 6, 7)"
        },
        {"after": "with torch.autograd.profiler.profile(enabled=args.profile):\n    train(1, 2, 3, 4, 5, 6, 7)"},
        {"after": "if args.profile:\n    with torch.profiler.profile():\n        train(1, 2, 3, 4, 5, 6, 7)"},
        {"after": "with torch.profiler.profile():\n    model(x)"},
        {"after": "p = torch.profiler.profile()\np.start()\nmodel(x)\np.stop()"},
        {"after": "p = torch.profiler.profile(schedule=s)\np.start()\ntrain(1, 2, 3, 4, 5, 6, 7)"},
    ],
    "TL014": [
        {"setup": "import os\nos.environ['CUDA_LAUNCH_BLOCKING'] = '0'"},
        {"setup": "import os\nif DEBUG:\n    os.environ['CUDA_LAUNCH_BLOCKING'] = '1'"},
    ],
    "TL015": [
        {"step": "if i % 100 == 0:\n    torch.cuda.empty_cache()"},
        {"after": "torch.cuda.empty_cache()"},
        {"step": "try:\n    pass\nexcept RuntimeError:\n    torch.cuda.empty_cache()"},
        {"after": "for name in names:\n    torch.cuda.empty_cache()"},
        {"setup": "def free():\n    torch.cuda.empty_cache()", "step": "if i % 100 == 0:\n    free()"},
        {"setup": "def free():\n    torch.cuda.empty_cache()", "after": "free()"},
    ],
    "TL016": [{"step": "optimizer.zero_grad(set_to_none=True)"}, {"step": "optimizer.zero_grad(set_to_none=keep)"}],
    "TL017": [
        {"step": "total += loss.detach()"},
        {"step": "total += loss.item()"},
        {"step": "loss = loss.detach()\ntotal += loss"},
        {"step": "with torch.no_grad():\n    total += loss"},
        {"after": "both = 0\nfor head in heads:\n    loss = head(x)\n    both += loss\nboth.backward()"},
        {"step": "mine = 0\nfor part in parts:\n    mine += loss\nmine.backward()"},
    ],
    "TL018": [
        {"step": "noise = torch.randn(4, 4, device=device)"},
        {"step": "noise = torch.zeros(4).to(torch.float16)"},
        {"step": "noise = torch.randn(4, generator=g).to(device)"},
        {"step": "noise = torch.zeros(4).to('cpu')"},
        {"step": "value = torch.from_numpy(a).to(device)"},
        {"setup": "fixed = torch.randn(4).to(device)"},
        {"step": "mask = torch.zeros(4)\nmask[0] = 1\nmask = mask.to(device)"},
        {"after": "for epoch in range(9):\n    for _ in range(25):\n        draw(torch.randn(4).to(device))"},
        {
            "setup": "class Net(nn.Module):\n    def __init__(self):\n        for i in range(3):\n"
            "            self.width = build(i)(torch.randn(4).to(device)).shape"
        },
    ],
    "TL019": [
        {"after": "model.eval()\nwith torch.no_grad():\n    for x in val_loader:\n        model(x)"},
        {
            "after": "@torch.inference_mode()\ndef validate():\n    model.eval()\n"
            "    for x in val_loader:\n        model(x)"
        },
        {
            "after": "def validate():\n    model.eval()\n    for x in val_loader:\n        model(x)\n"
            "with torch.no_grad():\n    validate()"
        },
        {
            "after": "@smart_inference_mode()\ndef validate():\n    model.eval()\n"
            "    for x in val_loader:\n        model(x)"
        },
        {"after": "model.eval()\ntorch.set_grad_enabled(False)\nfor x in val_loader:\n    model(x)"},
        {"after": "model.eval()\nmodel.train()\nfor x in val_loader:\n    model(x)"},
        {"after": "model.eval()\nfor x in val_loader:\n    model(x).sum().backward()"},
        {"after": "def evaluate(model, names):\n    for name in names:\n        model(name)"},
        {"after": "teacher.eval()\nfor x in loader:\n    student(x)"},
        {"after": "model.eval()\nfreeze = torch.no_grad()\nwith freeze:\n    for x in val_loader:\n        model(x)"},
        {
            "after": "import lightning as L\nclass Lit(L.LightningModule):\n"
            "    def check(self):\n        self.net.eval()\n"
            "        for x in self.loader:\n            self.net(x)"
        },
    ],
    "TL020": [
        {
            "setup": "net = nn.parallel.DistributedDataParallel(Net())",
            "after": """
            for i, x in enumerate(loader):
                with net.no_sync() if (i + 1) % 4 else nullcontext():
                    net(x).backward()
                if (i + 1) % 4 == 0:
                    optimizer.step()
            """,
        },
        {
            "after": """
            for i, x in enumerate(loader):
                loss = net(x)
                loss.backward()
                if (i + 1) % 4 == 0:
                    optimizer.step()
            """
        },
        {
            "setup": "from accelerate import Accelerator\naccelerator = Accelerator()",
            "after": """
            for x in loader:
                with accelerator.accumulate(net):
                    accelerator.backward(net(x))
                    optimizer.step()
            """,
        },
        {
            "setup": "net = nn.parallel.DistributedDataParallel(Net())",
            "after": "for x in loader:\n    net(x).backward()\n    optimizer.step()",
        },
    ],
    "TL101": [{"step": "with torch.autocast('cuda'):\n    pass"}, {"setup": "model = Net().half()"}],
    "TL102": [
        {"setup": "optimizer = torch.optim.Adam(p)"},
        {"setup": "optimizer = torch.optim.AdamW(p, weight_decay=1)"},
    ],
    "TL103": [{"setup": "optimizer = torch.optim.AdamW(p, fused=True)"}, {"setup": "optimizer = mine.AdamW(p)"}],
    "TL104": [
        {"setup": "net = nn.Conv2d(3, 8, 3)\ntorch.backends.cudnn.benchmark = True"},
        {"setup": "from torch.backends import cudnn\nnet = nn.Conv2d(3, 8, 3)\ncudnn.deterministic = True"},
        {"setup": "from torchtuned.torch import tune\ntune(cudnn_benchmark=True)\nnet = nn.Conv2d(3, 8, 3)"},
    ],
    "TL105": [{"setup": "net = torch.compile(Net())"}, {"setup": "net = Net()\nnet.compile()"}],
    "TL106": [
        {"setup": "# the title does not fit on the page"},
        {"setup": "# the batch fits"},
        {"setup": "# OOM above 8\naccumulation_steps = 4"},
    ],
    "TL107": [{"setup": "optimizer = torch.optim.SGD(p)\nscheduler = make(optimizer)"}],
}


def cases(table: dict[str, list[dict[str, str]]]) -> list[object]:
    return [pytest.param(code, case, id=f"{code}-{n}") for code, every in table.items() for n, case in enumerate(every)]


@pytest.mark.parametrize(("code", "case"), cases(FAULTS))
def test_fault_is_found(tmp_path: Path, code: str, case: dict[str, str]) -> None:
    assert code in codes(tmp_path, program(**case), hinted=True)


@pytest.mark.parametrize(("code", "case"), cases(NEAR_MISSES))
def test_near_miss_is_left_alone(tmp_path: Path, code: str, case: dict[str, str]) -> None:
    assert code not in codes(tmp_path, program(**case))
    if RULES[code].certainty == "hint":
        assert code not in codes(tmp_path, program(**case), hinted=True)


def test_every_rule_has_both_kinds_of_cases() -> None:
    assert set(RULES) == set(FAULTS) == set(NEAR_MISSES)


def test_clean_training_has_no_findings(tmp_path: Path) -> None:
    assert codes(tmp_path, program()) == []


def test_hints_only_when_asked(tmp_path: Path) -> None:
    text = program(setup="optimizer = torch.optim.Adam(p, weight_decay=1)")
    assert codes(tmp_path, text) == []
    assert "TL102" in codes(tmp_path, text, hinted=True)


def test_no_waiting_where_no_gpu_is_used(tmp_path: Path) -> None:
    text = program(step="total += loss.item()\nprint(loss)\nlosses.append(output.cpu())")
    assert {"TL007", "TL008", "TL011"} <= set(codes(tmp_path, text))
    assert codes(tmp_path, text.replace('"cuda"', '"cpu"')) == []


def test_actions_may_reach_the_environment(tmp_path: Path) -> None:
    text = program(setup="import gymnasium", step="env.step(output.argmax(1).item())\ntotal += loss.item()")
    assert codes(tmp_path, text) == ["TL007"]


def test_one_figure_per_epoch_is_not_each_step(tmp_path: Path) -> None:
    text = """
import torch
def train(model, data):
    loss = model(data.cuda())
    loss.backward()
    return float(loss)
for epoch in range(200):
    train(model, data)
"""
    assert codes(tmp_path, text) == []
    assert codes(tmp_path, text.replace("epoch", "batch")) == ["TL010"]
    assert codes(tmp_path, text.replace("epoch in range(200)", "e in range(1, num_epochs + 1)")) == []
    assert codes(tmp_path, text.replace("epoch in range(200)", "e in range(steps_per_epoch)")) == ["TL010"]
    assert codes(tmp_path, text.replace("epoch in range(200)", "e in tqdm(data, desc=f'Epoch {epoch}')")) == ["TL010"]


def test_a_step_in_a_function_of_its_own(tmp_path: Path) -> None:
    text = """
import torch
class Trainer:
    def step(self, batch):
        loss = self.model(batch.cuda())
        loss.backward()
        self.optimizer.step()
        return loss.item()
    def fit(self):
        for batch in self.loader:
            self.step(batch)
"""
    assert codes(tmp_path, text) == ["TL007"]
    assert codes(tmp_path, text.replace("for batch in self.loader:", "if True:")) == []


def test_what_computes_the_loss_runs_in_every_step_too(tmp_path: Path) -> None:
    text = """
import torch
def losses(model, x, seen):
    value = model(x)
    size = torch.ones(3).sum()
    seen.append(value.item())
    return size.item(), value
for x in loader:
    size, loss = losses(model, x.cuda(), [])
    loss.backward()
"""
    assert codes(tmp_path, text) == ["TL007"]  # `size` is a number's worth on the CPU, `value` is the loss
    assert codes(tmp_path, text.replace("loss.backward()", "other.backward()")) == []


@pytest.mark.parametrize(
    "call", ["loss, figures = self.both(batch, 'train')\n        return loss", "return self.both(batch)"]
)
def test_lightning_s_steps_often_share_one_function(tmp_path: Path, call: str) -> None:
    kept = "loss, {}" if "figures" in call else "loss"
    text = f"""
import lightning as L
class Lit(L.LightningModule):
    def training_step(self, batch, index):
        {call}
    def both(self, batch, name="train"):
        loss = self.net(batch)
        self.figures[name] = loss.detach().cpu()
        return {kept}
"""
    assert codes(tmp_path, text) == ["TL008"]


@pytest.mark.parametrize("base", ["lightning", "pytorch_lightning"])
def test_lightning_does_much_by_itself(tmp_path: Path, base: str) -> None:
    text = f"""
import torch
import {base} as L
from torch.utils.data import DataLoader
class Lit(L.LightningModule):
    def training_step(self, batch, index):
        loss = self.net(batch)
        self.log("loss", loss)
        return loss
    def validation_step(self, batch, index):
        self.log("val", self.net(batch))
    def train_dataloader(self):
        return DataLoader(Pictures(), num_workers=4, pin_memory=True, persistent_workers=True)
L.Trainer(max_epochs=3, accumulate_grad_batches=4, precision="bf16-mixed").fit(Lit())
"""
    assert codes(tmp_path, text) == []
    assert codes(tmp_path, text.replace('self.log("loss", loss)', 'self.log("loss", loss.item())')) == ["TL007"]
    assert codes(tmp_path, text.replace("num_workers=4, ", "")) == ["TL001"]


def test_timm_s_and_accelerate_s_ways_to_run_backward(tmp_path: Path) -> None:
    text = """
import torch
def train_one_epoch(model, data_loader, optimizer, device, loss_scaler):
    for samples, _ in data_loader:
        loss = model(samples.to(device))
        value = loss.item()
        loss_scaler(loss, optimizer)
"""
    assert codes(tmp_path, text) == ["TL007"]
    assert codes(tmp_path, text.replace("loss_scaler(loss, optimizer)", "accelerator.backward(loss)")) == ["TL007"]
    assert codes(tmp_path, text.replace("loss_scaler(loss, optimizer)", "record(loss, optimizer)")) == []


def test_a_name_that_is_made_of_itself_costs_no_finding(tmp_path: Path) -> None:
    text = """
import torch
from torch.utils.data import DataLoader

options = {}
options = {"num_workers": 2} if torch.cuda.is_available() else options
model = torch.nn.Linear(2, 2).cuda()
for x, y in DataLoader(FOLDER, **options):
    loss = model(x.cuda()).sum()
    loss.backward()
    print(loss.item())
"""
    assert "TL007" in codes(tmp_path, text)
