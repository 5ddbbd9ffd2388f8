"""Fused CPU loops: elementwise ops and last-axis reductions compiled into one loop nest.

    program = LoopProgram(inputs, ops, outputs)
    kernel = compile_loops(program)                       # one per program, kept in memory
    launch = kernel.bind(shape, in_strides, out_strides)  # once per shape; strides in elements
    launch(in_arrays, out_arrays)                         # the hot path

Nothing here imports numba or llvmlite until the first `bind`.
"""

from __future__ import annotations

from .interpret import interpret
from .kernel import LoopKernel, compile_loops
from .program import LoopInput, LoopOp, LoopOutput, LoopProgram

__all__ = [
    "LoopInput", "LoopKernel", "LoopOp", "LoopOutput", "LoopProgram", "compile_loops", "interpret",
]
