"""The linted files as one program: who imports and calls whom, which code runs in every training step.

A step is the innermost loop around a backward pass or an optimizer step, or a function that holds a backward pass and
is itself called in a loop. Code in it that stands under a condition is not in *every* step, and rules leave it alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from .facts import Facts, collect, constant, is_backward, is_lightning, last_word, words
from .names import Function, Module, Project, Symbol, bases

Loop = (ast.For, ast.AsyncFor, ast.While)
# Conditions that hold in all steps of a run or in none: precision, device, rank, phase. Not so: every N steps, debug.
_STEADY = re.compile(
    r"scaler|amp$|fp16|bf16|half|cuda|device|gpu|train|phase|mode|rank|main_process|distributed|ddp|world_size|mixed_precision|"
    r"^(args?|opts?|config|cfg|hparams|params|self|is_available|torch|accelerator|hasattr|isinstance)$",
    re.IGNORECASE,
)
_EPOCHS = re.compile(r"(?<!per)(?<!per_)epochs?$", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Step:
    """Code that runs once or more in every training step: a loop's or a function's body."""

    module: Module
    owner: ast.AST  # the function (or module) that the code belongs to
    body: list[ast.stmt]
    loop: ast.AST | None
    whole_epochs: bool = False  # a step is an epoch: everything at once, and then one figure per step is what one wants
    losses: frozenset[str] = frozenset()  # names known to be losses without a backward pass in the body


class Program:
    """All modules loaded for one run of the linter."""

    def __init__(self, project: Project) -> None:
        self.project = project
        todo = list(project.modules.values())
        self.uses: dict[Module, set[Module]] = {}
        while todo:
            module = todo.pop()
            if module not in self.uses:
                self.uses[module] = set(project.imports(module))
                todo.extend(self.uses[module])
        self._facts = {module: collect(module) for module in self.uses}
        self._joined: dict[Module, Facts] = {}
        self._repeated: dict[ast.AST, bool] = {}
        self._often: dict[ast.AST, bool] = {}

    def facts(self, module: Module) -> Facts:
        """The facts of all programs that a module is part of: what it imports, and what those import that import it."""
        if module not in self._joined:
            users = _reached({module}, self._users)
            facts = Facts()
            for part in _reached(users, self.uses):
                facts.join(self._facts[part])
            self._joined[module] = facts
        return self._joined[module]

    @cached_property
    def _users(self) -> dict[Module, set[Module]]:
        users: dict[Module, set[Module]] = {module: set() for module in self.uses}
        for module, used in self.uses.items():
            for one in used:
                users[one].add(module)
        return users

    @cached_property
    def calls(self) -> dict[ast.AST, list[tuple[Module, ast.Call]]]:
        """Where each function of the project is called."""
        found: dict[ast.AST, list[tuple[Module, ast.Call]]] = {}
        for module in self.uses:
            for node in module.source.calls:
                function = called(module, node)
                if function is not None:
                    found.setdefault(function.node, []).append((module, node))
        return found

    @cached_property
    def steps(self) -> list[Step]:
        """All code that runs in every training step, outermost first within a file."""
        found: dict[ast.AST, Step] = {}
        seeds: list[tuple[Module, ast.AST]] = []
        for module in self.uses:
            for node in module.source.nodes:
                if isinstance(node, ast.Call) and (is_backward(module, node) or is_optimizer_step(module, node)):
                    seeds.append((module, node))
                elif isinstance(node, ast.ClassDef) and is_lightning(module, node):
                    for item in node.body:
                        if isinstance(item, ast.FunctionDef) and item.name == "training_step":
                            found[item] = Step(module, item, item.body, None)
        seen: set[ast.AST] = set()
        while seeds:
            module, node = seeds.pop()
            loop = innermost_loop(module, node)
            if loop is not None:
                owner = enclosing_function(module, loop)
                found.setdefault(loop, Step(module, owner, loop.body, loop, _epochs(loop)))
                continue
            function = enclosing_function(module, node)
            if function in seen or not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            seen.add(function)
            callers = self.calls.get(function, [])
            seeds.extend(callers)
            if any(self.repeated(caller, call) for caller, call in callers):
                loops = [innermost_loop(caller, call) for caller, call in callers]
                epochs = any(_epochs(one) for one in loops if one is not None)
                found.setdefault(function, Step(module, function, function.body, None, epochs))
        return list(found.values())

    def repeated(self, module: Module, node: ast.AST) -> bool:
        """Whether a place runs many times: in a loop, in a module's forward, in a function called from such a place."""
        function = enclosing_function(module, node)
        if getattr(function, "name", "") == "__init__":
            return False  # building a model takes as many turns as it has layers
        if innermost_loop(module, node) is not None:
            return True
        if function not in self._repeated:
            self._repeated[function] = False  # what recursion sees
            often = getattr(function, "name", "") in ("forward", "training_step")
            self._repeated[function] = often or any(self.repeated(m, c) for m, c in self.calls.get(function, []))
        return self._repeated[function]

    def often(self, module: Module, node: ast.AST) -> bool:
        """Like repeated, but neither once per epoch nor in a loop of a few turns that its author counted out."""
        function = enclosing_function(module, node)
        if getattr(function, "name", "") == "__init__":
            return False
        loop = innermost_loop(module, node)
        while loop is not None:
            if not _epochs(loop) and not _few_turns(loop):
                return True
            loop = innermost_loop(module, loop)
        if function not in self._often:
            self._often[function] = False  # what recursion sees
            forward = getattr(function, "name", "") in ("forward", "training_step")
            self._often[function] = forward or any(self.often(m, c) for m, c in self.calls.get(function, []))
        return self._often[function]


