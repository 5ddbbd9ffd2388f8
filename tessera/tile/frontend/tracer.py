"""The tracer: a kernel's tree, walked node by node; a table says what each kind of node becomes.

A construct of Python is one function beside its like, registered by the class of its node:

    @expression(ast.BinOp)
    def binary_operation(t: KernelTracer, e: ast.BinOp) -> Any: ...
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from tessera.call_errors import FAILURES
from tessera.errors import TesseraError
from tessera.tile.builder.edge_facts import EdgeFacts
from tessera.tile.builder.ir_builder import IRBuilder
from tessera.tile.builder.kernel_spec import KernelSpec
from tessera.tile.builder.launch_grid import LaunchGrid
from tessera.tile.builder.memory_indexing import MemoryIndexing
from tessera.tile.builder.source_position import SourcePosition
from tessera.tile.builder.value_table import ValueTable
from tessera.tile.frontend.op_calls import call_hint, emit_call
from tessera.tile.frontend.source import KernelSource, closure_of
from tessera.tile.ir.errors import KernelError
from tessera.tile.ir.handles import Handle, describe
from tessera.tile.ir.ir import Param
from tessera.tile.ir.op_record import TileOp

EXPRESSIONS: dict[type[ast.expr], Callable[[KernelTracer, Any], Any]] = {}
STATEMENTS: dict[type[ast.stmt], Callable[[KernelTracer, Any], None]] = {}
# What is no part of the kernel language, in words; after a colon, what to do instead.
OUTSIDE: dict[type[ast.expr], str] = {
    ast.Lambda: "a lambda: define a function with def and call it",
    ast.DictComp: "a dict comprehension", ast.SetComp: "a set comprehension",
    ast.Await: "await", ast.Yield: "yield",
    ast.YieldFrom: "yield from", ast.Set: "a set",
    ast.NamedExpr: "an assignment inside an expression: put it on its own line",
}
REFUSED: dict[type[ast.stmt], str] = {
    ast.With: "with blocks", ast.Try: "try: errors cannot be caught inside a kernel",
    ast.Raise: "raise: write assert condition, \"message\"",
    ast.Import: "import: do it outside of the kernel",
    ast.ImportFrom: "import: do it outside of the kernel", ast.ClassDef: "a class",
    ast.FunctionDef: "a nested function: define it outside of the kernel", ast.Global: "global",
    ast.Nonlocal: "nonlocal", ast.Delete: "del", ast.Match: "match: write if / elif",
    ast.AsyncFor: "async for", ast.AsyncWith: "async with",
    ast.AsyncFunctionDef: "an async function",
    ast.TryStar: "try: errors cannot be caught inside a kernel",
}


def expression(kind: type[ast.expr]) -> Callable[[Callable], Callable]:
    """Registers what an expression of this kind evaluates to: (tracer, node) -> value."""
    return _entry(EXPRESSIONS, kind)


def statement(kind: type[ast.stmt]) -> Callable[[Callable], Callable]:
    """Registers what a statement of this kind traces: (tracer, node) -> None."""
    return _entry(STATEMENTS, kind)


def _entry(table: dict, kind: type) -> Callable[[Callable], Callable]:
    def register(visit: Callable) -> Callable:
        if kind in table:
            raise ValueError(f"{kind.__name__} is traced by {table[kind].__name__} already")
        table[kind] = visit
        return visit

    return register


class KernelTracer:
    """The state of a trace: its parts, and the scope of the function that is being traced.

    position  the statement that is being traced
    values    what is known of SSA values
    facts     which elements of tiles exist
    ir        emits ops
    grid      axes of the launch, named extents
    memory    elements and views of tensors and buffers
    """

    def __init__(self, source: KernelSource, fn: Callable, spec: KernelSpec):
        self.fn, self.spec = fn, spec
        self.position = SourcePosition(source)
        self.values = ValueTable()
        self.facts = EdgeFacts(self.values, self.position)
        self.ir = IRBuilder(self.values, self.facts, self.position)
        self.grid = LaunchGrid(self.ir, spec)
        self.memory = MemoryIndexing(self.ir, self.grid)
        self.captured = source.captured  # of the kernel, also while a helper is traced
        self.exits = source.exits
        self.env: dict[str, Any] = {}  # local names
        self.globals: dict[str, Any] = closure_of(fn)  # type: ignore[arg-type]
        self.argument_names = frozenset(n for n, _ in spec.params)
        self.active_calls: list[Any] = [fn]  # functions that are being traced, the kernel first
        self.comprehensions = 0  # depth; in one, a range is wanted as a Python range
        self.depth = 0  # of loops
        self.loop_env: list[dict[str, Any]] = []  # local names before each loop
        self.params: list[Param] = []
        self.result: tuple[str, ...] = ("none",)
        self.outputs: dict[int, Handle] = {}  # new tensors among what the kernel returns

    def fail(self, message: str, hint: str | None = None, **kw: Any) -> NoReturn:
        self.position.fail(message, hint, **kw)

    def expr(self, e: ast.expr) -> Any:
        """An expression as a constant, a Handle or another traced value."""
        outer, self.position.node = self.position.node, e
        try:
            visit = EXPRESSIONS.get(type(e))
            if visit is None:
                what = OUTSIDE.get(type(e), type(e).__name__)
                self.fail(f"{what.partition(':')[0]} is not part of the kernel language",
                          what.partition(": ")[2] or
                          "kernels have numbers, tiles, tuples, slices, operators and calls")
            return visit(self, e)
        finally:
            self.position.node = outer

    def statements(self, body: list[ast.stmt]) -> None:
        """Traces statements into the block of the builder."""
        for s in body:
            outer, self.position.node = self.position.node, s
            visit = STATEMENTS.get(type(s))
            if visit is None:
                what = REFUSED.get(type(s), type(s).__name__)
                self.fail(f"{what.partition(':')[0]} is not part of the kernel language",
                          what.partition(": ")[2] or "write it with if, for, while and assignments")
            visit(self, s)
            self.position.node = outer

    def call_op(self, op: TileOp, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """A call of an op: what its record lowers it to, or one op of the IR. What fails for its
        arguments is an error of the line of the call, whoever noticed it."""
        try:
            if op.lower is None:
                return emit_call(self.ir, self.memory, op, args, kwargs)
            try:
                _signature(op.lower).bind(self, *args, **kwargs)
            except TypeError as err:
                self.fail(f"{op.name}: {err}", call_hint(op, kwargs))
            return op.lower(self, *args, **kwargs)
        except KernelError:
            raise
        except TesseraError as err:  # of a part that kernels share with graphs: a type by its name
            self.fail(err.message, err.hint, code=err.code)
        except FAILURES as err:
            given = ", ".join(map(describe, (*args, *kwargs.values())))
            self.fail(f"{op.name}({given}): {err}", f"ts.tile.{op.signature}")

    def call_function(self, f: Any, *args: Any) -> Any:
        """A function of the user's called with traced values, as if it stood in the source here."""
        held = {f"__called{i}": x for i, x in enumerate((f, *args))}
        first, *rest = (ast.Name(n, ast.Load()) for n in held)
        call = ast.copy_location(ast.Call(first, list(rest), []), self.position.node)
        self.env |= held
        made = self.expr(ast.fix_missing_locations(call))
        for name in held:
            del self.env[name]
        return made


@functools.cache
def _signature(lower: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(lower)


__all__ = ["EXPRESSIONS", "STATEMENTS", "KernelTracer", "expression", "statement"]
