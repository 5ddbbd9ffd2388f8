"""What the cost model knows of a GPU: one record each, figures of the data sheets.

    gpu("H200")   gpu("NVIDIA H100 80GB HBM3")   gpu("sm_80")     by name, or the one of a target
    gpu_of(device)                                                of the machine in use
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tessera.errors import UnsupportedTargetError, user_line
from tessera.lazy_dataclass import dataclass
from tessera.runtime.generations import GENERATIONS, Generation
from tessera.runtime.target import parse_target

if TYPE_CHECKING:
    from tessera.runtime.device import Device

GPUS: dict[str, Gpu] = {}


@dataclass(frozen=True)
class Gpu:
    """A GPU, with dense rates.

    matmul_tflops   of matmuls by the type of the operands: pairs (type, 10^12 / s)
    f32_tflops       of other arithmetic, a fused multiply-add counted as two
    memory_gbps      of global memory       clock_ghz   boost
    l2_bytes         of the second-level cache
    shared_bytes     of a group, at most: that of its generation, or what a device says
    """

    name: str
    target: str
    multiprocessors: int
    clock_ghz: float
    memory_gbps: float
    f32_tflops: float
    matmul_tflops: tuple[tuple[str, float], ...]
    l2_bytes: int
    source: str
    shared_bytes: int

    @property
    def generation(self) -> Generation:
        return parse_target(self.target).generation

    def matmuls(self, kind: str) -> float:
        """Multiply-adds of matmuls per second, times two. kind: as in matmul_tflops."""
        return 1e12 * dict(self.matmul_tflops).get(kind, self.f32_tflops)


def _register(name: str, target: str, multiprocessors: int, clock_ghz: float, memory_gbps: float,
              f32_tflops: float, matmul_tflops: tuple[tuple[str, float], ...], l2_bytes: int,
              source: str) -> None:
    if name in GPUS:
        raise ValueError(f"the GPU {name!r} is declared twice")
    GPUS[name] = Gpu(name, target, multiprocessors, clock_ghz, memory_gbps, f32_tflops,
                     matmul_tflops, l2_bytes, source,
                     parse_target(target).generation.group_shared_bytes)


_MIB = 1 << 20
# Rates without sparsity; the first of a target stands for that target.
_register("T4", "sm_75", 40, 1.59, 320, 8.1, (("f16", 65), ("int8", 130), ("f64", 0.25)),
          4 * _MIB, "NVIDIA T4 datasheet, 2019")
_register("A100", "sm_80", 108, 1.41, 2039, 19.5,
          (("f16", 312), ("tf32", 156), ("int8", 624), ("f64", 19.5)),
          40 * _MIB, "NVIDIA A100 80GB SXM datasheet, 2021")
_register("A10", "sm_86", 72, 1.695, 600, 31.2,
          (("f16", 125), ("tf32", 62.5), ("int8", 250), ("f64", 0.49)),
          6 * _MIB, "NVIDIA A10 datasheet, 2021")
_register("L40S", "sm_89", 142, 2.52, 864, 91.6,
          (("f16", 362), ("tf32", 183), ("fp8", 733), ("int8", 733), ("f64", 1.4)),
          96 * _MIB, "NVIDIA L40S datasheet, 2023")
_HOPPER = (("f16", 989), ("tf32", 494), ("fp8", 1979), ("int8", 1979), ("f64", 67))
_register("H200", "sm_90a", 132, 1.98, 4800, 67, _HOPPER, 50 * _MIB,
          "NVIDIA H200 SXM datasheet, 2024")
_register("H100", "sm_90a", 132, 1.98, 3350, 67, _HOPPER, 50 * _MIB,
          "NVIDIA H100 SXM datasheet, 2023")
_register("B200", "sm_100a", 148, 1.965, 8000, 75,
          (("f16", 2250), ("tf32", 1100), ("fp8", 4500), ("int8", 4500), ("f64", 37)),
          126 * _MIB, "NVIDIA DGX B200 datasheet, 2025")

DEFAULT = GPUS["H200"]  # whose figures count where no GPU takes part: the one we tune for


def gpu(name: str | Gpu) -> Gpu:
    """By a name or part of the driver's name, or the one that stands for a target.

    Raises UnsupportedTargetError naming what exists.
    """
    if isinstance(name, Gpu):
        return name
    for word in (name, *name.split()):
        if word in GPUS:
            return GPUS[word]
    if name in GENERATIONS:
        cc = parse_target(name).cc
        known = {parse_target(g.target).cc: g for g in reversed(GPUS.values())}  # the first of each
        nearest = max(c for c in known if c <= cc)
        return known[cc] if cc in known else _limited(known[nearest], name)
    raise UnsupportedTargetError(f"the cost model has no figures of {name!r}", where=user_line(),
                                 hint=f"known: {', '.join(GPUS)}, or a target such as sm_80")


def _limited(near: Gpu, target: str) -> Gpu:
    """The figures of an older GPU for a target without a record, within that target's limits."""
    return replace(near, target=target,
                   shared_bytes=parse_target(target).generation.group_shared_bytes,
                   source=f"{near.name}, within the limits of {target}")


def gpu_of(device: Device) -> Gpu:
    """The figures for a device of this machine.

    One without a record gets those of its architecture, in proportion to its multiprocessors.
    """
    for word in device.name.replace("-", " ").split():
        if word in GPUS:
            return replace(GPUS[word], multiprocessors=device.multiprocessors,
                           shared_bytes=device.shared_bytes)
    near = gpu(f"sm_{device.cc[0]}{device.cc[1]}")
    part = device.multiprocessors / near.multiprocessors
    return replace(
        near, name=device.name, multiprocessors=device.multiprocessors,
        memory_gbps=near.memory_gbps * part, f32_tflops=near.f32_tflops * part,
        matmul_tflops=tuple((k, v * part) for k, v in near.matmul_tflops),
        shared_bytes=device.shared_bytes, l2_bytes=device.l2_bytes,
        source=f"{near.name}, in proportion to the multiprocessors")


__all__ = ["DEFAULT", "GPUS", "Gpu", "gpu", "gpu_of"]
