"""What a name means: aliases, imports and re-exports followed within the project, everything else a dotted path.

A name that may mean two things (an import in `try` and another in `except`) means nothing here: a rule that needs
certainty then stays silent.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .source import Source, Unparsed, identity, read

Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
Scope = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.Module)
_BINDING = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.arguments, ast.Import, ast.ImportFrom, ast.Global),
    *(ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr, ast.For, ast.AsyncFor, ast.comprehension, ast.withitem),
    *(ast.ExceptHandler, ast.MatchAs, ast.MatchStar, ast.Nonlocal),
)  # what _bindings knows, and what else gives names a meaning
_DEPTH = 12  # aliases of aliases; also ends circular imports


@dataclass(frozen=True, eq=False)
class Symbol:
    """Something defined in the project: a module, a class or a function."""

    module: Module
    node: ast.AST


Target = Symbol | str | None


@dataclass(frozen=True)
class Imported:
    """`from module import name` (name empty: the module itself). `level` counts the leading dots."""

    module: str
    name: str
    level: int


@dataclass(frozen=True, eq=False)
class Part:
    """One of several names unpacked from `value`."""

    value: ast.expr
    index: int


Bound = Imported | Part | ast.expr | ast.stmt | None


@dataclass(eq=False)
class Module:
    """A parsed file with its names. `bound` maps a scope to what each of its names was bound to (None: unknown)."""

    source: Source
    project: Project
    bound: dict[ast.AST, dict[str, list[Bound]]] = field(default_factory=dict)
    stars: list[Imported] = field(default_factory=list)
    imported: list[Imported] = field(default_factory=list)
    scopes: dict[ast.AST, ast.AST] = field(default_factory=dict)
    exported: dict[str, Target] = field(default_factory=dict)
    resolved: dict[tuple[ast.AST, str], Target] = field(default_factory=dict)
    attributes: dict[ast.ClassDef, dict[str, list[Bound]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.source.nodes:
            if not isinstance(node, _BINDING):
                continue
            for name, what in _bindings(node):
                self.bound.setdefault(self.scope(node), {}).setdefault(name, []).append(what)
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._note_import(node)
            elif isinstance(node, ast.Global | ast.Nonlocal):
                for name in node.names:
                    self.bound.setdefault(self.scope(node), {}).setdefault(name, []).append(None)
            elif isinstance(node, ast.arguments):
                owner = self.source.parents[node]
                every = [*node.posonlyargs, *node.args, *node.kwonlyargs, node.vararg, node.kwarg]
                for argument in every:
                    if argument is not None:
                        self.bound.setdefault(owner, {}).setdefault(argument.arg, []).append(None)

    def _note_import(self, node: ast.Import | ast.ImportFrom) -> None:
        names = self.bound.setdefault(self.scope(node), {})
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                what = Imported(node.module or "", alias.name, node.level)
            else:
                what = Imported(alias.name if alias.asname else alias.name.split(".")[0], "", 0)
                self.imported.append(Imported(alias.name, "", 0))
            self.imported.append(what)
            if alias.name == "*":
                self.stars.append(what)
            else:
                names.setdefault(alias.asname or alias.name.split(".")[0], []).append(what)

    def scope(self, node: ast.AST) -> ast.AST:
        """The function, class or module whose namespace a statement at `node` binds in."""
        if node not in self.scopes:
            self.scopes[node] = next((up for up in self.source.ancestors(node) if isinstance(up, Scope)), node)
        return self.scopes[node]

    def lookup(self, name: str, at: ast.AST) -> list[Bound]:
        """The bindings of a name seen from a place; class bodies are not seen from the functions in them."""
        return self._binding(name, at)[1]

    def _binding(self, name: str, at: ast.AST) -> tuple[ast.AST, list[Bound]]:
        scope = self.scope(at)
        while True:
            if name in self.bound.get(scope, {}):
                return scope, self.bound[scope][name]
            if isinstance(scope, ast.Module):
                return scope, []
            scope = self.scope(scope)
            while isinstance(scope, ast.ClassDef):
                scope = self.scope(scope)

    def resolve(self, node: ast.AST | None, depth: int = _DEPTH) -> Target:
        """What an expression names: a Symbol of the project, a dotted path such as "torch.optim.Adam", or None."""
        if depth <= 0 or node is None:
            return None
        if isinstance(node, ast.Attribute):
            return _member(self.resolve(node.value, depth - 1), node.attr, depth - 1)
        if isinstance(node, ast.Call):
            partial = node.args and self.dotted(node.func, depth - 1) == "functools.partial"
            return self.resolve(node.args[0], depth - 1) if partial else None
        if not isinstance(node, ast.Name):
            return None
        scope, bound = self._binding(node.id, node)
        key = (scope, node.id)
        if key not in self.resolved:
            self.resolved[key] = None  # what a name sees that is set from itself
            self.resolved[key] = self._agreed(bound, depth - 1) if bound else self._starred(node.id, depth - 1)
        return self.resolved[key]

    def _agreed(self, bound: list[Bound], depth: int) -> Target:
        """What all bindings of a name mean, if they mean the same."""
        first = self._bound_target(bound[0], depth)
        if first is None:
            return None
        return first if all(_same(first, self._bound_target(other, depth)) for other in bound[1:]) else None

    def dotted(self, node: ast.AST | None, depth: int = _DEPTH) -> str:
        """Like resolve, "" for what is not outside the project."""
        target = self.resolve(node, depth)
        return canonical(target) if isinstance(target, str) else ""

    def value(self, node: ast.AST | None, depth: int = 6) -> ast.AST | Part | None:
        """The one expression that a variable (or `self.x`) was set to; the node itself for anything else."""
        bound: list[Bound]
        if isinstance(node, ast.Name):
            bound = self.lookup(node.id, node)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            owner = next((up for up in self.source.ancestors(node) if isinstance(up, ast.ClassDef)), None)
            bound = self._attributes(owner).get(node.attr, []) if owner else []
        else:
            return node
        if len(bound) != 1 or depth <= 0:
            return None
        only = bound[0]
        if isinstance(only, Part):
            return only
        return self.value(only, depth - 1) if isinstance(only, ast.expr) else None

    def _attributes(self, owner: ast.ClassDef) -> dict[str, list[Bound]]:
        """What each `self.x` of a class is set to."""
        if owner not in self.attributes:
            found: dict[str, list[Bound]] = {}
            for name, value in _attribute_values(owner):
                found.setdefault(name, []).append(value)
            self.attributes[owner] = found
        return self.attributes[owner]

    def export(self, name: str, depth: int) -> Target:
        """What `name` means for those who import it from this module."""
        if name not in self.exported:
            self.exported[name] = None  # what a circular import sees
            self.exported[name] = self._export(name, depth)
        return self.exported[name]

    def _export(self, name: str, depth: int) -> Target:
        bound = self.bound.get(self.source.tree, {}).get(name)
        if bound:
            return self._agreed(bound, depth)
        inner = self.project.find(self, Imported(name, "", 1))
        return Symbol(inner, inner.source.tree) if inner else self._starred(name, depth)

    def _bound_target(self, what: Bound, depth: int) -> Target:
        if depth <= 0:
            return None
        if isinstance(what, Imported):
            return self._import_target(what, depth)
        if isinstance(what, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return Symbol(self, what)
        return self.resolve(what, depth) if isinstance(what, ast.expr) else None

    def _import_target(self, what: Imported, depth: int) -> Target:
        inner = self.project.find(self, what)
        if inner is not None:
            return inner.export(what.name, depth - 1) if what.name else Symbol(inner, inner.source.tree)
        if what.level:
            if what.name and not what.module:  # from . import sibling
                sibling = self.project.find(self, Imported(what.name, "", what.level))
                return Symbol(sibling, sibling.source.tree) if sibling else None
            return None
        return f"{what.module}.{what.name}" if what.name else what.module

    def _starred(self, name: str, depth: int) -> Target:
        if hasattr(builtins, name):
            return None
        for star in self.stars if depth > 0 else ():
            inner = self.project.find(self, star)
            if inner is not None and inner is not self:
                target = inner.export(name, depth - 1)
                if target is not None:
                    return target
            elif inner is None and not star.level and star.module.split(".")[0] == "torch":
                return f"{star.module}.{name}"
        return None


class Project:
    """The modules reachable from what is linted. Files are read on demand, each once; broken ones are left out."""

    def __init__(self, roots: Iterable[Path]) -> None:
        self.roots = tuple(roots)
        self.modules: dict[Path, Module] = {}
        self.errors: dict[Path, Unparsed] = {}
        self._found: dict[tuple[Path, Imported], Module | None] = {}
        self._resolved: dict[Path, Path] = {}

    def load(self, path: Path, shown: str) -> Module | None:
        """The module of a file, or None when it does not parse (see `errors`)."""
        key = self._resolve(path)
        if key not in self.modules and key not in self.errors:
            try:
                self.modules[key] = Module(read(path, shown), self)
            except Unparsed as error:
                self.errors[key] = error
        return self.modules.get(key)

    def _resolve(self, path: Path) -> Path:
        if path not in self._resolved:
            self._resolved[path] = identity(path)
        return self._resolved[path]

    def find(self, importer: Module, what: Imported) -> Module | None:
        """The project's file behind `import module` or `from module import …`; None for the outside world."""
        wanted = Imported(what.module, "", what.level)
        here = self._resolve(importer.source.path).parent
        key = (here, wanted)
        if key not in self._found:
            self._found[key] = self._search(here, wanted)
        return self._found[key]

    def _search(self, here: Path, what: Imported) -> Module | None:
        parts = what.module.split(".") if what.module else []
        if what.level:
            for _ in range(what.level - 1):
                here = here.parent
            bases: list[Path] = [here]
        elif parts:
            bases = [here, package_root(here).parent, *self.roots]
        else:
            return None
        for base in bases:
            stem = base.joinpath(*parts)
            for path in (stem.with_name(stem.name + ".py"), stem / "__init__.py"):
                if path.is_file():
                    return self.load(path, str(path))
        return None

    def imports(self, module: Module) -> Iterator[Module]:
        """The project's modules that a module imports directly."""
        for what in module.imported:
            inner = self.find(module, what)
            if inner is not None:
                yield inner
            if what.name and what.name != "*":
                dotted = f"{what.module}.{what.name}" if what.module else what.name
                sub = self.find(module, Imported(dotted, "", what.level))
                if sub is not None:
                    yield sub


