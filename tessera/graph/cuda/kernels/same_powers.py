"""Powers of rows with one reciprocal of their sum, and those of softmax's logarithm from the first.

    s = sum e^(x - m),  v / s               # is v r,  r = 1 / s

As s is at least one, these are the bits that a quotient has, which scales its operands besides.

    e^((x - m) - log s)                     # is e^(x - m) r

where a group holds whole rows, and so the first powers. Their quotient is rounded twice; the
exponent that it saves was, too, by up to 2^-24 of x - m. Where rows are gone through in passes,
powers are made anew in each, and nothing is saved.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...schedule.ir import GroupStep, ScheduledGroup


def share_powers(group: ScheduledGroup, held: bool) -> ScheduledGroup:
    """held: whether the group holds its rows whole."""
    made = {s.name: s for s in group.steps}
    steps, shares = list[GroupStep](), dict[str, str]()  # by sum: its reciprocal
    for s in group.steps:
        total, times = _divisor(s, made), s.args[0] if s.args else None
        if total is None and held and (total := _sum_of(s, made)) is not None:
            (times,) = total.args
        if total is None:
            steps.append(s)
            continue
        if total.name not in shares:
            shares[total.name] = f"{total.name}_r"
            steps.append(_step(total, shares[total.name], "1.0 / {0}", total.name))
        steps.append(_step(s, s.name, "{0} * {1}", times, shares[total.name]))
    return replace(group, steps=tuple(steps))


def _divisor(s: GroupStep, made: dict[str, GroupStep]) -> GroupStep | None:
    """The sum of powers, by which each element of a row is divided."""
    if s.op != "div" or s.type.dtype.name != "f32" or s.shape[-1:] == (1,) or not all(
            isinstance(a, str) for a in s.args):
        return None
    total = made.get(s.args[1])
    if total is None or total.reduction != "sum" or total.type != s.type:
        return None
    power = _producing_step(total.args[0], "exp", made)
    top = made.get(_difference(power.args[0], made)[1]) if power is not None else None
    return total if top is not None and top.reduction == "max" else None


def _step(like: GroupStep, name: str, text: str, *args: Any) -> GroupStep:
    """An elementwise step on f32, where another one stands."""
    attrs = (("kinds", ("float",) * len(args)), ("text", text))
    return replace(like, name=name, op="by_reciprocal", args=args, attrs=attrs)


def _sum_of(power: GroupStep, made: dict[str, GroupStep]) -> GroupStep | None:
    """The sum of e^(x - m) whose logarithm an exponent has subtracted from x - m."""
    if power.op != "exp" or power.type.dtype.name != "f32":
        return None
    away, log = _difference(power.args[0], made)
    total = _producing_step(log, "log", made)
    summed = made.get(total.args[0]) if total is not None else None
    first = _producing_step(summed.args[0], "exp",
                            made) if summed and summed.reduction == "sum" else None
    if summed is None or first is None or first.type != power.type or summed.type != power.type:
        return None
    less = first.args[0]
    return summed if away == less or None not in (ends := _difference(less, made)) and (
        _difference(away, made) == ends) else None


def _difference(name: Any, made: dict[str, GroupStep]) -> tuple[Any, Any]:
    """(a, b) of a - b, which may be spelled a + -b."""
    step = made.get(name) if isinstance(name, str) else None
    if step is not None and step.op == "sub":
        return step.args[0], step.args[1]
    if step is not None and step.op == "add":
        negative = _producing_step(step.args[1], "neg", made)
        if negative is not None:
            return step.args[0], negative.args[0]
    return None, None


def _producing_step(name: Any, op: str, made: dict[str, GroupStep]) -> GroupStep | None:
    """The step that makes a value, where it is of this op."""
    step = made.get(name) if isinstance(name, str) else None
    return step if step is not None and step.op == op else None


__all__ = ["share_powers"]
