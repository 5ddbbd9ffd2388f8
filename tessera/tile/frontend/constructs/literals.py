"""Constants, tuples, lists, dicts and f-strings."""

from __future__ import annotations

import ast
from typing import Any

from tessera.tile.frontend.constructs.conditions import condition
from tessera.tile.frontend.tracer import KernelTracer, expression
from tessera.tile.ir.handles import FText, Handle, LoopRange, describe


@expression(ast.Constant)
def constant(t: KernelTracer, e: ast.Constant) -> Any:
    if isinstance(e.value, complex | bytes):
        t.fail(f"{e.value!r} is no value of a kernel", "complex numbers are two numbers, tiles or "
               "tensors: re * c - im * s, re * s + im * c" if isinstance(e.value, complex) else
               "text is an array of ts.uint8")
    return e.value


@expression(ast.Tuple)
def tuple_literal(t: KernelTracer, e: ast.Tuple) -> Any:
    return tuple(items_of(t, e.elts))


@expression(ast.List)
def list_literal(t: KernelTracer, e: ast.List) -> Any:
    return t.memory.stack_buffers(items_of(t, e.elts))


def items_of(t: KernelTracer, elements: list[ast.expr]) -> list[Any]:
    """Items as they are written one after the other, (*shape, 4) and [*range(4)] among them."""
    items: list[Any] = []
    for e in elements:
        if isinstance(e, ast.Starred):
            items += starred_items(t, t.expr(e.value))
        else:
            items.append(t.expr(e))
    return items


def starred_items(t: KernelTracer, value: Any) -> list[Any]:
    if isinstance(value, LoopRange):
        value = constant_range(t, value)
    if not isinstance(value, tuple | list | range):
        t.fail(f"* of {describe(value)}", "it takes what has its items when the kernel is "
               "compiled: a tuple, a list or a range of constants")
    return [*value]


def constant_range(t: KernelTracer, r: LoopRange) -> range:
    """A range whose numbers become constants; named extents are ones of this specialisation."""
    return range(*(t.ir.constant_int(v, "a number of a range that becomes a tuple")
                   for v in (r.lo, r.hi, r.step)))


@expression(ast.ListComp)
def list_comprehension(t: KernelTracer, e: ast.ListComp | ast.GeneratorExp) -> Any:
    before, out = dict(t.env), []

    def run(generators: list[ast.comprehension]) -> None:
        if not generators:
            out.append(t.expr(e.elt))
            return
        first, *inner = generators
        for item in items_of_loop(t, first):
            bind(t, first.target, item)
            kept = [t.ir.decided(condition(t, c), "the if of a comprehension") for c in first.ifs]
            if any(isinstance(k, Handle) for k in kept):
                t.fail("the if of a comprehension on a run-time value",
                       "what is in a list is decided at compile time")
            if all(kept):
                run(inner)

    run(e.generators)
    t.env = before
    return t.memory.stack_buffers(out)


def items_of_loop(t: KernelTracer, loop: ast.comprehension) -> Any:
    t.comprehensions += 1
    items = t.expr(loop.iter)
    t.comprehensions -= 1
    if not isinstance(items, range | tuple | list):
        t.fail("a list comprehension needs a compile-time range or tuple")
    return items


def bind(t: KernelTracer, target: ast.expr, item: Any) -> None:
    """The name, or the names of a tuple, that a comprehension gives an item."""
    if isinstance(target, ast.Name):
        t.env[target.id] = item
    elif isinstance(target, ast.Tuple | ast.List) and isinstance(item, tuple | list) and (
            len(item) == len(target.elts)):
        for part, value in zip(target.elts, item, strict=True):
            bind(t, part, value)
    else:
        t.fail(f"a comprehension gives {describe(item)} to {ast.unparse(target)}",
               "a name, or as many names as the item has parts")


@expression(ast.GeneratorExp)
def generator(t: KernelTracer, e: ast.GeneratorExp) -> Any:
    """All its items at once, as sum(...) and tuple(...) take them."""
    return tuple(list_comprehension(t, e))


@expression(ast.Dict)
def dict_literal(t: KernelTracer, e: ast.Dict) -> Any:
    if any(k is None for k in e.keys):
        t.fail("** in a dict is not part of the kernel language")
    return {t.expr(k): t.expr(v) for k, v in zip(e.keys, e.values, strict=True) if k}


def formatted(t: KernelTracer, e: ast.FormattedValue) -> Any:
    """What stands in the brackets of an f-string; of what is known at compile time, its text."""
    value = t.expr(e.value)
    spec = t.expr(e.format_spec) if e.format_spec is not None else ""
    if isinstance(value, Handle):
        if spec:
            t.position.warn(f"{{{ast.unparse(e.value)}:{spec}}}: a number of the run is printed as "
                            "it is, whatever the format")
        return value
    if e.conversion == ord("r"):
        value = repr(value)
    return t.ir.call_python(format, value, spec) if spec else value


@expression(ast.JoinedStr)
def f_string(t: KernelTracer, e: ast.JoinedStr) -> Any:
    parts = []
    for v in e.values:
        parts.append(v.value if isinstance(v, ast.Constant) else formatted(t, v))  # type: ignore
    if any(isinstance(p, Handle) for p in parts):
        return FText(tuple(parts))
    return "".join(map(str, parts))


@expression(ast.Starred)
def starred(t: KernelTracer, e: ast.Starred) -> Any:
    t.fail("* is not part of the kernel language", "write the elements out")
