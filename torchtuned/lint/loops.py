"""TL019 and TL020: evaluation that records a graph, and accumulation that averages gradients too often."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator

from .facts import constant, is_backward, is_lightning, words
from .flow import key, models
from .names import Function, Module
from .program import Program, called, innermost_loop, is_optimizer_step
from .rules import Finding, finding

_OFF = frozenset({"no_grad", "inference_mode", "set_grad_enabled", "enable_grad", "volatile", "_no_grad", "generate"})
_EVALUATING = re.compile(r"_?(validate|evaluate|eval|validation)(_|$)", re.IGNORECASE)
_OFF_NAME = re.compile(r"no_?grad|inference", re.IGNORECASE)
_HARMLESS = re.compile(r"^(tqdm|trange|progress|autocast)", re.IGNORECASE)
_GRADIENTS = frozenset(
    {"grad", "requires_grad", "requires_grad_", "autograd", "backward", "functional_call", "jacobian"}
)


def check(program: Program, module: Module) -> Iterator[Finding | None]:
    facts = program.facts(module)
    uses_torch = any(what.module.split(".")[0] == "torch" for what in module.imported)
    for function in [module.source.tree, *_functions(module)]:
        if facts.trains and uses_torch:
            yield from _evaluation(program, module, function)
    if (facts.ddp or facts.accelerate) and not facts.no_sync and not facts.sharded and not facts.own_loop:
        yield from _accumulation(program, module)


def _functions(module: Module) -> list[ast.FunctionDef]:
    return [node for node in module.source.nodes if isinstance(node, ast.FunctionDef)]


def _evaluation(program: Program, module: Module, function: ast.AST) -> Iterator[Finding | None]:
    """`model.eval()` and then, in the same block, a loop that calls the model, with autograd on."""
    for block in _blocks(function):
        for index, statement in enumerate(block):
            model = _mode(statement, "eval")
            if not model:
                continue
            for later in block[index + 1 :]:
                if _mode(later, "train") or _switches(later):
                    break
                loop = _loop_in(later)
                if loop is not None:
                    yield _evaluated(program, module, loop, {model}, function)
                    break
    if isinstance(function, ast.FunctionDef) and _EVALUATING.match(function.name):
        for item in function.body:
            if isinstance(item, ast.For) and any(word.lower().endswith("loader") for word in words(item.iter)):
                yield _evaluated(program, module, item, models(module), function)


def _evaluated(
    program: Program, module: Module, loop: ast.stmt, called_as: Collection[str], function: ast.AST
) -> Finding | None:
    call = _forward(loop, called_as)
    if call is None or _gradients_off(program, module, loop, function):
        return None
    return finding(module.source, call, "TL019", f"`{key(call.func)}` is evaluated with autograd on")


def _loop_in(statement: ast.stmt) -> ast.stmt | None:
    """A loop, or the loop within the `with` of a progress bar or of autocast. Another may turn autograd off."""
    while isinstance(statement, ast.With) and all(
        _HARMLESS.search(next(words(item.context_expr), "")) for item in statement.items
    ):
        inner = next((item for item in statement.body if isinstance(item, ast.For | ast.While | ast.With)), None)
        if inner is None:
            return None
        statement = inner
    return statement if isinstance(statement, ast.For | ast.While) else None


def _blocks(function: ast.AST) -> Iterator[list[ast.stmt]]:
    todo: list[ast.AST] = [function]
    while todo:
        node = todo.pop()
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block
                todo.extend(item for item in block if not isinstance(item, (*Function, ast.ClassDef)))


def _mode(statement: ast.stmt, mode: str) -> str:
    """ "model" for `model.eval()`, `model.train(False)` counting as such."""
    if isinstance(statement, ast.Expr | ast.Assign) and isinstance(statement.value, ast.Call):
        call = statement.value
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("train", "eval"):
            off = bool(call.args) and constant(call.args[0]) is False
            if ("eval" if call.func.attr == "eval" or off else "train") == mode:
                return key(call.func.value)
    return ""


def _switches(statement: ast.stmt) -> bool:
    """`torch.set_grad_enabled(False)` as a statement of its own."""
    return isinstance(statement, ast.Expr) and any(word in _OFF for word in words(statement))


def _forward(loop: ast.stmt, called_as: Collection[str]) -> ast.Call | None:
    for node in ast.walk(loop):
        if isinstance(node, ast.Call) and re.sub(r"\.(forward|module)$", "", key(node.func)) in called_as:
            return node
    return None


def _gradients_off(program: Program, module: Module, loop: ast.stmt, function: ast.AST) -> bool:
    used = set(words(loop))
    if used & (_OFF | _GRADIENTS) or any(isinstance(n, ast.keyword) and n.arg == "volatile" for n in ast.walk(loop)):
        return True
    return _under(module, loop) or any(_under(m, call) for m, call in _callers(program, function, 3))


def _callers(program: Program, function: ast.AST, depth: int) -> Iterator[tuple[Module, ast.AST]]:
    for module, call in program.calls.get(function, []) if depth else []:
        yield module, call
        for up in module.source.ancestors(call):
            if isinstance(up, Function):
                yield from _callers(program, up, depth - 1)
                break


def _under(module: Module, node: ast.AST) -> bool:
    """Whether a `with` or a decorator around a node turns autograd off, or Lightning does by itself."""
    for up in module.source.ancestors(node):
        if isinstance(up, ast.With) and any(_turns_off(item) for item in up.items):
            return True
        if isinstance(up, ast.FunctionDef | ast.AsyncFunctionDef):
            if any(_turns_off(item) for item in up.decorator_list):
                return True
        if isinstance(up, ast.ClassDef) and is_lightning(module, up):
            return True
    return False


def _turns_off(node: ast.AST) -> bool:
    """A project's own switch counts when it is named like one."""
    return any(word in _OFF or _OFF_NAME.search(word) for word in words(node))