def _reached(start: set[Module], edges: dict[Module, set[Module]]) -> set[Module]:
    seen = set(start)
    todo = list(start)
    while todo:
        more = edges[todo.pop()] - seen
        seen |= more
        todo.extend(more)
    return seen


def called(module: Module, call: ast.Call) -> Symbol | None:
    """The project's function behind a call: a plain name, `self.method`, or a method of an object made here."""
    target = module.resolve(call.func)
    if target is None and isinstance(call.func, ast.Attribute):
        holder = _class_of(module, call.func.value)
        target = _method(holder, call.func.attr) if holder else None
    if isinstance(target, Symbol) and isinstance(target.node, Function):
        return target
    return None


def _class_of(module: Module, node: ast.expr) -> Symbol | None:
    if isinstance(node, ast.Name) and node.id in ("self", "cls"):
        owner = next((up for up in module.source.ancestors(node) if isinstance(up, ast.ClassDef)), None)
        return Symbol(module, owner) if owner else None
    value = module.value(node)
    target = module.resolve(value.func) if isinstance(value, ast.Call) else None
    return target if isinstance(target, Symbol) and isinstance(target.node, ast.ClassDef) else None


def _method(holder: Symbol, name: str, depth: int = 4) -> Symbol | None:
    if not isinstance(holder.node, ast.ClassDef) or not depth:
        return None
    for item in holder.node.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item.name == name:
            return Symbol(holder.module, item)
    for base in bases(holder.node):
        target = holder.module.resolve(base)
        found = _method(target, name, depth - 1) if isinstance(target, Symbol) else None
        if found:
            return found
    return None


def is_optimizer_step(module: Module, node: ast.Call) -> bool:
    """`optimizer.step()`, `scaler.step(optimizer)`: told by the name, as schedulers and environments step too."""
    if not isinstance(node.func, ast.Attribute) or node.func.attr != "step":
        return False
    name = last_word(node.func.value).lower()
    return "optim" in name or name in ("opt", "opt_g", "opt_d") or ("scaler" in name and bool(node.args))


