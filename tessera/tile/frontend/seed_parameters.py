"""Parameters of a kernel that are seeds: numbers of the run, where other `int`s are constants."""

from __future__ import annotations

import ast
import functools
import inspect

from tessera.tile.ir.op_record import OPS


@functools.cache
def _positions() -> dict[str, int | None]:
    """Ops that take a seed -> its place among the arguments of a call, None by keyword only."""
    found: dict[str, int | None] = {}
    for op in OPS.values():
        _, *parameters = inspect.signature(op.lower).parameters.values() if op.lower else (None,)
        for i, p in enumerate(parameters):
            if p is not None and p.name == "seed":
                found[op.name] = None if p.kind is p.KEYWORD_ONLY else i
    return found


def seed_parameters(tree: ast.FunctionDef) -> frozenset[str]:
    """Names that the body reads in the seeds of random ops, and nowhere else."""
    seeds: list[ast.AST] = []
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(
            call.func, "id", "")
        if name not in _positions():
            continue
        at = _positions()[name]
        seeds += [k.value for k in call.keywords if k.arg == "seed"]
        seeds += [] if at is None else call.args[at:at + 1]
    if not seeds:
        return frozenset()
    inside = [n for s in seeds if not isinstance(s, ast.Tuple) for n in ast.walk(s)]
    used = {n.id for n in inside if isinstance(n, ast.Name)}
    within = set(map(id, inside))
    elsewhere = {n.id for s in tree.body for n in ast.walk(s)
                 if isinstance(n, ast.Name) and id(n) not in within}
    return frozenset(used - elsewhere)


__all__ = ["seed_parameters"]