def _accumulation(program: Program, module: Module) -> Iterator[Finding | None]:
    """A loop that runs backward each time, and the optimizer only when `step % N` says so."""
    for step in program.steps:
        if step.module is not module or step.loop is None:
            continue
        backward = [n for s in step.body for n in ast.walk(s) if isinstance(n, ast.Call) and is_backward(module, n)]
        every_time = [node for node in backward if not _periodic(module, node, step.loop)]
        stepped = _optimizer_steps(module, step.body)
        periodic = bool(stepped) and all(_periodic(module, node, step.loop) for node in stepped)
        if every_time and (periodic or (not stepped and _stepped_after(module, step.loop))):
            yield finding(module.source, every_time[0], "TL020", "gradients are averaged in every accumulation step")


def _optimizer_steps(module: Module, body: list[ast.stmt]) -> list[ast.Call]:
    calls = [node for statement in body for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return [node for node in calls if is_optimizer_step(module, node) or _steps_inside(module, node)]


def _stepped_after(module: Module, loop: ast.AST) -> bool:
    """Whether the optimizer steps once for all turns of an inner loop: `for part in parts: …`, then `step()`."""
    outer = innermost_loop(module, loop)
    if not isinstance(loop, ast.stmt) or outer is None or loop not in outer.body:
        return False
    return bool(_optimizer_steps(module, outer.body[outer.body.index(loop) + 1 :]))


def _steps_inside(module: Module, node: ast.Call) -> bool:
    inner = called(module, node)
    parts = ast.walk(inner.node) if inner else ()
    return inner is not None and any(isinstance(p, ast.Call) and is_optimizer_step(inner.module, p) for p in parts)


def _periodic(module: Module, node: ast.AST, loop: ast.AST) -> bool:
    for up in module.source.ancestors(node):
        if up is loop:
            return False
        if isinstance(up, ast.If) and any(_counts_steps(module, part) for part in ast.walk(up.test)):
            return True
    return False


def _counts_steps(module: Module, part: ast.AST) -> bool:
    """`(i + 1) % n`, or a variable set to such."""
    if isinstance(part, ast.Name):
        value = module.value(part)
        return isinstance(value, ast.AST) and any(isinstance(inner, ast.Mod) for inner in ast.walk(value))
    return isinstance(part, ast.Mod)
