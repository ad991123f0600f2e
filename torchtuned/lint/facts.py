"""What kind of program a file belongs to: does it train, on a GPU, with which framework. Rules ask before they speak.

A fact is collected per file and joined over everything that a program imports, since the loader is often built in one
file and the loop that needs it in another.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .names import Module, Symbol, bases

ACCELERATE = ("accelerate.Accelerator", "accelerate.accelerator.Accelerator")
_ENVIRONMENTS = frozenset(
    {"gym", "gymnasium", "pettingzoo", "envpool", "procgen", "dm_control", "stable_baselines3", "ale_py"}
)
_SHARDED = frozenset({"deepspeed", "fairscale", "colossalai", "megatron", "torch_xla"})
_OWN_LOOPS = ("transformers.Trainer", "transformers.Seq2SeqTrainer", "lightning.pytorch.Trainer", "lightning.Trainer")
_EPOCH = re.compile(r"epoch|(^|_)eps?$", re.IGNORECASE)
_LOSS_SCALER = re.compile(r"(^|_)(loss|grad)_?scaler$", re.IGNORECASE)
_DEVICE = re.compile(r"device|cuda|gpu|(local_)?rank$|(^|_)dev$", re.IGNORECASE)
_NO_GPU_NEEDED = frozenset({"manual_seed", "manual_seed_all", "seed", "get_rng_state", "set_rng_state"})
_LOW_PRECISION = frozenset(
    {"autocast", "GradScaler", "half", "bfloat16", "float16", "fp16", "bf16", "use_fp16", "use_amp", "apex"}
)


@dataclass
class Facts:
    """All False at first; `join` is a plain or."""

    gpu: bool = False
    moves: bool = False  # tensors go to a device that the file does not name
    cpu_only: bool = False  # the only device that is named is "cpu"
    trains: bool = False
    epochs: bool = False
    lightning: bool = False
    accelerate: bool = False
    own_loop: bool = False  # a framework's Trainer runs the loop
    ddp: bool = False
    sharded: bool = False
    no_sync: bool = False
    environment: bool = False  # reinforcement learning: actions must reach the CPU in every step
    low_precision: bool = False
    compiled: bool = False
    scheduled: bool = False
    benchmark: bool = False
    accumulates: bool = False
    graph_safe: bool = False  # deterministic runs were asked for

    def join(self, other: Facts) -> None:
        vars(self).update({name: True for name, known in vars(other).items() if known})

    @property
    def on_gpu(self) -> bool:
        return self.gpu or (self.moves and not self.cpu_only)


def collect(module: Module) -> Facts:
    """The facts of one file."""
    facts = Facts()
    for what in module.imported:
        top = what.module.split(".")[0] if not what.level else ""
        facts.environment |= top in _ENVIRONMENTS
        facts.sharded |= top in _SHARDED or "fsdp" in f"{what.module}.{what.name}".lower()
    named: set[str] = set()
    texts: set[str] = set()
    for node in module.source.nodes:
        if isinstance(node, ast.Name):
            named.add(node.id)
        elif isinstance(node, ast.Attribute):
            named.add(node.attr)
            _from_attribute(facts, module, node)
        elif isinstance(node, ast.Call):
            _from_call(facts, module, node)
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                texts.add(node.value)
        elif isinstance(node, ast.keyword | ast.arg):
            named.add(node.arg or "")
        elif isinstance(node, ast.ClassDef):
            if is_lightning(module, node):
                facts.lightning = facts.gpu = facts.epochs = True
                facts.trains |= any(isinstance(s, ast.FunctionDef) and s.name == "training_step" for s in node.body)
        elif isinstance(node, ast.For | ast.While):
            about = [node.target, node.iter] if isinstance(node, ast.For) else [node.test]
            facts.epochs |= any(_EPOCH.search(word) for part in about for word in words(part))
        elif isinstance(node, ast.Assign):
            _from_assign(facts, module, node)
    for name in named:  # each word once: a large file repeats few of them often
        _from_word(facts, name)
    for text in texts:
        _from_text(facts, text)
    return facts


def _from_call(facts: Facts, module: Module, node: ast.Call) -> None:
    dotted = module.dotted(node.func)
    name = last_word(node.func)
    if dotted in ACCELERATE:
        facts.accelerate = facts.gpu = True
    elif dotted.startswith("lightning.") and dotted.rsplit(".", 1)[-1] in ("Trainer", "Fabric"):
        facts.lightning = facts.epochs = True
        facts.own_loop |= dotted.endswith("Trainer")
        facts.trains = True
        facts.gpu |= constant(keyword(node, "accelerator")) != "cpu"
    elif dotted in _OWN_LOOPS:
        facts.own_loop = facts.trains = facts.gpu = facts.epochs = True
    elif dotted in ("torch.nn.parallel.DistributedDataParallel", "torch.nn.DistributedDataParallel"):
        facts.ddp = True
    elif dotted in ("torch.compile", "torch.jit.script") or (name == "compile" and not node.args and not dotted):
        facts.compiled = True
    elif name in ("no_sync", "no_backward_sync", "accumulate"):
        facts.no_sync = True
    if name == "cuda" and isinstance(node.func, ast.Attribute) and not dotted:
        facts.gpu = True
    elif name == "to" and isinstance(node.func, ast.Attribute) and names_device(module, node):
        facts.moves = True
    facts.trains |= is_backward(module, node)


def _from_attribute(facts: Facts, module: Module, node: ast.Attribute) -> None:
    holder = node.value
    if isinstance(holder, ast.Attribute) and holder.attr not in ("cuda", "accelerator", "xpu"):
        return
    if not isinstance(holder, ast.Name | ast.Attribute) or last_word(holder) == "self":
        return
    dotted = module.dotted(node)
    facts.compiled |= dotted == "torch.compile"
    if dotted.startswith(("torch.cuda.", "torch.accelerator.", "torch.xpu.")):
        facts.gpu |= dotted.split(".")[2] not in _NO_GPU_NEEDED


def _from_word(facts: Facts, name: str) -> None:
    lower = name.lower()
    facts.low_precision |= name in _LOW_PRECISION or "fp16" in lower or "bf16" in lower or "mixed_precision" in lower
    facts.scheduled |= (
        "schedul" in lower or "lr_decay" in lower or lower in ("get_lr", "adjust_learning_rate", "onecyclelr")
    )
    facts.accumulates |= "accum" in lower and (
        "grad" in lower or "step" in lower or "iter" in lower or lower.startswith("accum")
    )
    facts.no_sync |= name == "require_backward_grad_sync"
    facts.graph_safe |= name in ("use_deterministic_algorithms", "seed_everything")
    facts.compiled |= name == "compile_model"
    facts.benchmark |= name == "cudnn_benchmark"


def _from_text(facts: Facts, text: str) -> None:
    if text in ("cuda", "gpu", "xpu", "npu") or text.startswith("cuda:"):
        facts.gpu = True
    elif text == "cpu":
        facts.cpu_only = True
    elif text in ("fp16", "bf16", "float16", "bfloat16", "16-mixed", "bf16-mixed"):
        facts.low_precision = True


def _from_assign(facts: Facts, module: Module, node: ast.Assign) -> None:
    for target in node.targets:
        dotted = module.dotted(target) if isinstance(target, ast.Attribute) else ""
        facts.benchmark |= dotted == "torch.backends.cudnn.benchmark"
        facts.graph_safe |= dotted == "torch.backends.cudnn.deterministic"
        if isinstance(target, ast.Subscript) and constant(target.slice) == "lr":
            facts.scheduled = True


def is_lightning(module: Module, node: ast.ClassDef, depth: int = 4) -> bool:
    """Whether a class is a LightningModule or LightningDataModule, through the project's own base classes too."""
    for base in bases(node):
        target = module.resolve(base)
        if isinstance(target, str) and target.rsplit(".", 1)[-1] in ("LightningModule", "LightningDataModule"):
            return True
        if isinstance(target, Symbol) and isinstance(target.node, ast.ClassDef) and depth:
            if is_lightning(target.module, target.node, depth - 1):
                return True
    return False


