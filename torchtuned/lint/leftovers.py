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
_RESHAPED = frozenset("long float double half int bool type view reshape unsqueeze squeeze expand repeat".split())
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
    elif dotted in ("os.environ.setdefault", "os.environ.update", "os.putenv"):
        pairs: list[tuple[ast.expr | str | None, ast.expr]] = [(item.arg, item.value) for item in node.keywords]
        if len(node.args) == 2:
            pairs.append((node.args[0], node.args[1]))
        elif node.args and isinstance(node.args[0], ast.Dict):
            pairs.extend(zip(node.args[0].keys, node.args[0].values, strict=True))
        if any(_blocks(variable, value) for variable, value in pairs) and unconditional(module, node):
            yield finding(module.source, node, "TL014", "CUDA_LAUNCH_BLOCKING=1 is left on")
    elif name == "start" and not measuring:
        yield _started(program, module, node)
    elif name == "zero_grad" and isinstance(node.func, ast.Attribute):
        none = keyword(node, "set_to_none") or (node.args[0] if len(node.args) == 1 else None)
        if constant(none) is False:
            yield finding(module.source, node, "TL016", "zero_grad(set_to_none=False)")
    if name in ("to", "cuda") and isinstance(node.func, ast.Attribute):
        yield _moved(program, module, node, node.func.value)


def _moved(program: Program, module: Module, node: ast.Call, made: ast.expr | None) -> Finding | None:
    if last_word(node.func) == "to" and not names_device(module, node):
        return None
    made = _just_made(module, node, made) if isinstance(made, ast.Name) else made
    while isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and made.func.attr in _RESHAPED:
        made = made.func.value
    if not isinstance(made, ast.Call):
        return None
    dotted = module.dotted(made.func)
    given = {item.arg for item in made.keywords}
    # a generator on the CPU gives the same numbers on every machine; out= and ** decide the device elsewhere
    if dotted not in _FACTORIES or given & {"generator", "device", "out", "pin_memory", None}:
        return None
    # made once, at the start of a run, it costs nothing that anybody would notice
    certainty = LIKELY if program.often(module, node) else HINT
    return finding(module.source, node, "TL018", f"{dotted}(...) is made on the CPU and then moved", certainty)


def _just_made(module: Module, node: ast.Call, name: ast.Name) -> ast.expr | None:
    """What the statement right before this one gave the name, and nothing has filled it in between."""
    statement = next(up for up in module.source.ancestors(node) if isinstance(up, ast.stmt))
    for block in ("body", "orelse", "finalbody"):
        around = getattr(module.source.parents[statement], block, None)
        if isinstance(around, list) and statement in around[1:]:
            before = around[around.index(statement) - 1]
            if isinstance(before, ast.Assign) and [last_word(target) for target in before.targets] == [name.id]:
                return before.value
    return None


def _blocking(module: Module, node: ast.Assign) -> Finding | None:
    target = node.targets[0]
    if not isinstance(target, ast.Subscript) or not _blocks(target.slice, node.value):
        return None
    if module.dotted(target.value) != "os.environ" or not unconditional(module, node):
        return None
    return finding(module.source, node, "TL014", "CUDA_LAUNCH_BLOCKING=1 is left on")


def _blocks(variable: ast.expr | str | None, value: ast.expr) -> bool:
    """Whether a variable's name and value switch it on: "1", or str(1)."""
    name = constant(variable) if isinstance(variable, ast.expr) else variable
    if isinstance(value, ast.Call) and last_word(value.func) == "str" and value.args:
        value = value.args[0]
    return name == "CUDA_LAUNCH_BLOCKING" and str(constant(value)) == "1"


def _profiled(program: Program, module: Module, node: ast.With, steps: set[int]) -> Iterator[Finding | None]:
    for item in node.items:
        call = item.context_expr
        if (
            not isinstance(call, ast.Call)
            or module.dotted(call.func) not in _PROFILERS
            or not unconditional(module, node)
        ):
            continue
        if not _always_on(module, call):
            continue
        inside = any(id(part) in steps for part in ast.walk(node) if part is not node)
        calls_step = any(_runs_steps(program, module, part) for part in ast.walk(node) if isinstance(part, ast.Call))
        if inside or calls_step:
            yield finding(module.source, call, "TL013", "the training loop runs under a profiler, all of it")


def _started(program: Program, module: Module, node: ast.Call) -> Finding | None:
    """`profiler.start()` before the training, in the same block."""
    profiler = module.value(node.func.value) if isinstance(node.func, ast.Attribute) else None
    if not isinstance(profiler, ast.Call) or module.dotted(profiler.func) not in _PROFILERS:
        return None
    if not _always_on(module, profiler) or not unconditional(module, node):
        return None
    statement = next(up for up in module.source.ancestors(node) if isinstance(up, ast.stmt))
    block = getattr(module.source.parents[statement], "body", [])
    after = block[block.index(statement) + 1 :] if statement in block else []
    loops = {id(step.loop) for step in program.steps if step.loop is not None}
    for part in (part for later in after for part in ast.walk(later)):
        if id(part) in loops or (isinstance(part, ast.Call) and _runs_steps(program, module, part)):
            return finding(module.source, node, "TL013", "the training loop runs under a profiler, all of it")
    return None


def _always_on(module: Module, call: ast.Call) -> bool:
    """Whether a profiler has neither a schedule nor a switch."""
    given = {word.arg for word in call.keywords}
    positional = call.args[0] if call.args and ".autograd." in module.dotted(call.func) else None
    enabled = keyword(call, "enabled") or positional
    return not given & {"schedule", None} and (enabled is None or is_true(enabled))


def _runs_steps(program: Program, module: Module, call: ast.Call) -> bool:
    target = module.resolve(call.func)
    node = getattr(target, "node", None)
    return any(step.owner is node and step.loop is not None for step in program.steps)
