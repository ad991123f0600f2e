"""TL012 to TL014, TL016, TL018: single calls that slow the whole run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .facts import constant, keyword, last_word, names_device
from .names import Module
from .program import Program, is_true, unconditional
from .rules import HINT, LIKELY, Finding, finding

_ANOMALY = ("torch.autograd.set_detect_anomaly", "torch.autograd.detect_anomaly")
_PROFILERS = ("torch.profiler.profile", "torch.autograd.profiler.profile", "torch.autograd.profiler.emit_nvtx")
_TRAINERS = ("lightning.pytorch.Trainer", "lightning.Trainer")
_FACTORIES = frozenset(
    f"torch.{name}" for name in "zeros ones full empty rand randn randint randperm arange linspace logspace eye".split()
)
_MEASURING = re.compile(r"profil|bench|debug")


def check(program: Program, module: Module) -> Iterator[Finding | None]:
    measuring = bool(_MEASURING.search(module.source.path.stem)) or module.source.for_tests
    step_nodes = {id(step.loop or step.owner) for step in program.steps if step.module is module}
    for node in module.source.nodes:
        if isinstance(node, ast.Call):
            yield from _call(program, module, node, measuring=measuring)
        elif isinstance(node, ast.With) and not measuring:
            yield from _profiled(program, module, node, step_nodes)
        elif isinstance(node, ast.Assign):
            yield _blocking(module, node)


def _call(program: Program, module: Module, node: ast.Call, *, measuring: bool) -> Iterator[Finding | None]:
    dotted = module.dotted(node.func)
    name = last_word(node.func)
    if dotted in _ANOMALY and not measuring and unconditional(module, node):
        mode = keyword(node, "mode") or (node.args[0] if node.args else None)
        with_item = dotted.endswith(".detect_anomaly") and isinstance(module.source.parents.get(node), ast.withitem)
        if is_true(mode) or (with_item and mode is None):
            yield finding(module.source, node, "TL012", "anomaly detection is left on")
    elif dotted in _TRAINERS:
        if is_true(keyword(node, "detect_anomaly")):
            yield finding(module.source, node, "TL012", "Trainer(detect_anomaly=True) is left on")
        if constant(keyword(node, "profiler")) in ("advanced", "pytorch") and not measuring:
            yield finding(module.source, node, "TL013", "Trainer(profiler=...) is left on")
    elif name in ("setdefault", "putenv") and dotted in ("os.environ.setdefault", "os.putenv"):
        if [constant(argument) for argument in node.args[:2]] == ["CUDA_LAUNCH_BLOCKING", "1"] and unconditional(
            module, node
        ):
            yield finding(module.source, node, "TL014", "CUDA_LAUNCH_BLOCKING=1 is left on")
    elif name == "zero_grad" and isinstance(node.func, ast.Attribute):
        none = keyword(node, "set_to_none") or (node.args[0] if len(node.args) == 1 else None)
        if constant(none) is False:
            yield finding(module.source, node, "TL016", "zero_grad(set_to_none=False)")
    if name in ("to", "cuda") and isinstance(node.func, ast.Attribute):
        yield _moved(program, module, node, node.func.value)


def _moved(program: Program, module: Module, node: ast.Call, made: ast.expr) -> Finding | None:
    if not isinstance(made, ast.Call) or (last_word(node.func) == "to" and not names_device(node)):
        return None
    dotted = module.dotted(made.func)
    given = {item.arg for item in made.keywords}
    # a generator on the CPU gives the same numbers on every machine; out= and ** decide the device elsewhere
    if dotted not in _FACTORIES or given & {"generator", "device", "out", "pin_memory", None}:
        return None
    # made once, at the start of a run, it costs nothing that anybody would notice
    certainty = LIKELY if program.repeated(module, node) else HINT
    return finding(module.source, node, "TL018", f"{dotted}(...) is made on the CPU and then moved", certainty)


def _blocking(module: Module, node: ast.Assign) -> Finding | None:
    target = node.targets[0]
    if not isinstance(target, ast.Subscript) or constant(target.slice) != "CUDA_LAUNCH_BLOCKING":
        return None
    if (
        module.dotted(target.value) != "os.environ"
        or str(constant(node.value)) != "1"
        or not unconditional(module, node)
    ):
        return None
    return finding(module.source, node, "TL014", "CUDA_LAUNCH_BLOCKING=1 is left on")


def _profiled(program: Program, module: Module, node: ast.With, steps: set[int]) -> Iterator[Finding | None]:
    for item in node.items:
        call = item.context_expr
        if (
            not isinstance(call, ast.Call)
            or module.dotted(call.func) not in _PROFILERS
            or not unconditional(module, node)
        ):
            continue
        given = {word.arg for word in call.keywords}
        enabled = keyword(call, "enabled") or (
            call.args[0] if call.args and ".autograd." in module.dotted(call.func) else None
        )
        if given & {"schedule", None} or (enabled is not None and not is_true(enabled)):
            continue
        inside = any(id(part) in steps for part in ast.walk(node) if part is not node)
        calls_step = any(_runs_steps(program, module, part) for part in ast.walk(node) if isinstance(part, ast.Call))
        if inside or calls_step:
            yield finding(module.source, call, "TL013", "the training loop runs under a profiler, all of it")


def _runs_steps(program: Program, module: Module, call: ast.Call) -> bool:
    target = module.resolve(call.func)
    node = getattr(target, "node", None)
    return any(step.owner is node and step.loop is not None for step in program.steps)
