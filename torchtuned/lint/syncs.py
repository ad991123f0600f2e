"""TL007 to TL011, TL015, TL017: what must not stand in every training step.

Only where a GPU is used. In reinforcement learning the actions have to reach the environment, so only the loss itself
is looked at there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache

from .facts import constant, is_backward, last_word, names_cpu, words
from .flow import MAYBE, SURE, Flow, helpers, key
from .names import Module
from .program import Program, Step, steady
from .rules import HINT, Finding, finding

_COPIES = {"item": "TL007", "cpu": "TL008", "numpy": "TL009", "tolist": "TL009"}
_DETACHING = frozenset({"item", "detach", "detach_", "data", "cpu", "numpy", "tolist"})


def check(program: Program, module: Module) -> Iterator[Finding | None]:
    facts = program.facts(module)
    for step in _every_step(program):
        if step.module is not module:
            continue
        if facts.on_gpu:
            yield from _Waits(step, environment=facts.environment).findings()
        yield from _kept_graphs(step)
    yield from _emptied_caches(program, module)


@lru_cache(maxsize=1)
def _every_step(program: Program) -> list[Step]:
    """The program's steps, and the functions that compute their losses (each once)."""
    known = {step.owner: step for step in program.steps if step.loop is None}
    more = {step.owner: step for every in program.steps for step in helpers(every) if step.owner not in known}
    return [*program.steps, *more.values()]


class _Waits:
    """Collects the places in one step where the CPU waits for the GPU, each once."""

    def __init__(self, step: Step, *, environment: bool) -> None:
        self.flow = Flow(step)
        self.module = step.module
        self.environment = environment
        self.found: dict[ast.AST, tuple[str, str]] = {}

    def findings(self) -> Iterator[Finding | None]:
        self.flow.run(self._visit)
        for node, (code, message) in self.found.items():
            if isinstance(node, ast.expr):
                yield finding(self.module.source, node, code, message, HINT if self.flow.step.whole_epochs else "")

    def _visit(self, expression: ast.stmt | ast.expr) -> None:
        for part in self.flow.parts(expression):
            if isinstance(part, ast.Call):
                self._call(part)
            elif isinstance(part, ast.FormattedValue) and self._at_least(part.value, SURE):
                self.found.setdefault(part.value, ("TL011", f"`{_short(part.value)}` is formatted in every step"))
            elif isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod) and isinstance(constant(part.left), str):
                values = part.right.elts if isinstance(part.right, ast.Tuple) else [part.right]
                self._formatted(values)

    def _call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Attribute):
            code = _COPIES.get(function.attr, "")
            if function.attr == "to" and names_cpu(self.module, node):
                code = "TL008"
            if code and self._at_least(function.value, MAYBE):
                self.found.setdefault(node, (code, f"`{_short(node)}` waits for the GPU in every step"))
            if function.attr == "format" and isinstance(constant(function.value), str):
                self._formatted([*node.args, *(item.value for item in node.keywords)])
        elif isinstance(function, ast.Name) and len(node.args) == 1 and function.id in ("float", "int"):
            if self._at_least(node.args[0], SURE):
                self.found.setdefault(node, ("TL010", f"`{_short(node)}` waits for the GPU in every step"))
        if isinstance(function, ast.Name) and function.id == "print" and not self.module.lookup("print", node):
            self._formatted(node.args)

    def _formatted(self, values: list[ast.expr]) -> None:
        for value in values:
            if self._at_least(value, SURE):
                self.found.setdefault(value, ("TL011", f"`{_short(value)}` is formatted in every step"))

    def _at_least(self, node: ast.expr, grade: int) -> bool:
        if self.environment and key(_innermost(node)) not in self.flow.losses:
            return False
        return self.flow.grade(node) >= grade


def _innermost(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Call | ast.Attribute):
        inner = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
        if isinstance(node, ast.Attribute) and node.attr in ("data", "T"):
            inner = node.value
        if inner is None:
            return node
        node = inner
    return node


def _short(node: ast.expr) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _kept_graphs(step: Step) -> Iterator[Finding | None]:
    """`total += loss` and `losses.append(loss)` where the loss has had its backward pass in this very loop."""
    if step.loop is None:
        return
    losses = Flow(step).losses
    started = _backward_statements(step)
    for node in _every_statement(step.body):
        value, holder = _kept(node)
        name = key(value) if value is not None else ""
        if value is None or not isinstance(value, ast.Name | ast.Attribute) or name not in losses:
            continue
        if holder in losses or holder not in _made_before(step) or _without_graph(step, node, name):
            continue
        if started:
            yield finding(step.module.source, value, "TL017", f"`{holder}` keeps the autograd graph of every `{name}`")


