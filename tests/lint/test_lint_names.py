"""Names followed through aliases and the project's own modules, and facts joined over them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from torchtuned.lint.command import lint
from torchtuned.lint.names import Module, Project, Symbol

TRAIN = """
import torch
{imports}
model.to("cuda")
for epoch in range(3):
    for x in loader:
        loss = model(x)
        loss.backward()
"""


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def found(*paths: Path) -> list[tuple[str, str]]:
    result = lint(list(paths))
    assert not result.errors
    return [(Path(one.file).name, one.rule.code) for one in result.findings]


def meaning(folder: Path, text: str, expression: str) -> str:
    """What the last line's expression names."""
    path = folder / "x.py"
    path.write_text(f"{text}\n{expression}\n")
    module = Project([folder]).load(path, "x.py")
    assert isinstance(module, Module)
    last = module.source.tree.body[-1]
    assert isinstance(last, ast.Expr)
    target = module.resolve(last.value)
    return "project" if isinstance(target, Symbol) else module.dotted(last.value)


@pytest.mark.parametrize(
    ("text", "expression", "expected"),
    [
        ("import torch.nn as nn", "nn.Linear", "torch.nn.Linear"),
        ("from torch import nn as layers", "layers.Linear", "torch.nn.Linear"),
        ("import torch\nimport torch.utils.data", "torch.utils.data.DataLoader", "torch.utils.data.DataLoader"),
        ("from torch.nn import *", "Linear", "torch.nn.Linear"),
        ("import torch\nN = torch.nn\nL = N.Linear", "L", "torch.nn.Linear"),
        ("from torch.utils.data.dataloader import DataLoader", "DataLoader", "torch.utils.data.DataLoader"),
        ("try:\n    import a as m\nexcept ImportError:\n    import b as m", "m.x", ""),
        ("import torch\ntorch = None", "torch.nn", ""),
        ("def torch():\n    pass", "torch", "project"),
        ("a = b\nb = a", "a", ""),
        ("from torch.nn import *", "len", ""),
    ],
)
def test_meaning(tmp_path: Path, text: str, expression: str, expected: str) -> None:
    assert meaning(tmp_path, text, expression) == expected


def test_a_parameter_hides_an_import(tmp_path: Path) -> None:
    text = TRAIN.format(
        imports="from torch.utils.data import DataLoader\ndef f(DataLoader):\n    DataLoader(Pictures())"
    )
    assert found(tree(tmp_path, {"train.py": text})) == []


def test_reexports_within_the_project(tmp_path: Path) -> None:
    files = {
        "compat.py": "from torch.utils.data import DataLoader\nfrom torch.nn import DataParallel as Spread\n",
        "train.py": TRAIN.format(imports="from compat import DataLoader as D, Spread\nD(Pictures())\nSpread(model)"),
    }
    assert found(tree(tmp_path, files) / "train.py") == [("train.py", "TL001"), ("train.py", "TL004")]


def test_relative_imports_in_a_package(tmp_path: Path) -> None:
    files = {
        "pkg/__init__.py": "",
        "pkg/data/__init__.py": "from .load import make\n",
        "pkg/data/load.py": "from torch.utils.data import DataLoader\ndef make():\n    return DataLoader(Pictures())\n",
        "pkg/train.py": TRAIN.format(imports="from .data import make\nfrom . import data\nloader = make()"),
    }
    tree(tmp_path, files)
    assert found(tmp_path) == [("load.py", "TL001")]
    assert found(tmp_path / "pkg/train.py") == []  # what is imported is read, not reported
    assert found(tmp_path / "pkg/data/load.py") == [("load.py", "TL001")]  # the package tells that it is trained with


def test_loader_of_a_program_that_does_not_train(tmp_path: Path) -> None:
    files = {
        "data.py": "from torch.utils.data import DataLoader\nloader = DataLoader(Pictures())\n",
        "other.py": "x = 1\n",
    }
    assert found(tree(tmp_path, files)) == []


def test_circular_imports(tmp_path: Path) -> None:
    files = {
        "a.py": "from b import *\nfrom b import x\nimport b\n",
        "b.py": "from a import *\nfrom a import x\nx.y()\n",
    }
    assert found(tree(tmp_path, files)) == []


def test_dataset_class_in_another_file(tmp_path: Path) -> None:
    files = {
        "sets.py": "from torch.utils.data import IterableDataset as I\nclass Base(I): pass\nclass Stream(Base): pass\n",
        "train.py": TRAIN.format(
            imports="from torch.utils.data import DataLoader as D\nimport sets\nD(sets.Stream())\nD(sets.Other())"
        ),
    }
    assert found(tree(tmp_path, files)) == [("train.py", "TL001")]


def test_training_in_a_function_called_from_another_file(tmp_path: Path) -> None:
    files = {
        "engine.py": "def step(model, x):\n    loss = model(x.cuda())\n    loss.backward()\n    return loss.item()\n",
        "main.py": "import engine\nfor batch in loader:\n    engine.step(model, batch)\n",
    }
    assert found(tree(tmp_path, files)) == [("engine.py", "TL007")]
    assert found(tmp_path / "engine.py") == [("engine.py", "TL007")]