def bases(node: ast.ClassDef) -> Iterator[ast.expr]:
    """The base classes as written, without their type parameters: Dataset for Dataset[int]."""
    for base in node.bases:
        yield base.value if isinstance(base, ast.Subscript) else base


def package_root(folder: Path) -> Path:
    """The topmost folder of the package that `folder` belongs to; `folder` itself outside packages."""
    while (folder / "__init__.py").is_file() and (folder.parent / "__init__.py").is_file():
        folder = folder.parent
    return folder


def canonical(dotted: str) -> str:
    """One spelling for the places that torch exports the same thing from."""
    for long, short in (
        ("torch.utils.data.dataloader.", "torch.utils.data."),
        ("torch.utils.data.dataset.", "torch.utils.data."),
        ("torch.nn.parallel.data_parallel.", "torch.nn.parallel."),
        ("torch.nn.parallel.distributed.", "torch.nn.parallel."),
        ("torch.cuda.amp.autocast_mode.", "torch.cuda.amp."),
        ("torch.cuda.amp.grad_scaler.", "torch.cuda.amp."),
        ("torch.autograd.anomaly_mode.", "torch.autograd."),
        ("torch.autograd.grad_mode.", "torch."),
        ("pytorch_lightning.", "lightning.pytorch."),
    ):
        if dotted.startswith(long):
            return short + dotted[len(long) :]
    return dotted


