"""The rules: stable codes, how sure each is, why the thing costs time or memory, and what to write instead.

TL001 to TL099 are reported always, TL101 and up are hints. A code is never used again for something else.
Sources: the PyTorch performance tuning guide, the notes on CUDA semantics and on DataLoader, the release notes of 2.0
and 2.4.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from .source import Source

SURE, LIKELY, HINT = "sure", "likely", "hint"


@dataclass(frozen=True)
class Rule:
    code: str
    name: str
    certainty: str
    why: str
    instead: str


@dataclass(frozen=True)
class Finding:
    """One place. Lines and columns start at 1; `message` says what is there, the rule says the rest."""

    file: str
    line: int
    column: int
    rule: Rule
    message: str
    certainty: str

    def document(self) -> dict[str, object]:
        rule = self.rule
        return {
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "code": rule.code,
            "name": rule.name,
            "certainty": self.certainty,
            "message": self.message,
            "why": rule.why,
            "instead": rule.instead,
        }


_TABLE = (
    Rule(
        "TL001", "loader-without-workers", LIKELY,
        "with num_workers=0 the training process reads and transforms every batch itself, and the model waits",
        "DataLoader(..., **torchtuned.torch.loader_args()), or num_workers of about (cores of this rank - 1)",
    ),
    Rule(
        "TL002", "loader-not-pinned", LIKELY,
        "copies to the GPU from pageable memory go through a staging buffer and cannot overlap with computing",
        "pin_memory=True, and .to(device, non_blocking=True) on the batch",
    ),
    Rule(
        "TL003", "workers-restart-each-epoch", LIKELY,
        "without persistent_workers all worker processes end and start again (imports, dataset copy) in every epoch",
        "persistent_workers=True (with a variable: persistent_workers=num_workers > 0)",
    ),
    Rule(
        "TL004", "data-parallel", SURE,
        "DataParallel copies the model to all GPUs in every step and drives them from one process under one GIL",
        "torch.nn.parallel.DistributedDataParallel, one process per GPU (torchrun), on one machine too",
    ),
    Rule(
        "TL005", "old-amp-name", SURE,
        "the device-specific amp names are deprecated since PyTorch 2.4 and warn",
        'torch.amp.autocast("cuda", ...), torch.amp.GradScaler("cuda", ...), torch.amp.custom_fwd(device_type="cuda")',
    ),
    Rule(
        "TL006", "scaler-with-bfloat16", SURE,
        "bfloat16 has float32's range: scaling is not needed, and the scaler's check for inf waits in each step",
        "drop the GradScaler, or GradScaler(enabled=dtype == torch.float16)",
    ),
    Rule(
        "TL007", "item-in-every-step", LIKELY,
        "the CPU waits here until the GPU has done all queued work, in every step; then the GPU waits for the CPU",
        "keep the tensor (total += loss.detach()) and call .item() every N steps or once per epoch",
    ),
    Rule(
        "TL008", "cpu-copy-in-every-step", LIKELY,
        "the copy to the CPU waits for all queued GPU work in every step",
        "collect .detach() tensors on the GPU and move them once per epoch, or every N steps",
    ),
    Rule(
        "TL009", "numpy-in-every-step", LIKELY,
        "turning a tensor into NumPy or a list waits for all queued GPU work in every step",
        "compute with torch on the device; convert every N steps or once per epoch",
    ),
    Rule(
        "TL010", "float-in-every-step", LIKELY,
        "float() and int() of a tensor are .item(): the CPU waits for the GPU in every step",
        "keep the tensor (.detach()) and convert every N steps or once per epoch",
    ),
    Rule(
        "TL011", "tensor-printed-in-every-step", LIKELY,
        "formatting a tensor copies it to the CPU and waits for all queued GPU work, in every step",
        "print every N steps, or once per epoch",
    ),
    Rule(
        "TL012", "anomaly-detection-on", SURE,
        "anomaly detection records a traceback for every forward operation and checks every gradient for NaN",
        "switch it on only while hunting a NaN (an option of the script)",
    ),
    Rule(
        "TL013", "profiler-on", LIKELY,
        "a profiler around the whole training records every operation; time and memory grow with each step",
        "profile a few steps (schedule=torch.profiler.schedule(wait=1, warmup=1, active=3)) or behind an option",
    ),
    Rule(
        "TL014", "launch-blocking-on", SURE,
        "with CUDA_LAUNCH_BLOCKING the CPU waits for every single kernel",
        "remove it; set it in the shell for the one run that needs it",
    ),
    Rule(
        "TL015", "empty-cache-in-every-step", SURE,
        "empty_cache() gives memory back to the driver; the next step asks for it again with cudaMalloc, which waits",
        "remove it; against fragmentation set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ),
    Rule(
        "TL016", "gradients-zeroed", SURE,
        "set_to_none=False writes zeros into every gradient and makes backward add to them instead of assigning",
        "zero_grad() (set_to_none=True is the default since 2.0)",
    ),
    Rule(
        "TL017", "loss-kept-with-graph", LIKELY,
        "adding up or storing the loss itself keeps each step's autograd graph, and memory grows with each step",
        "total += loss.detach()",
    ),
    Rule(
        "TL018", "tensor-made-then-moved", LIKELY,
        "the tensor is made and filled on the CPU, then copied to the device while the CPU waits",
        "pass device= to the function that makes it",
    ),
    Rule(
        "TL019", "evaluation-with-graph", LIKELY,
        "eval() does not stop autograd: each forward pass keeps its activations, which costs memory and time",
        "with torch.inference_mode(): (or torch.no_grad()) around the evaluation, or as its decorator",
    ),
    Rule(
        "TL020", "accumulation-without-no-sync", LIKELY,
        "DistributedDataParallel averages gradients over all processes in every backward pass, needed or not",
        "with model.no_sync(): for all but a step's last backward (accelerate: with accelerator.accumulate(model):)",
    ),
    Rule(
        "TL101", "no-mixed-precision", HINT,
        "float32 leaves the tensor cores idle and moves twice the bytes",
        'with torch.autocast("cuda", dtype=torch.bfloat16): around forward and loss (float16 needs a GradScaler)',
    ),
    Rule(
        "TL102", "adam-with-weight-decay", HINT,
        "Adam adds weight_decay to the gradient, where the adaptive step scales it away",
        "torch.optim.AdamW",
    ),
    Rule(
        "TL103", "optimizer-not-fused", HINT,
        "the default updates parameters in several kernels; fused=True does it in one per group",
        "fused=True (on GPUs; since 2.4 on CPUs too)",
    ),
    Rule(
        "TL104", "no-cudnn-benchmark", HINT,
        "with inputs of one size, letting cuDNN measure its algorithms once usually pays within the first epoch",
        "torch.backends.cudnn.benchmark = True, or torchtuned.torch.tune(cudnn_benchmark=True)",
    ),
    Rule(
        "TL105", "not-compiled", HINT,
        "torch.compile fuses element-wise work and cuts Python overhead in most models",
        "model = torch.compile(model), measured before and after",
    ),
    Rule(
        "TL106", "batch-too-large-noted", HINT,
        "the code says that a batch does not fit into memory, and gradients are not accumulated",
        "backward on parts of the batch and step the optimizer every N parts",
    ),
    Rule(
        "TL107", "no-learning-rate-schedule", HINT,
        "a constant learning rate usually needs more epochs than one with warm-up and decay",
        "torch.optim.lr_scheduler.OneCycleLR or CosineAnnealingLR",
    ),
)  # fmt: skip
RULES = {rule.code: rule for rule in _TABLE}


def finding(source: Source, node: ast.expr | ast.stmt, code: str, message: str, certainty: str = "") -> Finding | None:
    """A finding at a node, or None when a `# noqa` there silences it. `certainty`: the rule's if not given."""
    if source.silenced(node, code):
        return None
    rule = RULES[code]
    return Finding(source.shown, node.lineno, source.column(node), rule, message, certainty or rule.certainty)
