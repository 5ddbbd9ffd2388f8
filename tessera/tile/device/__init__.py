"""Kernels on the GPU: where a call runs, what machine code it needs, how it is launched.

    place.py     where the arguments lie, and so where the kernel runs
    images.py    machine code of a specialisation: from memory, from the disk cache, or compiled
    recipe.py    everything about a launch that equal shapes, types and alignments decide
    results.py   outputs in the library of the arguments
    calls.py     a call seen for the first time: bound, checked, compiled, its recipe written
    fast.py      a call like one before: its recipe looked up, pointers packed, launched
    reports.py   asserts and bounds errors of kernels, as the interpreter's exceptions
    levels.py    inspect_ir("target" | "ptx" | "sass")

Nothing here imports a compiler before something has to be compiled.
"""

from __future__ import annotations

from tessera.tile.device.calls import call as call
from tessera.tile.device.images import Image as Image
from tessera.tile.device.place import Placement as Placement
from tessera.tile.device.place import placement as placement
from tessera.tile.device.place import reader_for as reader_for

__all__ = ["Image", "Placement", "call", "placement", "reader_for"]
