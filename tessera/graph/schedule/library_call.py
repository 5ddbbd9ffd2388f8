"""Nodes of a lowered graph that a kernel does as a whole.

A target's passes put them in the place of what they stand for; the target's record says of which
kind their group is (`ScheduleTarget.from_node`), and from there on they are groups as all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from ...lazy_dataclass import dataclass
from ..ir import Node
from ..op import GraphOp


@dataclass(frozen=True, eq=False)
class LibraryCall(GraphOp):
    """The record of such a node. It is not registered: no user's graph has it.

    row_blocks(node, i): in how many blocks of rows [..., R, C] its kernel makes result i, if it can
    sum the columns of each block along. A node with the attribute `sums`, positions of results,
    has these sums behind its own results: f32[blocks, ..., C] of what it stores.
    """

    row_blocks: Callable[[Node, int], int] | None = None

    def __post_init__(self) -> None:
        pass


def _lowered(*args: Any, **attrs: Any) -> NoReturn:
    raise AssertionError("a library call stands in a lowered graph, whose values are known")


def library_call(name: str, **fields: Any) -> LibraryCall:
    """A record that has the given fields of a GraphOp."""
    return LibraryCall(name, shape=_lowered, ref=_lowered, **fields)


__all__ = ["LibraryCall", "library_call"]
