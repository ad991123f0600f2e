"""Which variables hold tensors of the model while a training step runs, followed statement by statement.

Two grades: SURE, the loss and what arithmetic and tensor methods make of it; MAYBE, results of unknown calls on such
tensors. `.item()` on MAYBE must be a tensor anyway; `float()` and `print()` also take numbers, so they need SURE.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator

from .facts import constant, is_backward, names_cpu, names_device
from .names import Function, Module
from .program import Loop, Step, called, holds_step, skips_rest, steady

NO, MAYBE, SURE = 0, 1, 2
# Tensor methods and attributes whose result is not a tensor on the GPU
_LEAVES = frozenset(
    "item cpu numpy tolist size dim numel nelement data_ptr element_size type stride ndimension get_device keys"
    " backward is_contiguous requires_grad_ register_hook __len__ index count".split()
)
_PLAIN = frozenset("shape dtype device ndim requires_grad is_cuda is_leaf grad_fn name layout itemsize".split())
_BUILTINS = frozenset(
    "len int float str bool isinstance print range type id format round repr hasattr callable".split()
)
_PASSING = frozenset("zip enumerate list tuple dict sum max min abs sorted reversed next iter set map filter".split())
_FOREIGN = ("numpy", "time", "random", "math", "os", "datetime", "json", "sys", "wandb", "sklearn")


def key(node: ast.AST) -> str:
    """ "loss", "self.loss"; a subscript counts as its container; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = key(node.value)
        return f"{base}.{node.attr}" if base else ""
    if isinstance(node, ast.Subscript):
        return key(node.value)
    return ""


def method(node: ast.AST) -> str:
    """The name of the method (or of the module's function) that a call calls, "" for anything else."""
    return node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""


def models(module: Module) -> frozenset[str]:
    """Names that are treated as models: put into a mode, asked for parameters, or called what everybody calls them."""
    found = {"model", "net", "self.model", "self.net"}
    for node in module.source.nodes:
        if isinstance(node, ast.Attribute) and node.attr in ("train", "eval", "parameters", "named_parameters"):
            found.add(key(node.value))
    return frozenset(found - {"", "self"})


def loss_expression(module: Module, call: ast.Call) -> ast.expr | None:
    """The tensor that a backward call starts from."""
    function = call.func
    if isinstance(function, ast.Attribute) and function.attr == "backward":
        inner = function.value
        if isinstance(inner, ast.Call) and method(inner) == "scale":
            return inner.args[0] if inner.args else None
        if not call.args or isinstance(inner, ast.Call | ast.BinOp) or _holds_loss(module, inner):
            return inner
    return call.args[0] if call.args else None


def _holds_loss(module: Module, node: ast.expr) -> bool:
    return "loss" in key(node).lower() or "err" in key(node).lower()


