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
