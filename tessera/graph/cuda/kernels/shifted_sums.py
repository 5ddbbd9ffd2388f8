"""Sums of a row about a number of it, made beside those that this number follows from.

    m = sum x / N,  v = sum (x - m)^2,  c = sum g (x - m)

follow from sums about any other number k, with d = x - k and e = m - k:

    sum x = N k + sum d,  v = sum d^2 - e (2 sum d - N e),  c = sum g d - e sum g

So one pass over a row gives all of them, and the groups of a cluster exchange them once. k is the
mean of SAMPLE elements of the row, asked for a row ahead.

What it loses: (k - m)^2 <= N / SAMPLE of the variance, as the sample's elements add as much to it,
so v is a difference of numbers up to 1 + N / SAMPLE times as large, in f32: off by 2^-12 at most
for N = 2^17, by some 2^-24 where elements are alike. Elements that far out have their own
rounding: of 16 bits it moves v by 2^-10 or more. So this is done where they come in 16 bits, and
of f32 not.

It is done for strips of rows (long_strips.py). Where each row has a group, which would wait for its
sample first, it loses: layer norm of rows of 4096 68.7 us for 66.9, of 65536 in clusters 78.7 for
74.8, the library's of 65536 80.5 for 77.5 (2^26 elements of bf16, H200, 2026-11-26).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ....lazy_dataclass import dataclass
from ...schedule.ir import GroupOperand, GroupStep, ScheduledGroup
from .group_statements import FrameBlock, KernelValue
from .kernel_text import KernelWriter

SAMPLE = 32  # a warp's, which meets no other for them


@dataclass(frozen=True)
class Centre:
    """x: what is summed, of an operand's elements.  total: the step that sums it.  near: the name
    of the sample's mean.  distance, sum: names of x - near, and of its sum"""

    x: str
    total: GroupStep
    operand: GroupOperand

    @property
    def near(self) -> str:
        return f"{self.total.name}_k"

    @property
    def distance(self) -> str:
        return f"{self.total.name}_d"

    @property
    def sum(self) -> str:
        return f"{self.total.name}_ds"


class _Shift:
    """The steps of a group, while sums about means are rewritten."""

    def __init__(self, b: FrameBlock, group: ScheduledGroup, N: int, numbers: set[str]):
        self.b, self.group, self.N, self.rows = b, group, N, numbers
        self.steps = {s.name: s for s in group.steps}
        self.centres: dict[str, Centre] = {}
        self.made: list[GroupStep] = []

    def run(self) -> tuple[ScheduledGroup, tuple[Centre, ...]]:
        found = {s.name: made for s in self.group.steps if (made := self.about(s)) is not None}
        if not found:
            return self.group, ()
        steps: list[GroupStep] = []
        for s in self.group.steps:
            centre = next((c for c in self.centres.values() if c.total is s), None)
            if centre is not None:
                steps += self.total(centre)
            else:
                steps += found.get(s.name, (s,))
        return replace(self.group, steps=tuple(steps)), tuple(self.centres.values())

    # --- what is found --------------------------------------------------------------------------
    def about(self, s: GroupStep) -> list[GroupStep] | None:
        """The steps of a sum about a number that follows from the sum of what it is subtracted
        from; None where it is no such sum."""
        product = self.of("{0} * {1}", s.args[0]) if s.reduction == "sum" else None
        if product is None or s.type.dtype.name != "f32":
            return None
        sides = [self.centred(a) for a in product.args]
        if sides[0] is not None and sides[0] == sides[1]:
            return self.square(s, *sides[0])
        for side, other in zip(sides, product.args[::-1], strict=True):
            if side and isinstance(other, str) and self.first(other) and other not in self.rows:
                return self.weighted(s, side[0], side[1], other)
        return None

    def centred(self, name: Any) -> tuple[Centre, str] | None:
        """Of x - m, where m follows from the sum of x over a row: that, and m."""
        step, mean = self.of("{0} - {1}", name), None
        if step is not None:
            x, mean = step.args
        elif (step := self.of("{0} + {1}", name)) is not None:
            x, negative = step.args
            less = self.of("-{0}", negative)
            mean = less.args[0] if less is not None else None
        if step is None or not isinstance(mean, str) or mean not in self.rows:
            return None
        if x not in self.centres and (centre := self.centre(x, mean)) is not None:
            self.centres[x] = centre
        return (self.centres[x], mean) if x in self.centres else None

    def centre(self, x: Any, mean: str) -> Centre | None:
        made = self.steps.get(x) if isinstance(x, str) else None
        if made is None or made.op != "cast" or made.type.dtype.name != "f32":
            return None
        r = self.b.operands.get(made.args[0])
        sums = [s for s in self.steps.values() if s.reduction == "sum" and s.args == (x,)]
        if r is None or r.type.dtype.kind != "float" or r.type.dtype.bits > 16 or (
                r.type.dtype.packed or r.layout is not None or not all(self.b.pattern(r)[-2:])):
            return None
        follows = self.below(mean)
        return next((Centre(x, s, r) for s in sums
                     if s.name in follows and s.type.dtype.name == "f32"), None)

    def below(self, name: str) -> set[str]:
        """What a value of a row follows from, up to the first sums."""
        found, ahead = set[str](), [name]
        while ahead:
            at = ahead.pop()
            if at in found or at not in self.steps:
                continue
            found.add(at)
            if not self.steps[at].reduction:
                ahead += [a for a in self.steps[at].args if isinstance(a, str)]
        return found

    def first(self, name: str) -> bool:
        """Whether a value follows from no sum."""
        step = self.steps.get(name)
        return step is None or not step.reduction and all(
            self.first(a) for a in step.args if isinstance(a, str))

    def of(self, text: str, name: Any) -> GroupStep | None:
        step = self.steps.get(name) if isinstance(name, str) else None
        return step if step is not None and dict(step.attrs).get("text") == text else None

    # --- what takes its place -------------------------------------------------------------------
    def total(self, c: Centre) -> list[GroupStep]:
        """sum x = N k + sum d"""
        x = self.steps[c.x]
        d = self.step(c.distance, "{0} - {1}", (c.x, c.near), x)
        s = replace(c.total, name=c.sum, args=(c.distance,))
        return [d, s, self.step(c.total.name, f"{{0}} + {{1}} * {float(self.N)!r}",
                                (c.sum, c.near), c.total)]

    def square(self, s: GroupStep, c: Centre, mean: str) -> list[GroupStep]:
        """sum d^2 - e (2 sum d - N e)"""
        name, x = s.name, self.steps[c.x]
        return [self.step(f"{name}_p", "{0} * {1}", (c.distance, c.distance), x),
                replace(s, name=f"{name}_q", args=(f"{name}_p",)),
                self.step(f"{name}_e", "{0} - {1}", (mean, c.near), s),
                self.step(name, f"{{0}} - {{1}} * (2.0 * {{2}} - {float(self.N)!r} * {{1}})",
                          (f"{name}_q", f"{name}_e", c.sum), s)]

    def weighted(self, s: GroupStep, c: Centre, mean: str, g: str) -> list[GroupStep]:
        """sum g d - e sum g"""
        name, x = s.name, self.steps[c.x]
        whole = next((t.name for t in self.steps.values()
                      if t.reduction == "sum" and t.args == (g,) and t.type == s.type), None)
        more = [] if whole else [replace(s, name=f"{name}_g", args=(g,))]
        return [*more, self.step(f"{name}_p", "{0} * {1}", (g, c.distance), x),
                replace(s, name=f"{name}_q", args=(f"{name}_p",)),
                self.step(f"{name}_e", "{0} - {1}", (mean, c.near), s),
                self.step(name, "{0} - {1} * {2}",
                          (f"{name}_q", f"{name}_e", whole or f"{name}_g"), s)]

    @staticmethod
    def step(name: str, text: str, args: tuple[str, ...], like: GroupStep) -> GroupStep:
        """An elementwise step on f32, where another one stands."""
        attrs = (("kinds", ("float",) * len(args)), ("text", text))
        return replace(like, name=name, op="shifted", args=args, attrs=attrs)


