"""What an op's lowering may use of the tracer that calls it."""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

from tessera.tile.builder.edge_facts import EdgeFacts
from tessera.tile.builder.ir_builder import IRBuilder
from tessera.tile.builder.launch_grid import LaunchGrid
from tessera.tile.builder.memory_indexing import MemoryIndexing
from tessera.tile.builder.source_position import SourcePosition
from tessera.tile.builder.value_table import ValueTable
from tessera.tile.ir.op_record import TileOp


class OpTracer(Protocol):
    """env: local names of the function that is being traced.  comprehensions: how many surround
    the call; in one, a range is a Python range."""

    position: SourcePosition
    values: ValueTable
    facts: EdgeFacts
    ir: IRBuilder
    grid: LaunchGrid
    memory: MemoryIndexing
    env: dict[str, Any]
    comprehensions: int

    def fail(self, message: str, hint: str | None = None, **kw: Any) -> NoReturn: ...

    def call_op(self, op: TileOp, args: list[Any], kwargs: dict[str, Any]) -> Any: ...

    def call_function(self, f: Any, *args: Any) -> Any: ...


__all__ = ["OpTracer"]
