"""Kernels on the GPU: where a call runs, what machine code it needs, how it is launched.

    placement.py      where the arguments lie, and so where the kernel runs
    machine_code.py   of a specialisation: from memory, from the disk cache, or compiled
    recipe.py         everything about a launch that equal shapes, types and alignments decide
    results.py        outputs in the library of the arguments
    first_call.py     a call seen for the first time: bound, checked, compiled, its recipe written
    repeated_call.py  a call like one before: its recipe looked up, pointers packed, launched
    reports.py        asserts and bounds errors of kernels, as the interpreter's exceptions
    levels.py         inspect_ir("target" | "ptx" | "sass")

Nothing here imports a compiler before something has to be compiled.
"""

from __future__ import annotations

from tessera.tile.launch.first_call import call as call
from tessera.tile.launch.machine_code import Image as Image
from tessera.tile.launch.placement import Placement as Placement
from tessera.tile.launch.placement import place_call as place_call
from tessera.tile.launch.placement import reader_for as reader_for

__all__ = ["Image", "Placement", "call", "place_call", "reader_for"]