def enclosing_function(module: Module, node: ast.AST) -> ast.AST:
    """The function whose run executes `node`. A function defined within a loop (a closure for the optimizer) counts as
    part of the code around it."""
    last: ast.AST = module.source.tree
    for up in module.source.ancestors(node):
        if isinstance(up, Function) and not _in_loop(module, up):
            return up
        last = up
    return last


def _in_loop(module: Module, function: ast.AST) -> bool:
    for up in module.source.ancestors(function):
        if isinstance(up, Loop):
            return True
        if isinstance(up, (*Function, ast.ClassDef)):
            return False
    return False


def innermost_loop(module: Module, node: ast.AST) -> ast.For | ast.AsyncFor | ast.While | None:
    """The nearest loop around `node` in the same function, if `node` stands in its body."""
    inner = node
    for up in module.source.ancestors(node):
        if isinstance(up, ast.For | ast.AsyncFor | ast.While) and inner in up.body:
            return up
        if isinstance(up, ast.ClassDef) or (isinstance(up, Function) and not _in_loop(module, up)):
            return None
        inner = up
    return None


def _epochs(loop: ast.AST) -> bool:
    """Whether a loop counts epochs: by its variable, or by what it runs to (not: steps *per* epoch)."""
    about = loop.target if isinstance(loop, ast.For) else getattr(loop, "test", None)
    if about is not None and any("epoch" in word.lower() for word in words(about)):
        return True
    counted = [part for part in ast.walk(loop.iter) if isinstance(part, ast.Call)] if isinstance(loop, ast.For) else []
    ends = [end for call in counted if last_word(call.func) in ("range", "trange") for end in call.args]
    return any(_EPOCHS.search(word) for end in ends for word in words(end))


def _few_turns(loop: ast.AST) -> bool:
    """`for _ in range(25)`."""
    over = loop.iter if isinstance(loop, ast.For) else None
    if not isinstance(over, ast.Call) or last_word(over.func) != "range" or len(over.args) != 1:
        return False
    end = constant(over.args[0])
    return isinstance(end, int) and end <= 100


def steady(test: ast.expr) -> bool:
    """Whether a condition is the same for all steps of a run, as far as its words tell."""
    for part in ast.walk(test):
        if isinstance(part, ast.BinOp) or (isinstance(part, ast.Compare) and _counts(part)):
            return False
    every = list(words(test))
    return bool(every) and all(_STEADY.search(word) for word in every)


def holds_step(module: Module, test: ast.expr, branch: list[ast.stmt]) -> bool:
    """Whether a branch is one of several ways to take the step: backward stands in it, and nothing counts steps."""
    for part in ast.walk(test):
        if isinstance(part, ast.Mod) or (isinstance(part, ast.Compare) and _counts(part)):
            return False
    return any(is_backward(module, call) for call in loop_calls(branch))


def _counts(test: ast.Compare) -> bool:
    ordered = any(isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for op in test.ops)
    return ordered and not any("rank" in word or "world" in word or "gpu" in word for word in words(test))


def skips_rest(statement: ast.stmt) -> bool:
    """`if i % 10: continue`: what follows it in the loop does not run in every step."""
    if not isinstance(statement, ast.If) or not statement.body:
        return False
    periodic = any(isinstance(part, ast.Mod) for part in ast.walk(statement.test))
    return periodic and isinstance(statement.body[-1], ast.Continue | ast.Return)


def unconditional(module: Module, node: ast.AST) -> bool:
    """Whether a statement runs whenever its file or function does: no `if` but `__main__`, no except handler."""
    inner = node
    for up in module.source.ancestors(node):
        if isinstance(up, ast.If) and inner is not up.test:
            names = set(words(up.test))
            if "__name__" not in names:
                return False
        if isinstance(up, ast.ExceptHandler | ast.IfExp):
            return False
        inner = up
    return True


def loop_calls(body: list[ast.stmt]) -> Iterator[ast.Call]:
    """All calls in a list of statements."""
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call):
                yield node


def is_true(node: ast.AST | None) -> bool:
    return constant(node) is True
