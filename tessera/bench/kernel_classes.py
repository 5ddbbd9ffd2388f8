"""GPU time by class of kernel, the same classes for ours and for PyTorch's.

Ours are told by the sort of the group and the lines of the program that it computes; PyTorch's by
the names of kernels: the compiler of PyTorch puts the ops that it fused into them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from ..debug.launch_profile import LaunchRecord, is_step
from ..graph.cuda.launch_work import GroupBatch
from ..lazy_dataclass import dataclass

if TYPE_CHECKING:
    from ..graph.schedule.ir import ScheduledGroup

CLASSES = ("matmul", "attention", "loss", "norm", "elementwise", "optimizer", "embedding",
           "copies", "other")


@dataclass
class ClassTimes:
    """Microseconds and launches by class, and of each kernel's name."""

    us: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))
    launches: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0))
    kernels: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add(self, name: str, kernel: str, us: float) -> None:
        self.us[name] += us
        self.launches[name] += 1
        self.kernels.setdefault((name, kernel), []).append(us)

    @property
    def total_us(self) -> float:
        return sum(self.us.values())

    def figures(self, most: int = 24) -> dict[str, Any]:
        """For JSON; of kernels the `most` that take longest."""
        longest = sorted(self.kernels.items(), key=lambda k: -sum(k[1]))[:most]
        return {"gpu_us": round(self.total_us, 1),
                "classes": {c: {"us": round(self.us[c], 1), "launches": self.launches[c]}
                            for c in CLASSES if self.launches[c]},
                "kernels": [{"class": c, "name": name[:120], "launches": len(each),
                             "us": round(sum(each), 1)} for (c, name), each in longest]}


# --- ours -------------------------------------------------------------------------------------
# What a line of a program computes, in the order in which it decides about a group of several.
WORDS = (("loss", r"cross_entropy\("), ("norm", r"(layer|rms)norm\("),
         ("attention", r"\battention\("),
         ("elementwise", r"(gelu|silu|rotary_embedding|dropout)\("),
         ("embedding", r"\bembedding\("))
SORTS = {"matmul": "matmul", "attention": "attention", "optimizer": "optimizer",
         "index": "embedding", "sort": "embedding", "move": "copies", "copy": "copies"}


def of_launch(record: LaunchRecord) -> str:
    """The class of a launch, copy or call of a compiled function."""
    work = record.work
    if not is_step(record) or work.kind in SORTS:
        return SORTS.get(work.kind, "other")
    label = record.event.what
    groups = label.step.groups if isinstance(label.step, GroupBatch) else (
        label.step.group,) if label.step is not None else ()
    return of_groups(groups, work.kind, parts_of_matmuls(label.program.plan.groups))


def of_groups(groups: Sequence[ScheduledGroup], kind: str, parts: frozenset[str]) -> str:
    """The class of a launch of groups by their sort of work and the lines of their ops.

    parts: buffers with parts of sums of matmuls. A kernel that only adds them is a matmul's too.
    """
    if kind in SORTS:
        return SORTS[kind]
    if any(o.name in parts for g in groups if g.kind == "columns" for o in g.reads):
        return "matmul"
    text = "\n".join(dict.fromkeys(s.where.text for g in groups for s in g.steps
                                   if s.where is not None))
    found = next((name for name, word in WORDS if re.search(word, text)), "")
    if found == "embedding" and kind != "index":
        found = ""  # sums and residuals on its line
    return found or ("elementwise" if kind == "elementwise" else "other")


def parts_of_matmuls(groups: Iterable[ScheduledGroup]) -> frozenset[str]:
    """Buffers that matmuls write parts of a long sum to."""
    return frozenset(o.name for g in groups if g.kind == "gemm" and "depth" in dict(g.attrs)
                     for o in g.writes)


# --- PyTorch's --------------------------------------------------------------------------------
NAMES = (
    ("attention", r"flash|fmha|sdpa|attention"),
    ("optimizer", r"multi_tensor_apply|FusedAdam|fused_adam|LpNorm"),
    ("loss", r"nll_loss|log_softmax|logsumexp|cross_entropy|SoftMax"),
    ("norm", r"layer_norm|rms_norm|rsqrt|LayerNorm|RMSNorm|GammaBeta"),
    ("matmul", r"gemm|cutlass|nvjet|cublas|xmma|splitKreduce|splitk|triton_tem_|_mm_"),
    ("embedding", r"embedding|index_put|indexing_backward|IndexKernel|index_elementwise"),
    ("copies", r"^Mem(cpy|set)|CatArray|direct_copy"),
    ("elementwise", r"^triton_poi_|elementwise_kernel"),
)


def of_torch(kernel: str) -> str:
    """The class of a kernel of PyTorch, of a library of it, or of its compiler."""
    return next((name for name, word in NAMES if re.search(word, kernel)), "other")


__all__ = ["CLASSES", "ClassTimes", "of_groups", "of_launch", "of_torch", "parts_of_matmuls"]
