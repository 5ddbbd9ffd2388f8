"""Symbolic extents: `B`, `B*H`, `S + 1`, and the types of tensors that carry them.

A `Dim` is a polynomial with integer coefficients over named extents, in one normal form, so that
equality is structural: `B*H == H*B`, while `B == S` is false because nothing proves it.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field
from functools import reduce
from operator import mul
from typing import Any

from .errors import ArgumentError, ShapeError, TesseraError, TraceError
from .lazy_dataclass import dataclass

Monomial = tuple[str, ...]  # sorted names with repetition: ("B", "H"); () is the constant term


def as_index(value: Any) -> int | None:
    """An integer of Python, NumPy or a tensor of no axes; None for anything else, bools too."""
    array = getattr(value, "shape", ()) != ()  # it has __index__, whatever its shape
    if isinstance(value, bool) or array or not hasattr(value, "__index__"):
        return None
    try:
        return operator.index(value)
    except TypeError as err:  # an array of no axes that holds no integer
        if isinstance(err, TesseraError):
            raise
        return None


@dataclass(frozen=True)
class Dim:
    """A polynomial over named extents: `sym("B S")`, `Dim.of("B*H")`, and arithmetic on them."""

    terms: tuple[tuple[Monomial, int], ...] = field(default=())

    @staticmethod
    def of(value: int | str | Dim) -> int | Dim:
        """An int, a Dim, or a string such as `"B*H"` as an extent. Raises ArgumentError."""
        if isinstance(value, Dim):
            return value
        if isinstance(value, str):
            return _parse(value)
        index = as_index(value)
        if index is None:
            raise ArgumentError(
                f"an extent is an integer, a name or a product of names, got {value!r}",
                hint='write Tensor["B", 64, f32] or Tensor["B*H", "S", f32]',
            )
        return index

    @property
    def names(self) -> frozenset[str]:
        return frozenset(n for mono, _ in self.terms for n in mono)

    def bind(self, sizes: Mapping[str, int | Dim]) -> int | Dim:
        """Substitute sizes for names; an int when nothing symbolic is left."""
        total: int | Dim = 0
        for mono, coeff in self.terms:
            total = total + coeff * reduce(mul, (sizes.get(n, _name(n)) for n in mono), 1)
        return total

    def __add__(self, other: int | Dim) -> int | Dim:
        return _normal(self.terms + _terms(other))

    def __mul__(self, other: int | Dim) -> int | Dim:
        return _normal(
            tuple(
                (tuple(sorted(m + n)), a * b) for m, a in self.terms for n, b in _terms(other)
            )
        )

    def __neg__(self) -> int | Dim:
        return self * -1

    def __sub__(self, other: int | Dim) -> int | Dim:
        return self + (-other)

    def __rsub__(self, other: int | Dim) -> int | Dim:
        return (-self) + other

    __radd__ = __add__
    __rmul__ = __mul__

    def __floordiv__(self, other: int | Dim) -> int | Dim:
        quotient = divide(self, other)
        if quotient is None:
            raise ShapeError(f"{self} is not known to be a multiple of {other}")
        return quotient

    def __rfloordiv__(self, other: int) -> int | Dim:
        raise ShapeError(f"{other} is not known to be a multiple of {self}")

    def __mod__(self, other: int | Dim) -> int:
        if divide(self, other) is None:
            raise ShapeError(f"{self} is not known to be a multiple of {other}")
        return 0

    def __index__(self) -> int:
        raise TraceError(
            f"the extent {self} is symbolic here and has no value",
            hint="give it a size, or write the code so that it does not need the number",
            code="E_SYMBOLIC_DIM",
        )

    __int__ = __index__
    __bool__ = lambda self: True  # noqa: E731  an extent that is not provably 0

    def _order(self, other: object) -> bool:
        raise TraceError(
            f"{self} and {other} cannot be ordered: the extent is symbolic", code="E_SYMBOLIC_DIM"
        )

    __lt__ = __le__ = __gt__ = __ge__ = _order

    def __str__(self) -> str:
        text = ""
        for mono, coeff in self.terms:
            factors = ([str(abs(coeff))] if abs(coeff) != 1 or not mono else []) + list(mono)
            sign = (" - " if coeff < 0 else " + ") if text else ("-" if coeff < 0 else "")
            text += sign + "*".join(factors)
        return text or "0"

    __repr__ = __str__


def _name(name: str) -> Dim:
    return Dim((((name,), 1),))


def _terms(value: int | Dim) -> tuple[tuple[Monomial, int], ...]:
    return value.terms if isinstance(value, Dim) else (((), int(value)),)


def _normal(terms: Sequence[tuple[Monomial, int]]) -> int | Dim:
    total: dict[Monomial, int] = {}
    for mono, coeff in terms:
        total[mono] = total.get(mono, 0) + coeff
    kept = tuple(sorted(((m, c) for m, c in total.items() if c), key=lambda t: (-len(t[0]), t[0])))
    if not kept:
        return 0
    if len(kept) == 1 and kept[0][0] == ():
        return kept[0][1]
    return Dim(kept)


def divide(a: int | Dim, b: int | Dim) -> int | Dim | None:
    """a / b when b is one term that divides every term of a, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    if a == 0:
        return 0
    divisor = _terms(b)
    if len(divisor) != 1:
        return 1 if a == b else None
    (mono, coeff), quotient = divisor[0], []
    for term, value in _terms(a):
        rest = list(term)
        for name in mono:
            if name not in rest:
                return None
            rest.remove(name)
        if value % coeff:
            return None
        quotient.append((tuple(rest), value // coeff))
    return _normal(quotient)


def _parse(text: str) -> int | Dim:
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        raise ArgumentError(
            f"{text!r} is not an extent: names, integers, + - and * only",
            hint='for example "B", "B*H" or "S + 1"; for a half, name it: "2*H" and "H"',
        ) from None


def _evaluate(node: ast.expr) -> int | Dim:
    match node:
        case ast.Name(id=name):
            return _name(name)
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=x):
            return -_evaluate(x)
        case ast.BinOp(left=a, op=ast.Add(), right=b):
            return _evaluate(a) + _evaluate(b)
        case ast.BinOp(left=a, op=ast.Sub(), right=b):
            return _evaluate(a) - _evaluate(b)
        case ast.BinOp(left=a, op=ast.Mult(), right=b):
            return _evaluate(a) * _evaluate(b)
    raise ValueError(ast.dump(node))


def solve(dim: Dim, known: Collection[str]) -> tuple[str, int, Dim | int] | None:
    """(name, factor, rest) when dim = factor * name + rest has one name that is not known, alone in
    its term; else None."""
    unknown = dim.names - set(known)
    if len(unknown) != 1:
        return None
    (name,) = unknown
    own = [(mono, coeff) for mono, coeff in dim.terms if name in mono]
    if len(own) != 1 or own[0][0] != (name,):
        return None
    return name, own[0][1], _normal([t for t in dim.terms if name not in t[0]])


def solved_names(dims: Iterable[int | Dim]) -> dict[str, Dim]:
    """Names that extents such as 2*E alone give a value -> the extent that does."""
    left = [d for d in dims if isinstance(d, Dim)]
    known = {str(d) for d in left if str(d).isidentifier()}
    found: dict[str, Dim] = {}
    while step := next(((s[0], d) for d in left if (s := solve(d, known))), None):
        found[step[0]] = step[1]
        known.add(step[0])
    return found


def sym(names: str) -> Dim | tuple[Dim, ...]:
    """Symbolic extents by name: `S, D = ts.sym("S D")`; one name gives one Dim."""
    dims = tuple(_name(n) for n in names.split())
    if not dims:
        raise ArgumentError("sym needs at least one name", hint='S, D = ts.sym("S D")')
    return dims[0] if len(dims) == 1 else dims


def size_of(shape: Sequence[int | Dim]) -> int | Dim:
    """The number of elements."""
    return reduce(mul, shape, 1)


def show_shape(shape: Sequence[int | Dim]) -> str:
    return "[" + ", ".join(str(d) for d in shape) + "]"


def bind_shape(
    pattern: Sequence[int | Dim],
    shape: Sequence[int | Dim],
    sizes: dict[str, int | Dim],
    what: str,
) -> None:
    """Match `shape` against an annotation, adding the sizes of new names to `sizes`.

    Raises ShapeError naming `what`, both shapes and the extents bound so far.
    """
    if len(pattern) != len(shape):
        raise ShapeError(
            f"{what} has {len(shape)} axes {show_shape(shape)}, "
            f"its annotation has {len(pattern)} {show_shape(pattern)}",
            code="E_RANK",
        )
    for axis, (want, got) in enumerate(zip(pattern, shape, strict=True)):
        if isinstance(want, Dim) and len(want.terms) == 1 and want.terms[0][1] == 1:
            mono = want.terms[0][0]
            if len(mono) == 1 and mono[0] not in sizes:
                sizes[mono[0]] = got
                continue
        bound = want.bind(sizes) if isinstance(want, Dim) else want
        if isinstance(bound, Dim) and bound.names - sizes.keys():
            continue  # a product whose factors nothing has bound yet
        if bound != got:
            known = ", ".join(f"{k}={v}" for k, v in sizes.items())
            raise ShapeError(
                f"{what}: axis {axis} is {got}, its annotation says {want}"
                + (f" = {bound}" if str(want) != str(bound) else ""),
                hint=f"extents bound so far: {known}" if known else None,
            )
