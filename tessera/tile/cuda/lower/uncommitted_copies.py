"""Where copies that no cp_commit_group follows may still be under way."""

from __future__ import annotations

from tessera.tile.ir.ir import For, Function, If, Node, Op, While
from tessera.tile.ir.op_record import OPS


def left_to_barriers(function: Function) -> frozenset[int]:
    """id() of the `barrier` and `cp_wait_group` ops that uncommitted copies may reach."""
    found: set[int] = set()
    _block(function.body, False, found)
    return frozenset(found)


def _block(nodes: tuple[Node, ...], open_: bool, found: set[int]) -> bool:
    """Whether a copy may be uncommitted after the nodes, when one may be before them (open_)."""
    for node in nodes:
        if isinstance(node, Op):
            open_ = _op(node, open_, found)
        elif isinstance(node, If):
            then, orelse = (_block(part, open_, found) for part in (node.then, node.orelse))
            open_ = then or orelse
        else:
            open_ = _loop(node, open_, found)
    return open_


def _op(op: Op, open_: bool, found: set[int]) -> bool:
    copy = OPS[op.name].async_copy
    if copy == "issue":
        return True
    if copy == "wait":
        if open_:
            found.add(id(op))
        return False
    return open_ and copy != "commit"


def _loop(node: For | While, open_: bool, found: set[int]) -> bool:
    """An iteration may begin with what the one before left."""
    body = (*node.test, *node.body) if isinstance(node, While) else node.body
    again = _block(body, open_, found)
    return _block(body, open_ or again, found) or open_
