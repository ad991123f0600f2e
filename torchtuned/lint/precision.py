"""TL004 to TL006: parallel and mixed-precision calls that PyTorch itself advises against."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .facts import constant, keyword, last_word
from .names import Module
from .program import Program, enclosing_function
from .rules import Finding, finding

_PARALLEL = ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel", "torch.nn.parallel.data_parallel")
_OLD_AMP = {
    f"torch.{device}.amp.{name}": name
    for device in ("cuda", "cpu")
    for name in ("autocast", "GradScaler", "custom_fwd", "custom_bwd")
}
_ASKING = re.compile(r"eval|predict|infer|(^|_)test|generat|embed|encode_|demo", re.IGNORECASE)
_SCALERS = ("torch.cuda.amp.GradScaler", "torch.amp.GradScaler", "torch.amp.grad_scaler.GradScaler")
_AUTOCASTS = ("torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast", "torch.amp.autocast_mode.autocast")


def check(program: Program, module: Module) -> Iterator[Finding | None]:
    trains = program.facts(module).trains
    bfloat16 = all_bfloat16(module)
    for node in module.source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for decorator in node.decorator_list:  # @custom_fwd without a call
                if not isinstance(decorator, ast.Call) and module.dotted(decorator) in _OLD_AMP:
                    yield _old_amp(module, decorator, module.dotted(decorator))
        if not isinstance(node, ast.Call):
            continue
        dotted = module.dotted(node.func)
        if dotted in _PARALLEL and trains and not _only_asked(module, node) and not _one_device(module, node):
            yield finding(
                module.source, node, "TL004", f"{dotted.rsplit('.', 1)[-1]} instead of DistributedDataParallel"
            )
        if dotted in _OLD_AMP and not _fallback(module, node):
            yield _old_amp(module, node, dotted)
        if dotted in _SCALERS and bfloat16 and keyword(node, "enabled") is None:
            yield finding(module.source, node, "TL006", "GradScaler, though autocast runs in bfloat16")


def _only_asked(module: Module, node: ast.AST) -> bool:
    """Whether the model is spread over GPUs to predict, one process being natural then, or by the caller's own word."""
    path = module.source.path.resolve()
    for up in module.source.ancestors(node):  # `if wrapper == "DataParallel"`: somebody chooses it by name
        named = [constant(part) for part in ast.walk(up.test)] if isinstance(up, ast.If) else []
        if any(isinstance(word, str) and word.lower() in ("dataparallel", "data_parallel", "dp") for word in named):
            return True
    places = [path.stem, getattr(enclosing_function(module, node), "name", "")]
    return path.parent.name in ("inference", "evaluation", "demo") or any(_ASKING.search(place) for place in places)


def _one_device(module: Module, node: ast.Call) -> bool:
    """Whether it is given a list of one GPU: then it calls the module and does nothing else."""
    devices = keyword(node, "device_ids") or (node.args[1] if len(node.args) > 1 else None)
    if isinstance(devices, ast.Call) and last_word(devices.func) == "list" and devices.args:
        devices = devices.args[0]
    if isinstance(devices, ast.Call) and last_word(devices.func) == "range" and len(devices.args) == 1:
        end = module.value(devices.args[0])
        return isinstance(end, ast.Constant) and end.value == 1
    return isinstance(devices, ast.List | ast.Tuple) and len(devices.elts) == 1


def _old_amp(module: Module, node: ast.expr, dotted: str) -> Finding | None:
    device, name = dotted.split(".")[1], _OLD_AMP[dotted]
    argument = f'device_type="{device}"' if name.startswith("custom") else f'"{device}"'
    return finding(module.source, node, "TL005", f"{dotted} is deprecated: torch.amp.{name}({argument}, ...)")


def _fallback(module: Module, node: ast.AST) -> bool:
    """Whether the old name is what is left for an old PyTorch, the new one standing in the other branch."""
    for up in module.source.ancestors(node):
        if isinstance(up, ast.If | ast.IfExp | ast.Try):
            for part in ast.walk(up):
                dotted = module.dotted(part) if isinstance(part, ast.Attribute | ast.Name) else ""
                if dotted.startswith("torch.amp.") or dotted == "torch.autocast":
                    return True
                if dotted == "torch.__version__" or "version" in dotted.lower():
                    return True
    return False


def all_bfloat16(module: Module) -> bool:
    """Whether the file calls autocast, and each time with dtype=torch.bfloat16."""
    found = []
    for node in module.source.calls:
        if module.dotted(node.func) in _AUTOCASTS:
            positional = node.args[1] if len(node.args) > 1 and ".cuda." not in module.dotted(node.func) else None
            found.append(module.dotted(keyword(node, "dtype") or positional) == "torch.bfloat16")
            if constant(keyword(node, "enabled")) is False:
                found.pop()
    return bool(found) and all(found)
