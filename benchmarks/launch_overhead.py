"""Host time of one kernel launch, ours beside Triton, CuPy and torch.

A call of a @ts.kernel that was made before, and what stands below it: the launcher of the runtime.

    python benchmarks/launch_overhead.py

Each row is the best of ten means over 2000 launches of a kernel that does nothing, in microseconds
of host time; the queue is drained before each mean, and the rows take turns, so that what else the
machine does meets all of them. Needs torch and a GPU; libraries that are
missing are left out. Writes benchmarks/results/launch_overhead.json, or $OUT/launch_overhead.json
when OUT is set.
"""

from __future__ import annotations

import linecache
import time
from collections.abc import Callable

import record

LAUNCHES, ROUNDS = 2000, 10

SOURCE = """\
from tessera.tile.cuda import use
from tessera.tile.cuda.numba_gate import f32
from tessera.tile.cuda.ptx import memory
store = use(memory.st("global", "f32"))
def nothing(ARGS, n):
    if n < 0:
        BODY
"""


def host_us(run: Callable[[], object], drain: Callable[[], object]) -> float:
    """The mean of one round."""
    drain()
    start = time.perf_counter()
    for _ in range(LAUNCHES // 10):
        for _ in range(10):
            run()
    took = time.perf_counter() - start
    drain()
    return 1e6 * took / LAUNCHES


def ours(arrays: list) -> dict[str, Callable[[], object]]:
    from tessera.runtime.device import device
    from tessera.tile.cuda.build import build

    names = [f"x{i}" for i in range(len(arrays))]
    source = SOURCE.replace("ARGS", ", ".join(names)).replace(
        "BODY", "; ".join(f"store({x}, f32(0))" for x in names))
    kinds = ["i64"] * len(arrays) + ["i32"]
    kernel = build(source, "nothing", kinds, device().target, threads=32).kernel  # type: ignore[arg-type]
    values = (*(x.data_ptr() for x in arrays), 1)
    return {
        **calls(arrays),
        "tessera runtime, everything bound": kernel.bind((1,), values),
        "tessera runtime, pointers": lambda: kernel.launch((1,), values),
    }


KERNEL = """\
import tessera as ts
@ts.kernel
def nothing(PARAMETERS, n: ts.i32):
    if n < 0:
        BODY
"""


def calls(arrays: list) -> dict[str, Callable[[], object]]:
    """A @ts.kernel of that many arrays and a number, on torch tensors and on CuPy arrays."""
    import cupy

    names = [f"x{i}" for i in range(len(arrays))]
    source = KERNEL.replace("PARAMETERS", ", ".join(f'{x}: ts.Tensor["N", ts.f32]' for x in names))
    source = source.replace("BODY", "; ".join(f"{x}[0] = 0.0" for x in names))
    linecache.cache["nothing.py"] = (len(source), None, source.splitlines(keepends=True),
                                     "nothing.py")
    scope: dict = {"__name__": "nothing", "__file__": "nothing.py"}
    exec(compile(source, "nothing.py", "exec"), scope)
    kernel, others = scope["nothing"], [cupy.from_dlpack(x) for x in arrays]
    one = kernel[1]
    return {"tessera k(...), torch": lambda: kernel(*arrays, 1),
            "tessera k[1](...), torch": lambda: kernel[1](*arrays, 1),
            "tessera one(...), one = k[1], torch": lambda: one(*arrays, 1),
            "tessera k(...), cupy": lambda: kernel(*others, 1)}


def triton(arrays: list) -> dict[str, Callable[[], object]]:
    """The same kernel of three arrays; Triton compiles from a file, so this one."""
    if len(arrays) != 3:
        return {}
    import triton
    import triton.language as tl

    globals()["tl"] = tl
    kernel = triton.jit(triton_nothing)
    return {f"triton {triton.__version__}": lambda: kernel[(1,)](*arrays, 1)}


def triton_nothing(x, y, z, n):  # type: ignore[no-untyped-def]
    if n < 0:
        tl.store(x, 0.0)  # type: ignore[name-defined]  # noqa: F821
        tl.store(y, 0.0)  # type: ignore[name-defined]  # noqa: F821
        tl.store(z, 0.0)  # type: ignore[name-defined]  # noqa: F821


def cupy(arrays: list) -> dict[str, Callable[[], object]]:
    import cupy

    args = ", ".join(f"float* x{i}" for i in range(len(arrays)))
    kernel = cupy.RawKernel(f'extern "C" __global__ void nothing({args}, int n) {{}}', "nothing")
    values = (*(cupy.from_dlpack(x) for x in arrays), 1)
    return {f"cupy {cupy.__version__} RawKernel": lambda: kernel((1,), (32,), values)}


def torch(arrays: list) -> dict[str, Callable[[], object]]:
    import torch

    return {f"torch {torch.__version__} x.zero_()": arrays[0].zero_}


def measure(count: int) -> dict[str, float]:
    """Host microseconds by row, for a kernel of `count` arrays."""
    import torch as library

    arrays = [library.zeros(16, device="cuda") for _ in range(count)]
    runs: dict[str, Callable[[], object]] = {}
    for make in (ours, triton, cupy, torch):
        try:
            runs |= make(arrays)
        except ImportError as error:
            print(f"left out: {make.__name__}: {error}")
    for run in runs.values():
        run()
    rounds = [{name: host_us(run, library.cuda.synchronize) for name, run in runs.items()}
              for _ in range(ROUNDS)]
    return {name: min(times[name] for times in rounds) for name in runs}


def main() -> None:
    results = {str(count): measure(count) for count in (1, 3, 10)}
    for count, rows in results.items():
        for name, us in rows.items():
            print(f"{count:>3} arrays  {us:7.2f} us  {name}")
    import torch as library

    figures = {"device": library.cuda.get_device_name(),
               "microseconds_by_arrays": {count: {name: round(us, 2) for name, us in rows.items()}
                                          for count, rows in results.items()}}
    record.write("launch_overhead", figures)


if __name__ == "__main__":
    main()