def is_backward(module: Module, node: ast.Call) -> bool:
    """Whether a call starts a backward pass: `loss.backward()`, accelerate's, Lightning's and timm's ways included."""
    if isinstance(node.func, ast.Attribute) and node.func.attr in ("backward", "manual_backward"):
        value = node.func.value
        name = value.id if isinstance(value, ast.Name) else ""
        nested = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "super"
        return name not in ("ctx", "torch", "F") and not nested
    named = isinstance(node.func, ast.Name | ast.Attribute)
    return named and bool(_LOSS_SCALER.search(last_word(node.func))) and len(node.args) >= 2


def last_word(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def words(node: ast.AST) -> Iterator[str]:
    """All identifiers in an expression."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name | ast.Attribute):
            yield last_word(part)


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((item.value for item in call.keywords if item.arg == name), None)


def constant(node: ast.AST | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def names_device(module: Module, call: ast.Call) -> bool:
    """Whether `.to(…)` is about a device other than the CPU (and not about a dtype or another tensor)."""
    device = _device(call)
    if isinstance(device, ast.Name | ast.Attribute) and _DEVICE.search(last_word(device)):
        return not names_cpu(module, call)
    return _is_gpu(module.value(device))


def names_cpu(module: Module, call: ast.Call) -> bool:
    """Whether `.to(…)` names the CPU: "cpu" or torch.device("cpu")."""
    device = module.value(_device(call))
    if isinstance(device, ast.Call) and last_word(device.func) == "device" and device.args:
        device = device.args[0]
    return isinstance(device, ast.AST) and constant(device) == "cpu"


def _device(call: ast.Call) -> ast.expr | None:
    return keyword(call, "device") or (call.args[0] if call.args else None)


def _is_gpu(device: object) -> bool:
    if isinstance(device, ast.Constant):
        return isinstance(device.value, str) and device.value.startswith(("cuda", "xpu", "npu"))
    if isinstance(device, ast.JoinedStr):
        return bool(device.values) and str(constant(device.values[0])).startswith("cuda")
    if isinstance(device, ast.IfExp):  # "cuda" if torch.cuda.is_available() else "cpu"
        return _is_gpu(device.body) or _is_gpu(device.orelse)
    if isinstance(device, ast.Call):
        return last_word(device.func) == "device" and bool(device.args) and constant(device.args[0]) != "cpu"
    return False