def about_samples(b: FrameBlock, group: ScheduledGroup
                  ) -> tuple[ScheduledGroup, tuple[Centre, ...]]:
    """The group with sums about the means of samples in place of those about means, and the
    samples."""
    numbers = {s.name for s in group.steps if s.shape[-1:] == (1,)}
    return _Shift(b, group, b.frame.extents[-1], numbers).run()


def about_column_samples(b: FrameBlock, group: ScheduledGroup
                         ) -> tuple[ScheduledGroup, tuple[Centre, ...]]:
    """The same of a group over [A, R, C] whose statistics are those of columns."""
    tall = {name for name, r in b.operands.items() if b.pattern(r)[1]}
    for s in group.steps:
        if not s.reduction and tall.intersection(a for a in s.args if isinstance(a, str)):
            tall.add(s.name)
    numbers = {s.name for s in group.steps} - tall
    return _Shift(b, group, b.frame.extents[1], numbers).run()


def ask_samples(w: KernelWriter, b: FrameBlock, centres: Sequence[Centre]) -> None:
    """Loads the samples of the block's rows."""
    for c in centres:
        place, *_ = replace(b, columns=f"0:{SAMPLE}").place(c.operand)
        w.line(f"{c.near}_x = tile.load({place})", c.total)


def hold_samples(w: KernelWriter, b: FrameBlock, centres: Sequence[Centre]) -> None:
    """The means of the samples that were asked for."""
    for c in centres:
        sample = f"tile.cast({c.near}_x, {w.type(c.total.type)})"
        w.line(f"{c.near} = tile.row_sum({sample}) * {1 / SAMPLE!r}", c.total)
        b.held[c.near] = KernelValue(c.near, True, False)


def hold_column_samples(w: KernelWriter, b: FrameBlock, centres: Sequence[Centre]) -> None:
    """The means of samples of the block's columns."""
    for c in centres:
        place, *_ = replace(b, rows=f"0:{SAMPLE}").place(c.operand)
        sample = f"tile.cast(tile.load({place}{b.fill}), {w.type(c.total.type)})"
        w.line(f"{c.near} = tile.col_sum({sample})[None, :] * {1 / SAMPLE!r}", c.total)
        b.held[c.near] = KernelValue(c.near, False, True)


__all__ = ["SAMPLE", "Centre", "about_column_samples", "about_samples", "ask_samples",
           "hold_column_samples", "hold_samples"]