def _member(target: Target, name: str, depth: int) -> Target:
    if isinstance(target, str):
        return f"{target}.{name}"
    if isinstance(target, Symbol) and isinstance(target.node, ast.Module):
        return target.module.export(name, depth)
    if isinstance(target, Symbol) and isinstance(target.node, ast.ClassDef):
        for statement in target.node.body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and statement.name == name:
                return Symbol(target.module, statement)
    return None


def _same(one: Target, other: Target) -> bool:
    if isinstance(one, Symbol) and isinstance(other, Symbol):
        return one.node is other.node
    return one == other and one is not None


def _attribute_values(owner: ast.ClassDef) -> Iterator[tuple[str, Bound]]:
    for node in ast.walk(owner):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        for target in targets:
            for index, part in enumerate(_parts(target)):
                if isinstance(part, ast.Attribute) and _is_self(part.value):
                    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
                    yield part.attr, value if part is target or value is None else Part(value, index)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _parts(target: ast.expr) -> list[ast.expr]:
    return list(target.elts) if isinstance(target, ast.Tuple | ast.List) else [target]


def _bindings(node: ast.AST) -> Iterator[tuple[str, Bound]]:
    """The names that a node binds in the scope around it, imports and parameters apart."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name, node
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _target_bindings(target, node.value)
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
        yield from _target_bindings(node.target, node.value)
    elif isinstance(node, ast.AugAssign):
        yield from _target_bindings(node.target, None)
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield from _target_bindings(node.target, None)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield from _target_bindings(node.optional_vars, None)
    elif isinstance(node, ast.ExceptHandler) and node.name:
        yield node.name, None
    elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
        yield node.name, None


def _target_bindings(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[str, Bound]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple | ast.List):
        same_length = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
        for index, part in enumerate(target.elts):
            if same_length and isinstance(value, ast.Tuple | ast.List):
                yield from _target_bindings(part, value.elts[index])
            elif isinstance(part, ast.Name):
                yield part.id, Part(value, index) if value is not None else None
            elif isinstance(part, ast.Tuple | ast.List | ast.Starred):
                yield from _target_bindings(part.value if isinstance(part, ast.Starred) else part, None)
