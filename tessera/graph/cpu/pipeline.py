"""Numba's passes for straight typed code, and no others: two thirds of the default list's time.

Imports numba: only the compiler imports this module.
"""

from __future__ import annotations

from numba.core import compiler, typed_passes, untyped_passes
from numba.core.compiler_machinery import PassManager

PASSES = (
    untyped_passes.TranslateByteCode, untyped_passes.FixupArgs, untyped_passes.IRProcessing,
    typed_passes.NopythonTypeInference, typed_passes.IRLegalization, typed_passes.NativeLowering,
    typed_passes.NoPythonBackend,
)


class LoopCompiler(compiler.CompilerBase):
    """Bytecode to machine code without inlining, branch pruning, SSA or parallel passes.

    Emitted source keeps one type for each variable, so SSA form would change nothing, and LLVM does
    the rest better.
    """

    def define_pipelines(self) -> list[PassManager]:
        manager = PassManager("loops")
        for step in PASSES:
            manager.add_pass(step, step.__name__)
        manager.finalize()
        return [manager]