def helpers(step: Step) -> Iterator[Step]:
    """The project's functions that compute the step's loss: what stands in them runs in every step as well."""
    losses = Flow(step).losses
    lightning = getattr(step.owner, "name", "") == "training_step"
    for node in (node for statement in step.body for node in ast.walk(statement)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            call, target = node.value, node.targets[0]
        elif lightning and isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
            call, target = node.value, None
        else:
            continue
        function = called(step.module, call)
        if function is not None and isinstance(function.node, ast.FunctionDef):
            returned = _returned_losses(function.node, target, losses)
            if returned:
                yield Step(function.module, function.node, function.node.body, None, step.whole_epochs, returned)


def _returned_losses(function: ast.FunctionDef, target: ast.expr | None, losses: frozenset[str]) -> frozenset[str]:
    """The names in which a function returns what its caller calls the loss (target None: all that it returns)."""
    found: set[str] = set()
    for value in (node.value for node in ast.walk(function) if isinstance(node, ast.Return)):
        if isinstance(value, ast.Tuple) and isinstance(target, ast.Tuple):
            found |= {key(one) for one, to in zip(value.elts, target.elts, strict=False) if key(to) in losses}
        elif value is not None and (target is None or key(target) in losses):
            found.add(key(value))
    return frozenset(found - {""})


class Flow:
    """Walks the function that a step belongs to and calls `visit(expression, grade lookup)` for code of every step."""

    def __init__(self, step: Step) -> None:
        self.step, self.module = step, step.module
        self.state: dict[str, int] = {}
        owner = step.owner
        self.body: list[ast.stmt] = getattr(owner, "body", []) if not isinstance(owner, ast.Lambda) else []
        self.losses = self._losses() | step.losses
        if isinstance(owner, ast.FunctionDef) and owner.name == "training_step":
            self.losses |= {key(node.value) for node in ast.walk(owner) if isinstance(node, ast.Return) and node.value}
            self.losses -= {""}
            self.state = {argument.arg: MAYBE for argument in owner.args.args[1:2]}
        self.models = models(step.module)
        self.seeds = self._slice()
        self.visit: Callable[[ast.stmt | ast.expr], None] | None = None

    def _losses(self) -> frozenset[str]:
        found = set()
        for statement in self.step.body:
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and is_backward(self.module, node):
                    expression = loss_expression(self.module, node)
                    if expression is not None and key(expression):
                        found.add(key(expression))
                    elif isinstance(expression, ast.BinOp):
                        found |= {key(part) for part in ast.walk(expression) if isinstance(part, ast.Name)}
        return frozenset(found)

    def _slice(self) -> frozenset[str]:
        """The loss, and what it was computed from where that was itself computed (model outputs, not batches)."""
        assigned: dict[str, list[ast.expr]] = {}
        for statement in self.step.body:
            for node in ast.walk(statement):
                if isinstance(node, ast.Assign):
                    for target in node.targets:
                        for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                            assigned.setdefault(key(part), []).append(node.value)
        found, todo = set(self.losses), list(self.losses)
        for _ in range(3):
            following: list[str] = []
            for name in todo:
                for value in assigned.get(name, []):
                    for part in _sources(value):
                        other = key(part)
                        computed = any(self._computes(v) for v in assigned.get(other, []))
                        if other and other not in found and computed:
                            found.add(other)
                            following.append(other)
            todo = following
        return frozenset(found)

    def _computes(self, value: ast.expr) -> bool:
        if isinstance(value, ast.BinOp):
            return self._computes(value.left) or self._computes(value.right)
        if isinstance(value, ast.Subscript | ast.Attribute):
            return self._computes(value.value)
        if not isinstance(value, ast.Call) or self._foreign(value):
            return False
        if isinstance(value.func, ast.Name) and value.func.id in (_BUILTINS | _PASSING) - {"sum"}:
            return False
        return method(value) not in _LEAVES | {"get", "pop", "next"}

    def _foreign(self, call: ast.Call) -> bool:
        return self.module.dotted(call.func).split(".")[0] in _FOREIGN

    # the walk

    def run(self, visit: Callable[[ast.stmt | ast.expr], None]) -> None:
        """Call `visit` for every expression that runs in each step, in order, with `grade()` valid at that point."""
        loop = self.step.loop
        if loop is None:
            self.visit = visit
            self._block(self.step.body)
            return
        before = [s for s in self.body if s.lineno < getattr(loop, "lineno", 0)]
        self._block([s for s in before if (s.end_lineno or s.lineno) < getattr(loop, "lineno", 0)])
        self._block(self.step.body)  # once for the state that the loop itself makes
        self.visit = visit
        self._block(self.step.body)

    def _block(self, body: Iterable[ast.stmt]) -> None:
        visit = self.visit
        for statement in body:
            self._statement(statement)
            if skips_rest(statement):
                self.visit = None
        self.visit = visit

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.If):
            self._look(node.test)
            visit, before = self.visit, dict(self.state)
            always = steady(node.test)
            self.visit = visit if always or holds_step(self.module, node.test, node.body) else None
            self._block(node.body)
            after, self.state = self.state, dict(before)
            self.visit = visit if always or holds_step(self.module, node.test, node.orelse) else None
            self._block(node.orelse)
            self._merge(after)
            self.visit = visit
        elif isinstance(node, Loop):
            self._loop(node)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                self._look(item.context_expr)
            self._block(node.body)
        elif isinstance(node, ast.Try):
            self._block(node.body)
            visit, self.visit = self.visit, None
            for handler in node.handlers:
                self._block(handler.body)
            self.visit = visit
            self._block([*node.orelse, *node.finalbody])
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._block(node.body)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            self._look(node.value)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._assign(target, node.value)
        elif isinstance(node, ast.AugAssign):
            self._look(node.value)
            name = key(node.target)
            grade = self.grade(node.value)
            if name and grade:
                self.state[name] = max(self.state.get(name, NO), grade)
        elif isinstance(node, ast.Expr | ast.Return):
            if node.value is not None:
                self._look(node.value)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and is_backward(self.module, node.value):
                expression = loss_expression(self.module, node.value)
                if expression is not None and key(expression) in self.losses:
                    self.state[key(expression)] = SURE
        # nothing of assert and raise: a check that somebody asked for

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        self._look(node.test if isinstance(node, ast.While) else node.iter)
        if not isinstance(node, ast.While):
            self._bind_items(node.target, node.iter)
        before = dict(self.state)
        self._block(node.body)
        self._merge(before)

    def _bind_items(self, target: ast.expr, iterable: ast.expr) -> None:
        grade = min(self.grade(iterable), MAYBE)
        parts = target.elts if isinstance(target, ast.Tuple) else [target]
        for part in parts[-1:] if method(iterable) == "items" else parts:
            self._set(part, grade)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        grade = self.grade(value)
        if isinstance(target, ast.Tuple | ast.List):
            values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
            for index, part in enumerate(target.elts):
                if len(values) == len(target.elts):
                    self._assign(part, values[index])
                elif key(part) in self.losses:
                    self._set(part, SURE if self._computes(value) else grade)
                else:
                    self._set(part, min(max(grade, self._seeded(part, value)), MAYBE))
            return
        self._set(target, max(grade, self._seeded(target, value)))

    def _seeded(self, target: ast.expr, value: ast.expr) -> int:
        name = key(target)
        if name not in self.seeds or not self._computes(value):
            return NO
        modelled = isinstance(value, ast.Call) and key(value.func) in self.models
        return SURE if name in self.losses or modelled else MAYBE

    def _set(self, target: ast.expr, grade: int) -> None:
        name = key(target.value if isinstance(target, ast.Starred) else target)
        if not name:
            return
        if isinstance(target, ast.Subscript):
            self.state[name] = max(self.state.get(name, NO), min(grade, MAYBE))
        else:
            for known in [k for k in self.state if k.startswith(name + ".")]:
                del self.state[known]
            self.state[name] = grade

    def _merge(self, other: dict[str, int]) -> None:
        for name in set(other) | set(self.state):
            both = {grades[name] for grades in (other, self.state) if name in grades}
            self.state[name] = NO if both == {NO, SURE} else max(both)  # a number on one way: print() may be harmless

    def _look(self, node: ast.expr) -> None:
        if self.visit is not None:
            self.visit(node)

    # grades of expressions

    def grade(self, node: ast.AST | None) -> int:
        """How sure it is that an expression gives a tensor where the model lives."""
        if isinstance(node, ast.Name | ast.Attribute):
            return self._name(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.BinOp):
            return max(self.grade(node.left), self.grade(node.right))
        if isinstance(node, ast.UnaryOp):
            return NO if isinstance(node.op, ast.Not) else self.grade(node.operand)
        if isinstance(node, ast.Compare):
            identity = any(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in node.ops)
            return NO if identity else max(map(self.grade, [node.left, *node.comparators]))
        if isinstance(node, ast.Subscript):
            container = self.grade(node.value)
            return container if constant(node.slice) is None or container == NO else min(container, MAYBE)
        if isinstance(node, ast.IfExp):
            return min(max(self.grade(node.body), self.grade(node.orelse)), MAYBE)
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return min(max(map(self.grade, node.elts), default=NO), MAYBE)
        if isinstance(node, ast.Dict):
            return min(max(map(self.grade, node.values), default=NO), MAYBE)
        if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp):
            return self._comprehension(node.elt, node.generators)
        if isinstance(node, ast.DictComp):
            return self._comprehension(node.value, node.generators)
        if isinstance(node, ast.NamedExpr | ast.Starred):
            return self.grade(node.value)
        return NO

    def _name(self, node: ast.Name | ast.Attribute) -> int:
        if key(node) in self.state:
            return self.state[key(node)]
        if not isinstance(node, ast.Attribute) or node.attr in _PLAIN:
            return NO
        grade = self.grade(node.value)
        return grade if node.attr in ("data", "T", "grad", "mT", "real") else min(grade, MAYBE)

    def _call(self, node: ast.Call) -> int:
        function = node.func
        arguments = [*node.args, *(item.value for item in node.keywords)]
        if isinstance(function, ast.Name) and function.id in _BUILTINS | _PASSING:
            return min(max(map(self.grade, arguments), default=NO), MAYBE) if function.id in _PASSING else NO
        if self._foreign(node):
            return NO
        if isinstance(function, ast.Attribute):
            if function.attr in _LEAVES:
                return NO
            if function.attr in ("to", "cuda"):
                if function.attr == "cuda" or names_device(self.module, node):
                    return MAYBE
                return NO if names_cpu(self.module, node) else self.grade(function.value)
            receiver = self.grade(function.value)
            if receiver:
                return receiver if not isinstance(function.value, ast.Subscript) else MAYBE
        torch_function = self.module.dotted(function).startswith("torch.")
        grade = max(map(self.grade, arguments), default=NO)
        return grade if torch_function else min(grade, MAYBE)

    def parts(self, node: ast.AST) -> Iterator[ast.AST]:
        """An expression's parts, with the variables of comprehensions known while their parts are given out, and
        without the bodies of lambdas, which run later or never."""
        if isinstance(node, Function):
            return
        yield node
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            before = dict(self.state)
            for item in node.generators:
                self._bind_items(item.target, item.iter)
            for child in ast.iter_child_nodes(node):
                yield from self.parts(child)
            self.state = before
        else:
            for child in ast.iter_child_nodes(node):
                yield from self.parts(child)

    def _comprehension(self, element: ast.expr, generators: list[ast.comprehension]) -> int:
        before = dict(self.state)
        for item in generators:
            self._bind_items(item.target, item.iter)
        grade = self.grade(element)
        self.state = before
        return min(grade, MAYBE)


def _sources(value: ast.expr) -> Iterator[ast.expr]:
    """What a value is computed from: operands, arguments, the objects whose methods are called."""
    if isinstance(value, ast.Name | ast.Attribute):
        yield value
        if isinstance(value, ast.Attribute):
            yield from _sources(value.value)
    elif isinstance(value, ast.Subscript | ast.Starred):
        yield from _sources(value.value)
    elif isinstance(value, ast.BinOp):
        yield from _sources(value.left)
        yield from _sources(value.right)
    elif isinstance(value, ast.GeneratorExp | ast.ListComp):
        yield from _sources(value.elt)
        for item in value.generators:
            yield from _sources(item.iter)
    elif isinstance(value, ast.Call):
        if isinstance(value.func, ast.Attribute):
            yield from _sources(value.func.value)
        for argument in [*value.args, *(item.value for item in value.keywords)]:
            yield from _sources(argument)
