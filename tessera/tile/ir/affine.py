"""Integer values as sums: {None: constant, value: coefficient}."""

from __future__ import annotations

from typing import Any

from tessera.tile.ir.ir import Const, SSAValue

Form = dict[SSAValue | None, int]


def constant(n: int) -> Form:
    return {None: n}


def add(a: Form, b: Form, sign: int = 1) -> Form:
    out = {k: a.get(k, 0) + sign * b.get(k, 0) for k in {*a, *b}}
    return {k: v for k, v in out.items() if v or k is None}


def scale(a: Form, n: int) -> Form:
    return {k: n * v for k, v in a.items() if n * v or k is None}


class Forms:
    """The affine forms of the integer scalars seen so far, and upper bounds from min()."""

    def __init__(self) -> None:
        self.of: dict[SSAValue, Form] = {}
        self.below: dict[SSAValue, list[Form]] = {}  # value <= each of these
        self.first: dict[SSAValue, SSAValue] = {}  # the value that was computed alike before
        self.made: dict[Any, SSAValue] = {}

    def form(self, x: Any) -> Form:
        """Of an operand or a Python integer."""
        if isinstance(x, Const):
            return constant(int(x.value))
        if isinstance(x, int):
            return constant(x)
        return self.of.get(x, {None: 0, x: 1})

    def difference(self, a: Any, b: Any) -> Form:
        """a - b, where quotients of one number by another are equal wherever they are written."""
        out: Form = {None: 0}
        for form, sign in ((self.form(a), 1), (self.form(b), -1)):
            for k, v in form.items():
                out = add(out, {self.first.get(k, k) if k is not None else None: v}, sign)
        return out

    def upper(self, x: Any) -> list[Form]:
        """Forms that are not below x: its own, and what a min() says."""
        found = [self.form(x)]
        if isinstance(x, SSAValue):
            found += self.below.get(x, [])
        return found

    def note(self, name: str, out: SSAValue, args: tuple[Any, ...]) -> None:
        """Records what an op on integers computes."""
        if name in ("add", "sub"):
            self.of[out] = add(self.form(args[0]), self.form(args[1]), 1 if name == "add" else -1)
        elif name == "neg":
            self.of[out] = scale(self.form(args[0]), -1)
        elif name == "mul":
            a, b = (self.form(x) for x in args)
            if set(a) <= {None}:
                self.of[out] = scale(b, a.get(None, 0))
            elif set(b) <= {None}:
                self.of[out] = scale(a, b.get(None, 0))
        elif name == "convert":
            self.of[out] = self.form(args[0])
        elif name in ("floordiv", "mod"):
            key = (name, *(frozenset(self.form(x).items()) for x in args))
            self.first[out] = self.made.setdefault(key, out)
        elif name == "minimum":
            self.below[out] = self.upper(args[0]) + self.upper(args[1])

    def copy(self) -> Forms:
        new = Forms()
        new.of, new.below = dict(self.of), dict(self.below)
        new.first, new.made = dict(self.first), dict(self.made)
        return new
