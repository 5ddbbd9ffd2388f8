"""Kernels begin while the one in front of them in the stream ends (programmatic dependent launch).

    grid_dependency_wait();  launch_dependents();  ...

A group waits where it begins, in front of all that it reads or writes, so nothing else changes: its
launch and first instructions are done when the last group of the kernel in front ends. It lets the
next kernel begin only then: whatever came before the kernel in front has ended, too. A kernel that
says itself where it waits, or where the next may begin, is left as it is.
"""

from __future__ import annotations

from dataclasses import replace

from tessera.runtime.generations import Generation
from tessera.tile.ir.ir import Function, Op, walk

WAIT = "grid_dependency_wait"
NEXT = "launch_dependents"


def begin_early(function: Function, chip: Generation) -> Function:
    """The function with a wait in front of all it does, where the chip launches so."""
    names = {n.name for n in walk(function.body) if isinstance(n, Op)}
    if not chip.dependent_launches or WAIT in names or NEXT in names:
        return function
    return replace(function, body=(Op(WAIT, (), (), ()), Op(NEXT, (), (), ()), *function.body))


__all__ = ["begin_early"]
