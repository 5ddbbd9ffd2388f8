"""Scaled differences in rows as fused multiplications and additions.

    (x - m) r                   # is x r + o,              o = -m r
    r ((t - a) - (x - m) b)     # is t r + (x c + d),      c = -b r,  d = -m c - a r

where m, r, a and b are numbers of a row, of which the new ones are made once for each. What is
subtracted is rounded where it was exact: off by 2^-24 |m| r, as what the rounding of m itself
does. So this is for elements of 16 bits, whose own rounding is far above that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ...schedule.ir import GroupStep, ScheduledGroup

ADD, SUB, MUL, NEG = "{0} + {1}", "{0} - {1}", "{0} * {1}", "-{0}"


@dataclass(frozen=True)
class Linear:
    """sum of terms, each an element times a number of its row, and a number of the row. None: 1 as
    a factor, nothing as what is added.  steps: those that this stands for"""

    terms: tuple[tuple[str, str | None], ...]
    more: str | None = None
    steps: frozenset[str] = frozenset()


class _Rewrite:
    """The steps of a group, while values are looked at. rows: names of numbers of rows."""

    def __init__(self, group: ScheduledGroup, rows: Iterable[str]):
        self.steps = {s.name: s for s in group.steps}
        self.rows = {*rows, *(s.name for s in group.steps if s.shape[-1:] == (1,))}
        self.like = next((s for s in group.steps if s.shape[-1:] == (1,)), None)
        self.group, self.made = group, dict[tuple[str, tuple[str, ...]], str]()
        self.fresh = list[GroupStep]()

    def run(self) -> ScheduledGroup:
        if self.like is None:
            return self.group
        read = {a for s in self.group.steps for a in s.args if isinstance(a, str)
                and not self.is_linear(s)} | {o.name for o in self.group.writes}
        steps: list[GroupStep] = []
        for s in self.group.steps:
            before = dict(self.made)
            found = self.linear(s.name) if s.name in read and s.name not in self.rows else None
            if found is not None and len(found.terms) < len(found.steps) and any(
                    factor for _, factor in found.terms):
                steps += [*self.fresh, self.spelled(s, found)]
            else:
                self.made = before
                steps.append(s)
            self.fresh = []
        return replace(self.group, steps=tuple(steps))

    # --- what is found --------------------------------------------------------------------------
    def is_linear(self, s: GroupStep) -> bool:
        """Whether its value is a sum of its operands, or a product with a number of a row."""
        text = dict(s.attrs).get("text")
        if s.type.dtype.name != "f32" or s.reduction or text not in (ADD, SUB, MUL, NEG) or not all(
                isinstance(a, str) for a in s.args):
            return False
        return text != MUL or any(a in self.rows for a in s.args)

    def linear(self, name: str) -> Linear:
        s = self.steps.get(name)
        if s is None or name in self.rows or not self.is_linear(s):
            return Linear(((name, None),))
        text, sides = dict(s.attrs)["text"], [self.side(str(a)) for a in s.args]
        if text == MUL:
            number, x = (sides[0], sides[1]) if not sides[0].terms else (sides[1], sides[0])
            assert number.more is not None
            found = Linear(tuple((t, self.times(f, number.more)) for t, f in x.terms),
                           x.more and self.times(x.more, number.more))
        elif text == NEG:
            found = self.negative(sides[0])
        else:
            a, b = sides[0], self.negative(sides[1]) if text == SUB else sides[1]
            more = self.number(ADD, a.more, b.more) if a.more and b.more else a.more or b.more
            found = Linear(a.terms + b.terms, more)
        return replace(found, steps=frozenset({name}).union(*(x.steps for x in sides)))

    def side(self, name: str) -> Linear:
        return Linear((), name) if name in self.rows else self.linear(name)

    def negative(self, x: Linear) -> Linear:
        return Linear(tuple((t, self.number(NEG, f or self.one())) for t, f in x.terms),
                      x.more and self.number(NEG, x.more))

    # --- what takes its place -------------------------------------------------------------------
    def times(self, factor: str | None, number: str) -> str:
        return number if factor is None else self.number(MUL, factor, number)

    def one(self) -> str:
        return self.number("1.0")

    def number(self, text: str, *args: str) -> str:
        """A number of a row, made once."""
        if (text, args) not in self.made:
            assert self.like is not None
            name = self.made[text, args] = f"{self.group.writes[0].name}_n{len(self.made)}"
            self.fresh.append(self.step(name, text, args, self.like))
            self.rows.add(name)
        return self.made[text, args]

    def spelled(self, s: GroupStep, x: Linear) -> GroupStep:
        args, text = list[str](), "" if x.more is None else "{}"
        for _, factor in x.terms[::-1]:
            rest = f"({text})" if " " in text else text
            text = ("{}" if factor is None else "{} * {}") + (f" + {rest}" if rest else "")
        for t, factor in x.terms:
            args += [t] if factor is None else [t, factor]
        args += [] if x.more is None else [x.more]
        return self.step(s.name, text.format(*(f"{{{i}}}" for i in range(len(args)))),
                         tuple(args), s)

    @staticmethod
    def step(name: str, text: str, args: tuple[str, ...], like: GroupStep) -> GroupStep:
        """An elementwise step on f32, where another one stands."""
        attrs = (("kinds", ("float",) * len(args)), ("text", text))
        return replace(like, name=name, op="scaled", args=args, attrs=attrs)


def scale_differences(group: ScheduledGroup, rows: Iterable[str] = ()) -> ScheduledGroup:
    """The group with such values so. rows: names of numbers of rows that are no steps."""
    return _Rewrite(group, rows).run()


def are_of_means(group: ScheduledGroup) -> bool:
    """Whether rows come in 16 bits and all their statistics are sums: what is near a maximum is
    exact in its difference from that, and small."""
    rows = [r for r in group.reads if r.shape == group.space]
    return bool(rows) and all(r.type.dtype.kind == "float" and r.type.dtype.bits <= 16
                              for r in rows) and all(
        s.reduction in (None, "", "sum") for s in group.steps)


__all__ = ["are_of_means", "scale_differences"]