def _backward_statements(step: Step) -> bool:
    """Whether the loop itself runs backward (not only an optimizer step after a sum of losses)."""
    return any(
        isinstance(node, ast.Call) and is_backward(step.module, node) for item in step.body for node in ast.walk(item)
    )


def _kept(node: ast.stmt) -> tuple[ast.expr | None, str]:
    """The value that a statement adds to something longer-lived, and that something."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        value: ast.expr = node.value
        while isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult | ast.Div):
            value = value.left if not isinstance(value.left, ast.Constant) else value.right
        return value, key(node.target)
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.Add):
        if key(node.targets[0]) and key(node.targets[0]) == key(node.value.left):  # total = total + loss
            return node.value.right, key(node.targets[0])
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        call = node.value
        if isinstance(call.func, ast.Attribute) and call.func.attr == "append" and len(call.args) == 1:
            return call.args[0], key(call.func.value)
    return None, ""


def _made_before(step: Step) -> set[str]:
    """Names given a number, a tensor or an empty list before the loop, and not again within it."""
    within = {
        key(t) for s in _every_statement(step.body) if isinstance(s, ast.Assign) and not _kept(s)[1] for t in s.targets
    }
    before: set[str] = set()
    line = getattr(step.loop, "lineno", 0)
    for node in ast.walk(step.owner):
        if isinstance(node, ast.Assign) and node.lineno < line:
            for target in node.targets:
                pairs = (
                    zip(target.elts, getattr(node.value, "elts", []), strict=False)
                    if isinstance(target, ast.Tuple)
                    else [(target, node.value)]
                )
                before |= {key(part) for part, value in pairs if _plain_start(step.module, value)}
    return before - within


def _plain_start(module: Module, value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):
        return isinstance(value.value, int | float)
    if isinstance(value, ast.List):
        return not value.elts
    if isinstance(value, ast.Dict):
        return all(isinstance(item, ast.List) and not item.elts for item in value.values)
    return isinstance(value, ast.Call) and module.dotted(value.func) in ("torch.zeros", "torch.tensor")


def _without_graph(step: Step, node: ast.stmt, name: str) -> bool:
    """Within no_grad, or after the name was set to something detached."""
    for up in step.module.source.ancestors(node):
        if isinstance(up, ast.With) and any(
            "no_grad" in ast.dump(item) or "inference" in ast.dump(item) for item in up.items
        ):
            return True
    for other in _every_statement(step.body):
        if isinstance(other, ast.Assign) and any(key(target) == name for target in other.targets):
            if any(last_word(part) in _DETACHING for part in ast.walk(other.value)):
                return True
        if (
            isinstance(other, ast.Expr)
            and isinstance(other.value, ast.Call)
            and last_word(other.value.func) == "detach_"
        ):
            return True
    return False


def _every_statement(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.stmt):
                yield node


def _emptied_caches(program: Program, module: Module) -> Iterator[Finding | None]:
    bodies = {id(step.body) for step in program.steps}
    for node in module.source.nodes:
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
            continue
        if module.dotted(node.value.func) not in ("torch.cuda.empty_cache", "torch.accelerator.empty_cache"):
            continue
        if _each_time(program, module, node, bodies):
            yield finding(module.source, node, "TL015", "empty_cache() in every step")


def _each_time(program: Program, module: Module, node: ast.stmt, bodies: set[int], depth: int = 2) -> bool:
    """Whether a statement runs in every step or for every batch, be it in a function of its own that cleans up."""
    inner: ast.AST = node
    for up in module.source.ancestors(node):
        inside = getattr(up, "body", None)
        if isinstance(inside, list) and id(inside) in bodies and inner in inside:
            return True
        if isinstance(up, ast.For) and inner in up.body:
            return any(word.lower().endswith("loader") for word in words(up.iter))
        if isinstance(up, ast.FunctionDef) and depth:
            places = [(m, _statement(m, call)) for m, call in program.calls.get(up, [])]
            return any(_each_time(program, m, place, bodies, depth - 1) for m, place in places)
        if isinstance(up, ast.Try) and inner not in up.body:
            return False
        if not isinstance(up, ast.With | ast.Try) and not (isinstance(up, ast.If) and steady(up.test)):
            return False
        inner = up
    return False


def _statement(module: Module, call: ast.Call) -> ast.stmt:
    return next(up for up in module.source.ancestors(call) if isinstance(up, ast.stmt))
