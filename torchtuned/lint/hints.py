"""TL101 to TL107: things that often help and are not faults. One of a kind per file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .facts import constant, is_backward, keyword
from .names import Module
from .program import Program
from .rules import Finding, finding

_OPTIMIZERS = re.compile(r"torch\.optim\.(adam\.|adamw\.|sgd\.)?(Adam|AdamW|SGD)$")
_ANY_OPTIMIZER = re.compile(r"torch\.optim\.(\w+\.)?[A-Z]\w+$")
_CONVOLUTION = re.compile(r"torch\.nn\.Conv[123]d$|torchvision\.models\.\w*(net|inception|vgg)\w*$", re.IGNORECASE)
_TOO_LARGE = re.compile(
    r"out of (gpu |cuda )?memory|\bOOM\b|(reduce|lower|decrease|smaller) (the )?batch|"
    r"(does ?n.t|does not|won.t|can ?not|can.t) fit\b.*\b(gpu|memory|v?ram|card|batch)|"
    r"\b(gpu|memory|v?ram|card|batch)\b.*(does ?n.t|does not|won.t|can ?not|can.t) fit",
    re.IGNORECASE,
)


def check(program: Program, module: Module) -> Iterator[Finding | None]:
    facts = program.facts(module)
    if not facts.trains:
        return
    calls = module.source.calls
    backward = next((node for node in calls if is_backward(module, node)), None)
    frameworks = facts.lightning or facts.accelerate or facts.own_loop
    if backward is not None and facts.on_gpu and not frameworks:
        if not facts.low_precision:
            yield finding(module.source, backward, "TL101", "training on a GPU in float32")
        if not facts.compiled:
            yield finding(module.source, backward, "TL105", "the model is not compiled")
    yield from _optimizers(module, calls, on_gpu=facts.on_gpu)
    first = next((node for node in calls if _ANY_OPTIMIZER.match(module.dotted(node.func))), None)
    if first is not None and not facts.scheduled:
        yield finding(module.source, first, "TL107", "the learning rate stays as it is")
    convolution = next((n for n in calls if _CONVOLUTION.match(module.dotted(n.func))), None)
    if (
        convolution is not None
        and facts.on_gpu
        and not facts.benchmark
        and not facts.graph_safe
        and not facts.lightning
    ):
        yield finding(module.source, convolution, "TL104", "convolutions without cudnn.benchmark")
    if not facts.accumulates:
        yield _too_large(module)


def _optimizers(module: Module, calls: tuple[ast.Call, ...], *, on_gpu: bool) -> Iterator[Finding | None]:
    for node in calls:
        match = _OPTIMIZERS.match(module.dotted(node.func))
        if not match or any(item.arg is None for item in node.keywords):
            continue
        decay = keyword(node, "weight_decay") or (node.args[4] if len(node.args) > 4 else None)
        if match[2] == "Adam" and decay is not None and constant(decay) not in (0, 0.0):
            yield finding(module.source, node, "TL102", "Adam with weight_decay")
        if on_gpu and keyword(node, "fused") is None and keyword(node, "foreach") is None:
            yield finding(module.source, node, "TL103", f"{match[2]} without fused=True")


def _out_of_memory(handler: ast.ExceptHandler) -> bool:
    if handler.type is not None and "OutOfMemory" in ast.unparse(handler.type):
        return True
    return any("out of memory" in str(constant(part)) for part in ast.walk(handler))


def _too_large(module: Module) -> Finding | None:
    """A comment, or a handler for running out of memory, in a program that accumulates nothing."""
    for node in module.source.nodes:
        if isinstance(node, ast.ExceptHandler) and _out_of_memory(node):
            return finding(
                module.source, node.body[0], "TL106", "running out of memory is handled, gradients are not accumulated"
            )
    noted = [line for line, comment in module.source.comments.items() if _TOO_LARGE.search(comment)]
    if not noted:
        return None
    after = [n for n in module.source.nodes if isinstance(n, ast.stmt) and n.lineno >= noted[0]]
    nearest = min(after, key=lambda node: node.lineno, default=None)
    return finding(module.source, nearest, "TL106", "a note says that a batch does not fit") if nearest else None
