"""The CUDA target: PTX instructions as records, their intrinsics, and the gate to the compiler.

Emitted kernels name what they use at module level:

    from tessera.tile.cuda import use
    from tessera.tile.cuda.ptx import memory, mma
    load = use(memory.ld("global", "b32", 4))
    dot = use(mma.mma("bf16", "f32"))

Importing this folder or its records imports no compiler; `use` does.
"""

from __future__ import annotations

import functools
from typing import Any

from .instruction import Instruction, Operation
from .instruction_names import find_instruction


@functools.cache
def _intrinsic(record: Instruction | Operation) -> Any:
    from .numba_gate import instruction_intrinsic, make_intrinsic

    if isinstance(record, Operation):
        return make_intrinsic(record.name, record.arity, record.rule)
    return instruction_intrinsic(record)


def use(instruction: Instruction | Operation | str) -> Any:
    """The intrinsic of a record (or of its name), callable from a kernel; one per process."""
    if isinstance(instruction, str):
        instruction = find_instruction(instruction)
    return _intrinsic(instruction)
