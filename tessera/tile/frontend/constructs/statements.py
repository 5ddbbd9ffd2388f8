"""Statements without a file of their own: pass, expressions, assert."""

from __future__ import annotations

import ast

from tessera.tile.frontend.constructs.conditions import condition
from tessera.tile.frontend.tracer import KernelTracer, statement
from tessera.tile.ir.handles import Traced
from tessera.tile.ir.op_record import OPS


@statement(ast.Pass)
def pass_statement(t: KernelTracer, s: ast.Pass) -> None:
    pass


@statement(ast.Expr)
def expression_statement(t: KernelTracer, s: ast.Expr) -> None:
    if not isinstance(s.value, ast.Constant):
        t.expr(s.value)


@statement(ast.Assert)
def assert_statement(t: KernelTracer, s: ast.Assert) -> None:
    test = condition(t, s.test)
    message = t.expr(s.msg) if s.msg else ast.unparse(s.test)
    if not isinstance(test, Traced):
        if not test:
            t.fail(f"assertion fails at compile time: {message}", code="E_KERNEL_ASSERT")
        return
    t.call_op(OPS["device_assert"], [test, message], {})
