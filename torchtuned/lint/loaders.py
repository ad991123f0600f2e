"""TL001 to TL003: how batches reach the model.

Silent where more processes would be wrong or nothing is known: iterable datasets (each worker would deliver
everything), arguments that come out of a `**` with unknown keys. Only a hint for datasets that are tensors in memory.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .facts import constant, keyword, last_word
from .names import Bound, Module, Part, Symbol, bases
from .program import Program, called, enclosing_function, innermost_loop
from .rules import HINT, Finding, finding

_LOADERS = ("torch.utils.data.DataLoader", "torchdata.stateful_dataloader.StatefulDataLoader")
_POSITIONS = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory")
_IN_MEMORY = ("torch.utils.data.TensorDataset",)
_ONCE = re.compile(r"test|predict|infer", re.IGNORECASE)
_ASIDE = re.compile(r"predict|infer|explain|importance|^test_", re.IGNORECASE)
_WRAPPERS = ("torch.utils.data.Subset", "torch.utils.data.random_split", "torch.utils.data.ConcatDataset")


@dataclass
class Arguments:
    """What a call passes by name. `open` is set when a `*` or `**` may pass more than is listed."""

    given: dict[str, ast.expr | None]
    open: bool


def check(program: Program, module: Module) -> Iterator[Finding | None]:
    if not program.facts(module).trains or module.source.for_tests:
        return
    for node in module.source.calls:
        if module.dotted(node.func) in _LOADERS:
            yield from _loader(program, module, node)


def _loader(program: Program, module: Module, node: ast.Call) -> Iterator[Finding | None]:
    facts = program.facts(module)
    if _apart(module, node) or _only_peeked_at(module, node):
        return
    arguments = _arguments(module, node)
    given = arguments.given
    kind = _dataset(program, module, given.get("dataset"))
    value = module.value(given.get("num_workers"))
    none = isinstance(value, ast.Constant) and value.value == 0 and value.value is not False
    if none or ("num_workers" not in given and not arguments.open):
        if kind != "iterable":
            said = "num_workers=0" if none else "no num_workers"
            message = f"DataLoader with {said} loads in the training process"
            # tensors that lie in memory are quickly fetched: workers may or may not pay
            yield finding(module.source, node, "TL001", message, HINT if kind in ("memory", "unknown") else "")
        return
    if "num_workers" not in given or not facts.on_gpu:
        return
    pinned = given.get("pin_memory")
    off = constant(pinned) is False if pinned is not None else "pin_memory" not in given and not arguments.open
    if off:
        yield finding(module.source, node, "TL002", "DataLoader with workers but without pinned memory, on a GPU")
    if "persistent_workers" not in given and not arguments.open and _read_again(program, module, node):
        yield finding(module.source, node, "TL003", "DataLoader starts its workers anew in every epoch")


def _arguments(module: Module, node: ast.Call) -> Arguments:
    given: dict[str, ast.expr | None] = dict(zip(_POSITIONS, node.args, strict=False))
    unknown = any(isinstance(argument, ast.Starred) for argument in node.args)
    for item in node.keywords:
        if item.arg is not None:
            given[item.arg] = item.value
            continue
        keys = _keys(module, item.value)
        unknown |= keys is None
        given |= dict.fromkeys(keys or ())
    function = module.value(node.func)
    if isinstance(function, ast.Call):  # functools.partial(DataLoader, ...)
        fixed = _arguments(module, ast.Call(func=function.args[0], args=[], keywords=function.keywords))
        given = fixed.given | given
        unknown |= fixed.open
    return Arguments(given, unknown)


def _keys(module: Module, node: ast.expr, depth: int = 6) -> set[str] | None:
    """The keys that a `**` argument may hold; None when they cannot be told, as where a name is made of itself."""
    if not depth:
        return None
    if isinstance(node, ast.IfExp):
        one, two = _keys(module, node.body, depth - 1), _keys(module, node.orelse, depth - 1)
        return None if one is None or two is None else one | two
    if isinstance(node, ast.Dict):
        keys = {constant(item) for item in node.keys}
        return {str(item) for item in keys} if all(isinstance(item, str) for item in keys) else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        return None if any(item.arg is None for item in node.keywords) else {str(item.arg) for item in node.keywords}
    if not isinstance(node, ast.Name):
        return None
    bound = module.lookup(node.id, node)
    if not bound:
        return None
    found: set[str] = set()
    for what in bound:
        keys_here = _keys(module, what, depth - 1) if isinstance(what, ast.expr) and what is not node else None
        if keys_here is None:
            return None
        found |= keys_here
    scope = enclosing_function(module, node)
    for part in ast.walk(scope):
        more = _added(module, part, node.id, depth - 1)
        if more is None:
            return None
        found |= more
    return found


def _added(module: Module, part: ast.AST, name: str, depth: int) -> set[str] | None:
    """Keys that a statement adds to the dictionary `name` (`name["x"] = …`, `name.update(…)`)."""
    if isinstance(part, ast.Subscript) and isinstance(part.value, ast.Name) and part.value.id == name:
        return {str(constant(part.slice))} if isinstance(part.ctx, ast.Store) else set()
    if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and isinstance(part.func.value, ast.Name):
        if part.func.value.id == name and part.func.attr in ("update", "setdefault"):
            argument = part.args[0] if part.args else None
            if isinstance(argument, ast.Name) and argument.id == name:
                return None
            named = {item.arg for item in part.keywords}
            keys = _keys(module, argument, depth) if argument is not None else set()
            return None if keys is None or None in named else keys | {str(item) for item in named}
    return set()


def _dataset(program: Program, module: Module, node: Bound, depth: int = 6) -> str:
    """ "memory" or "iterable" where workers would not help, "unknown" where whoever calls decides and nobody in the
    project does, "" otherwise. One such of several values is enough."""
    if node is None or not depth:
        return ""
    if isinstance(node, ast.Name):
        bound = module.lookup(node.id, node)
        known = _first(_dataset(program, module, value, depth - 1) for value in bound)
        passed = "" if known else _passed(program, module, node, depth - 1)
        return known or ("" if passed == "unknown" and len(bound) > 1 else passed)
    if isinstance(node, Part):
        return _dataset(program, module, node.value, depth - 1)
    if isinstance(node, ast.Attribute):
        value = module.value(node)
        return (
            _dataset(program, module, value, depth - 1)
            if isinstance(value, Part | ast.expr) and value is not node
            else ""
        )
    if isinstance(node, ast.Subscript):
        return _dataset(program, module, node.value, depth - 1)
    if isinstance(node, ast.IfExp):
        return _first(_dataset(program, module, part, depth - 1) for part in (node.body, node.orelse))
    if isinstance(node, ast.List | ast.Tuple | ast.ListComp):
        return "memory"
    return _made(program, module, node, depth - 1) if isinstance(node, ast.Call) else ""


def _passed(program: Program, module: Module, node: ast.Name, depth: int) -> str:
    """What the callers of a function pass for one of its parameters."""
    function = enclosing_function(module, node)
    if not isinstance(function, ast.FunctionDef):
        return ""
    names = [item.arg for item in (*function.args.posonlyargs, *function.args.args)]
    if node.id not in names:
        return ""
    index = names.index(node.id) - (names[0] in ("self", "cls"))
    passed = []
    for caller, call in program.calls.get(function, []):
        by_name = keyword(call, node.id)
        at_place = call.args[index] if 0 <= index < len(call.args) else None
        passed.append((caller, by_name or at_place))
    if not passed:
        return "unknown"
    return _first(_dataset(program, caller, argument, depth) for caller, argument in passed)


def _made(program: Program, module: Module, node: ast.Call, depth: int) -> str:
    dotted = module.dotted(node.func)
    if dotted in _WRAPPERS and node.args:
        return _dataset(program, module, node.args[0], depth)
    if dotted in _IN_MEMORY or (dotted.startswith(("torch.", "numpy.")) and not dotted.startswith("torch.utils")):
        return "memory"
    if isinstance(node.func, ast.Name) and node.func.id in ("list", "zip", "range"):
        return "memory"
    target = module.resolve(node.func)
    if isinstance(target, Symbol) and isinstance(target.node, ast.ClassDef):
        return _own_dataset(target, depth)
    if isinstance(node.func, ast.Attribute):  # Pictures.from_folder(...)
        maker = module.resolve(node.func.value)
        if isinstance(maker, Symbol) and isinstance(maker.node, ast.ClassDef):
            return _own_dataset(maker, depth)
    function = called(module, node)
    if function is None:
        return ""
    returned = [part.value for part in ast.walk(function.node) if isinstance(part, ast.Return)]
    return _first(_returned(program, function.module, value, depth) for value in returned)


def _returned(program: Program, module: Module, value: ast.expr | None, depth: int) -> str:
    """A function may return several datasets at once."""
    if isinstance(value, ast.Tuple):
        return _first(_dataset(program, module, part, depth) for part in value.elts)
    return _dataset(program, module, value, depth)


def _first(kinds: Iterable[str]) -> str:
    return next((kind for kind in kinds if kind), "")


def _own_dataset(target: Symbol, depth: int) -> str:
    node = target.node
    if not isinstance(node, ast.ClassDef) or not depth:
        return ""
    methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    get = methods.get("__getitem__")
    if "__iter__" in methods:
        return "iterable"
    if get is not None:
        calls = [part for part in ast.walk(get) if isinstance(part, ast.Call)]
        return "" if any(not _cheap(call) for call in calls) else "memory"
    for base in bases(node):
        if target.module.dotted(base) == "torch.utils.data.IterableDataset":
            return "iterable"
        inner = target.module.resolve(base)
        kind = _own_dataset(inner, depth - 1) if isinstance(inner, Symbol) else ""
        if kind:
            return kind
    return ""


def _cheap(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in (
        "len",
        "int",
        "slice",
        "min",
        "max",
        "isinstance",
        "tensor",
        "as_tensor",
        "from_numpy",
        "long",
        "float",
    )


def _apart(module: Module, node: ast.Call) -> bool:
    """Loaders that only look at the data, or are made for one prediction."""
    parent = module.source.parents.get(node)
    if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name) and parent.func.id in ("next", "iter"):
        return True
    return bool(_ASIDE.search(getattr(enclosing_function(module, node), "name", "")))


def _only_peeked_at(module: Module, node: ast.Call) -> bool:
    """Whether all that happens to a loader is `next(iter(loader))`: workers would be started for one batch."""
    parent = module.source.parents.get(node)
    target = parent.targets[0] if isinstance(parent, ast.Assign) else None
    if not isinstance(target, ast.Name):
        return False
    named = [n for n in module.source.nodes if isinstance(n, ast.Name) and n.id == target.id]
    uses = [module.source.parents[n] for n in named if isinstance(n.ctx, ast.Load)]
    return bool(uses) and all(isinstance(use, ast.Call) and last_word(use.func) == "iter" for use in uses)


def _read_again(program: Program, module: Module, node: ast.Call) -> bool:
    """Whether the same loader is read more than once, as far as can be told."""
    if not program.facts(module).epochs or innermost_loop(module, node) is not None:
        return False
    parent = module.source.parents.get(node)
    target = parent.targets[0] if isinstance(parent, ast.Assign) else None
    function = enclosing_function(module, node)
    if not isinstance(target, ast.Name):
        name = f"{getattr(target, 'attr', '')} {getattr(function, 'name', '')}"
        return not _ONCE.search(name)
    if any(isinstance(what, ast.Call) and innermost_loop(module, what) for what in module.lookup(target.id, node)):
        return False  # made anew on the way
    uses = [
        part
        for part in ast.walk(function)
        if isinstance(part, ast.Name) and part.id == target.id and isinstance(part.ctx, ast.Load)
    ]
    inside = [use for use in uses if enclosing_function(module, use) is function]
    if any(innermost_loop(module, use) is not None for use in inside):
        return True
    if any(program.repeated(module, use) for use in uses if use not in inside):
        return True
    return not _ONCE.search(target.id) and any(not _iterated(module, use) for use in inside)


def _iterated(module: Module, use: ast.AST) -> bool:
    """Whether a use is what a loop runs over (or a question of its length), not something handed on."""
    for up in module.source.ancestors(use):
        if isinstance(up, ast.For):
            return any(part is use for part in ast.walk(up.iter))
        if isinstance(up, ast.Call) and isinstance(up.func, ast.Name) and up.func.id in ("len", "next", "iter"):
            return True
        if isinstance(up, ast.stmt):
            return False
    return False
