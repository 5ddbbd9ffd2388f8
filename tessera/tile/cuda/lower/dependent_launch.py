"""Kernels begin while the one in front of them in the stream ends (programmatic dependent launch).

    prefetch_box(...);  grid_dependency_wait();  launch_dependents();  ...

A group waits where it begins, in front of all that it reads or writes, so nothing else changes: its
launch and first instructions are done when the last group of the kernel in front ends. It lets the
next kernel begin only then: whatever came before the kernel in front has ended, too. What it asks
to have brought near first of all, it asks for in front of that: nothing is read yet, and L2 has
what is written meanwhile. A kernel that says itself where it waits, or where the next may begin, is
left as it is; one that reads the table of a batch first, or the key by which it draws, waits for
these.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from tessera.runtime.generations import Generation
from tessera.tile.ir.ir import Function, If, Node, Op, walk
from tessera.tile.ir.op_record import OPS
from tessera.tile.passes.random_draws import draws

WAIT = "grid_dependency_wait"
NEXT = "launch_dependents"
NEAR = "prefetch_box"


def use_dependent_launch(function: Function, chip: Generation, batched: bool = False) -> Function:
    """The function with a wait in front of all it does, where the chip launches so. batched: what
    differs between calls is read from a table."""
    names = {n.name for n in walk(function.body) if isinstance(n, Op)}
    if not chip.dependent_launches or WAIT in names or NEXT in names:
        return function
    first = () if batched or draws(function) else _asked_for_first(function.body)
    rest = function.body[len(first):]
    return replace(function, body=(*first, Op(WAIT, (), (), ()), Op(NEXT, (), (), ()), *rest))


def _asked_for_first(body: tuple[Node, ...]) -> tuple[Node, ...]:
    """What stands in front of all reads and writes, up to the last box that is to come near."""
    head = tuple(itertools.takewhile(_only_asks, body))
    last = max((i for i, n in enumerate(head) if _asks(n)), default=-1)
    return head[:last + 1]


def _asks(node: Node) -> bool:
    return any(isinstance(n, Op) and n.name == NEAR for n in walk((node,)))


def _only_asks(node: Node) -> bool:
    """Whether it reads and writes nothing, whoever does it."""
    return isinstance(node, Op | If) and all(
        isinstance(n, If) or isinstance(n, Op) and (
            n.name == NEAR or OPS[n.name].effect == "pure") for n in walk((node,)))


__all__ = ["use_dependent_launch"]
