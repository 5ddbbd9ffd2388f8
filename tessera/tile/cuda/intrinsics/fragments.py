"""What is done to tuples of registers: make, pick, join, and arithmetic element by element.

A fragment is a uniform tuple that stays in registers: indices are compile-time constants, and a
loop carries it as one value. Each function gives the Operation for `use`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ....errors import DTypeError, ShapeError
from ..instruction import Instruction, InstructionForm, Kind, Operand, Operation

Body = Callable[..., Any]


def _out(kind: Kind, count: int) -> tuple[Operand, ...]:
    return (Operand("d", kind, count),)


@functools.cache
def undefined(kind: Kind, count: int) -> Operation:
    """() -> a fragment of any content, for an accumulator whose first use overwrites it."""
    form = InstructionForm((), _out(kind, count), lambda b: [b.undefined(kind)] * count)
    return Operation(f"undefined_{kind}x{count}", 0, lambda: form)


@functools.cache
def full(kind: Kind, count: int) -> Operation:
    """(x) -> a fragment of x."""
    form = InstructionForm((Operand("x", kind),), _out(kind, count), lambda b, x: [x] * count)
    return Operation(f"full_{kind}x{count}", 1, lambda _: form)


@functools.cache
def gather(kind: Kind, count: int) -> Operation:
    """(x0, x1, ...) scalars -> their fragment."""
    args = tuple(Operand(f"x{i}", kind) for i in range(count))
    form = InstructionForm(args, _out(kind, count), lambda b, *x: list(x))
    return Operation(f"gather_{kind}x{count}", count, lambda *_: form)


@functools.cache
def pick(indices: tuple[int, ...] | int) -> Operation:
    """(fragment) -> its elements at `indices`, in that order; an int gives a scalar."""
    def rule(t: Operand) -> InstructionForm:
        largest = max(indices) if isinstance(indices, tuple) else indices
        if largest >= t.count:
            raise ShapeError(f"element {largest} of a fragment of {t.count}")
        if isinstance(indices, int):
            return InstructionForm((t,), _out(t.kind, 0), lambda b, x: x[indices])
        return InstructionForm((t,), _out(t.kind, len(indices)), lambda b,
                               x: [x[i] for i in indices])

    return Operation("pick", 1, rule)


@functools.cache
def join(arity: int) -> Operation:
    """Fragments of one kind -> one, in order."""
    def rule(*parts: Operand) -> InstructionForm:
        return InstructionForm(parts, _out(parts[0].kind, sum(p.count for p in parts)),
                               lambda b, *x: [e for part in x for e in part])

    return Operation("join", arity, rule)


@functools.cache
def bitcast(kind: Kind) -> Operation:
    """The same bits as another kind of the same width, fragment or scalar."""
    def rule(t: Operand) -> InstructionForm:
        return InstructionForm((t,), _out(kind, t.count), lambda b,
                               x: [b.bitcast(e, kind) for e in x]
                               if t.count else b.bitcast(x, kind))

    return Operation(f"bitcast_{kind}", 1, rule)


# --- element by element ---------------------------------------------------------------------------


def _spread(args: tuple[Operand, ...]) -> int:
    counts = {a.count for a in args if a.count}
    if len(counts) > 1:
        raise ShapeError(f"fragments of {' and '.join(map(str, sorted(counts)))} elements meet")
    return counts.pop() if counts else 0


def elementwise(name: str, arity: int, body: Body, result: Kind | None = None) -> Operation:
    """body(builder, *values) for each element; scalars meet every element of a fragment.

    Arguments of a lesser kind are converted to the greatest (i32 < i64 < f32 < f64); `result` is
    the kind that comes out when it is another.
    """
    def rule(*given: Operand) -> InstructionForm:
        kind = _greatest(given)
        args = tuple(Operand(a.name, kind, a.count) for a in given)
        count = _spread(args)

        def apply(b: Any, *values: Any) -> Any:
            if not count:
                return body(b, *values)
            lists = [v if isinstance(v, list) else [v] * count for v in values]
            return [body(b, *elements) for elements in zip(*lists, strict=True)]

        return InstructionForm(args, _out(result or kind, count), apply)

    return Operation(name, arity, rule)


def _greatest(given: tuple[Operand, ...]) -> Kind:
    order: list[Kind] = ["pred", "i16", "i32", "i64", "f32", "f64"]
    kinds = {o.kind for o in given}
    ints = {k for k in kinds if k[0] != "f"}
    # A scalar literal in Python is f64 or i64; it takes the kind of the fragment it meets.
    fragments = {o.kind for o in given if o.count} or kinds
    if ints and len(ints) < len(kinds) and any(o.kind[0] != "f" and o.count for o in given):
        raise DTypeError(f"{' and '.join(sorted(kinds))} meet", hint="convert one of them")
    return max(fragments, key=order.index)


def _by_kind(for_float: Body, for_int: Body) -> Body:
    return lambda b, *x: (for_float if b.is_float(x[0]) else for_int)(b, *x)


add = elementwise("add", 2, _by_kind(lambda b, x, y: b.fadd(x, y), lambda b, x, y: b.add(x, y)))
sub = elementwise("sub", 2, _by_kind(lambda b, x, y: b.fsub(x, y), lambda b, x, y: b.sub(x, y)))
mul = elementwise("mul", 2, _by_kind(lambda b, x, y: b.fmul(x, y), lambda b, x, y: b.mul(x, y)))
div = elementwise("div", 2, lambda b, x, y: b.fdiv(x, y))
neg = elementwise("neg", 1, _by_kind(lambda b, x: b.fneg(x), lambda b, x: b.sub(b.zero(x), x)))
bit_and = elementwise("bit_and", 2, lambda b, x, y: b.and_(x, y))
bit_or = elementwise("bit_or", 2, lambda b, x, y: b.or_(x, y))
bit_xor = elementwise("bit_xor", 2, lambda b, x, y: b.xor(x, y))
shift_left = elementwise("shift_left", 2, lambda b, x, y: b.shl(x, y))
shift_right = elementwise("shift_right", 2, lambda b, x, y: b.lshr(x, y))
shift_right_signed = elementwise("shift_right_signed", 2, lambda b, x, y: b.ashr(x, y))
udiv = elementwise("udiv", 2, lambda b, x, y: b.udiv(x, y))
urem = elementwise("urem", 2, lambda b, x, y: b.urem(x, y))


@functools.cache
def compare(op: str, *, unsigned: bool = False) -> Operation:
    """(x, y) -> 1 where `x op y`, else 0."""
    return elementwise("compare", 2, lambda b, x, y: b.to_int(b.compare(op, x, y,
                                                                       unsigned=unsigned)), "i32")


def _where(condition: Operand, x: Operand, y: Operand) -> InstructionForm:
    kind = _greatest((x, y))
    args = (Operand("c", "i32", condition.count), Operand("x", kind, x.count),
            Operand("y", kind, y.count))
    count = _spread(args)

    def body(b: Any, *values: Any) -> Any:
        if not count:
            c, first, second = values
            return b.select(b.true(c), first, second)
        lists = [v if isinstance(v, list) else [v] * count for v in values]
        return [b.select(b.true(c), p, q) for c, p, q in zip(*lists, strict=True)]

    return InstructionForm(args, _out(kind, count), body)


# (condition, x, y): branch-free, unlike Python's conditional expression
where = Operation("where", 3, _where)


@functools.cache
def mapped(instruction: Instruction) -> Operation:
    """An instruction of scalars, applied element by element: mapped(arithmetic "ex2_approx")."""
    (result,) = instruction.results

    def rule(*given: Operand) -> InstructionForm:
        args = tuple(Operand(o.name, o.kind, g.count)
                     for o, g in zip(instruction.args, given, strict=True))
        count = _spread(args)

        def body(b: Any, *values: Any) -> Any:
            if not count:
                return b.call(instruction, *values)
            lists = [v if isinstance(v, list) else [v] * count for v in values]
            return [b.call(instruction, *e) for e in zip(*lists, strict=True)]

        return InstructionForm(args, _out(result.kind, count), body)

    return Operation(f"mapped_{instruction.name}", len(instruction.args), rule)


@functools.cache
def packed(instruction: Instruction) -> Operation:
    """One fragment, consecutive elements together as the instruction's arguments (two f32 to one
    register of bf16x2): n elements become n / arity."""
    (result,) = instruction.results
    size = sum(o.registers for o in instruction.args)

    def rule(t: Operand) -> InstructionForm:
        if t.count % size:
            raise ShapeError(f"{instruction.name} packs {size}; a fragment of {t.count} is given")

        def body(b: Any, x: Any) -> Any:
            groups = [x[i:i + size] for i in range(0, t.count, size)]
            tuple_ = instruction.args[0].count
            return [b.call(instruction, *([g] if tuple_ else g)) for g in groups]

        return InstructionForm((Operand("x", instruction.args[0].kind, t.count),),
                               _out(result.kind, t.count // size), body)

    return Operation(f"packed_{instruction.name}", 1, rule)


@functools.cache
def unpacked(*instructions: Instruction) -> Operation:
    """Each register through each instruction in turn (low half, high half): n become n * many."""
    def rule(t: Operand) -> InstructionForm:
        kind = instructions[0].results[0].kind
        return InstructionForm((Operand("x", "i32", t.count),),
                               _out(kind, t.count * len(instructions)),
                               lambda b, x: [b.call(i, e) for e in x for i in instructions])

    return Operation("unpacked_" + instructions[0].name, 1, rule)


@functools.cache
def reduce(operation: Operation | Instruction, groups: tuple[tuple[int, ...], ...]) -> Operation:
    """The elements of each group combined from left to right: one result a group."""
    def rule(t: Operand) -> InstructionForm:
        def combine(b: Any, x: Any, y: Any) -> Any:
            if isinstance(operation, Instruction):
                return b.call(operation, x, y)
            return operation.rule(Operand("x", t.kind), Operand("y", t.kind)).body(b, x, y)

        def body(b: Any, x: Any) -> Any:
            return [functools.reduce(lambda p, q: combine(b, p, q), [x[i] for i in group])
                    for group in groups]

        return InstructionForm((t,), _out(t.kind, len(groups)), body)

    return Operation(f"reduce_{operation.name}", 1, rule)
