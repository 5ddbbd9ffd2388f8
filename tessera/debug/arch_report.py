"""Which features of a chip kernels really use: read off their PTX and launches."""

from __future__ import annotations

import re
from math import prod

from ..lazy_dataclass import dataclass
from ..runtime.module import LoadedKernel
from ..tile.kernel.kernel import Kernel
from ..tile.launch import machine_code
from ..tile.launch.levels import compiled_for

# By the names of the hardware; the patterns are instructions of the PTX ISA, 9.7.
FEATURES: dict[str, str] = {
    "wgmma": r"\bwgmma\.mma_async",
    "TMA": r"\bcp\.async\.bulk\.tensor",
    "mma.sync": r"\bmma\.sync",
    "cp.async": r"\bcp\.async\.c[ag]\.",
    "ldmatrix": r"\bldmatrix\.",
    "setmaxnreg": r"\bsetmaxnreg\.",
}


@dataclass(frozen=True)
class KernelFeatures:
    """A compiled kernel: its name and target, and what it uses. clusters: blocks in each of its
    clusters, 1 without."""

    name: str
    target: str
    features: frozenset[str]
    clusters: int


@dataclass(frozen=True)
class ArchReport:
    """What `ts.arch_report` found. kernels: one row for each; used: by target, how many kernels use
    a feature. Prints as a table."""

    kernels: tuple[KernelFeatures, ...]

    @property
    def used(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for k in self.kernels:
            counts = found.setdefault(k.target, dict.fromkeys((*FEATURES, "clusters"), 0))
            for feature in k.features:
                counts[feature] += 1
        return found

    def __str__(self) -> str:
        if not self.kernels:
            return "no kernel was compiled or loaded for a GPU"
        lines = []
        for target, counts in sorted(self.used.items()):
            of = sum(k.target == target for k in self.kernels)
            words = ", ".join(f"{name} {n}" for name, n in counts.items())
            lines.append(f"{target}: {of} kernel{'s' * (of != 1)}; {words}")
        lines += [f"  {k.name} ({k.target}): {', '.join(sorted(k.features)) or 'none of these'}"
                  for k in self.kernels]
        return "\n".join(lines)


def arch_report(*kernels: Kernel, target: str | None = None) -> ArchReport:
    """Who uses wgmma, TMA, clusters, mma.sync, cp.async, ldmatrix and the moving of registers
    between warps (setmaxnreg).

    kernels: as inspect_ir shows them, compiled for a target, by default this machine's GPU, else
    sm_90a; no GPU is needed. Without any: all kernels, those of compiled functions too, that this
    process has compiled or loaded to launch them.
    """
    found = [_features(i.function.name, i.request.target, i.ptx, i.code)
             for i in machine_code.LIVE]
    if kernels:
        made = [(k, compiled_for(k, k.inspected(), target)) for k in kernels]
        found = [_features(k.__name__, c.built.kernel.target, c.built.ptx, c.built.kernel)
                 for k, c in made]
    return ArchReport(tuple(sorted(found, key=lambda k: (k.target, k.name, sorted(k.features)))))


def _features(name: str, target: object, ptx: str, code: LoadedKernel) -> KernelFeatures:
    clusters = prod(code.cluster)
    used = {feature for feature, pattern in FEATURES.items() if re.search(pattern, ptx)}
    return KernelFeatures(name, str(target),
                          frozenset(used | {"clusters"} if clusters > 1 else used), clusters)


__all__ = ["ArchReport", "KernelFeatures", "arch_report"]
