"""Passes of users: functions that see, and may rewrite, the Tile IR of every kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from tessera.errors import ArgumentError, TesseraError, user_line
from tessera.tile.ir.errors import TileError
from tessera.tile.ir.ir import For, Function, If, Node, Op, While
from tessera.tile.passes.accumulate import accumulate
from tessera.tile.passes.merge import merge
from tessera.tile.passes.simplify import simplify
from tessera.tile.passes.verify import verify

Pass = Callable[[Function], Function]
P = TypeVar("P", bound=Pass)
PIPELINE: tuple[Pass, ...] = (simplify, merge, accumulate, simplify, verify)
REGISTERED: list[Pass] = []


def register_pass(run: P) -> P:
    """Let a function see the Tile IR of every kernel that is traced from here on, as a decorator.

    run(function) -> function: it gets the IR behind Tessera's own passes, of kernels of the library
    and of compiled functions too, and returns it, the same or another one. What it returns is
    verified and simplified again, on every target. `ts.unregister_pass(run)` ends it; kernels that
    were traced meanwhile stay as they are.
    Raises ArgumentError for what is registered already, or cannot be called.
    """
    if not callable(run) or run in REGISTERED:
        state = "is registered already" if callable(run) else "cannot be called"
        raise ArgumentError(f"the pass {run!r} {state}", where=user_line())
    REGISTERED.append(run)
    return run


def unregister_pass(run: Pass) -> None:
    """A pass sees no kernel any more. Raises ArgumentError for one that is not registered."""
    if run not in REGISTERED:
        raise ArgumentError(f"the pass {run!r} is not registered", where=user_line())
    REGISTERED.remove(run)


def run_passes(function: Function) -> Function:
    """The function after the passes of Tessera, and then those of users."""
    for own in PIPELINE:
        function = own(function)
    for run in tuple(REGISTERED):
        function = _user_pass(run, function)
    return function


def _user_pass(run: Pass, function: Function) -> Function:
    name = getattr(run, "__qualname__", repr(run))
    made = run(function)
    if not isinstance(made, Function):
        raise TileError(f"the pass {name} gave {type(made).__name__} for kernel {function.name}",
                        hint="a pass returns the Function that it was given, or another one")
    if made is function:
        return made
    try:
        for own in PIPELINE:
            made = own(made)
    except TesseraError as err:
        raise TileError(f"the pass {name} made ill-formed Tile IR of kernel {function.name}: "
                        f"{err.message}", where=err.where) from err
    return made


def map_ops(function: Function, change: Callable[[Op], Op]) -> Function:
    """The function with each op as `change` gives it, those inside of loops and branches too."""
    return replace(function, body=_mapped(function.body, change))


def _mapped(nodes: tuple[Node, ...], change: Callable[[Op], Op]) -> tuple[Node, ...]:
    def one(node: Node) -> Node:
        if isinstance(node, Op):
            return change(node)
        if isinstance(node, If):
            return replace(node, then=_mapped(node.then, change),
                           orelse=_mapped(node.orelse, change))
        if isinstance(node, While):
            return replace(node, test=_mapped(node.test, change),
                           body=_mapped(node.body, change))
        assert isinstance(node, For)
        return replace(node, body=_mapped(node.body, change))

    return tuple(map(one, nodes))


__all__ = ["map_ops", "register_pass", "run_passes", "unregister_pass"]
