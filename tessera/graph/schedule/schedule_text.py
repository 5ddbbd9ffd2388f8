"""Schedule IR as text that reads back: `parse_schedule(print_schedule(plan))` is the plan again.

    schedule 'f' v1 target='sm_90a'
      buffer %v0: 'f32'[4, 3] {kind='input'}
      buffer %v2: 'f32'[4] {kind='result', ops=('%2',)}
      group g0 rows over (4, 3) grid (1,) {}
        schedule {m=4, n=16, warps=1, source='auto'}
        read %v0: 'f32'[4, 3] {}
        %v1: 'f32'[4, 3] = exp(%v0) {} of {ops=('%1',), flops=12.0} loc('model.py', 3, ...)
        %v2: 'f32'[4] = reduce_sum(%v1) {axis=(1,)} of {ops=('%2',)} loc('model.py', 3, ...)
        write %v2: 'f32'[4] {}
      fate '%1' 'g0'
      return %v2

`str(plan)` is for people: it leaves out what follows from the rest. Here, what has its default is
left out. What a group calls that is no plan, a kernel of the user's or a library's function, is an
object of the program; as a graph's captures, it is given to the reader: `callees(plan)`, in order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from ...errors import GraphError
from ...numerics import NumericType, as_type
from ...tile.ir.schedule import Schedule
from ..text_values import (
    RECORDS,
    TextLines,
    extents_text,
    keywords_text,
    read_extents,
    read_keywords,
    read_value,
    read_where,
    restore_strings,
    value_of,
    value_text,
    where_text,
)
from .ir import (
    VERSION,
    GraphSchedule,
    GroupOperand,
    GroupStep,
    PlannedBuffer,
    ScheduledGroup,
    Transfer,
)
from .layouts import StridedLayout

RECORDS["StridedLayout"] = StridedLayout
CALLEES = ("call", "calls")  # attributes of groups that hold an object of the program
_VALUE = r"%([\w.-]+)"
_TYPED = rf"{_VALUE}: (_s\d+_\[[^]]*\])"
_NAME = re.compile(r"%([\w.-]+)")
_LOC = r"(?: loc\((?P<where>.*)\))?"
_BUFFER = re.compile(rf"buffer {_TYPED} \{{(.*)\}}")
_GROUP = re.compile(r"group (\w+) (\w+) over (\(.*?\)) grid (\(.*?\)) \{(.*)\}")
_OPERAND = re.compile(rf"(?:read|write) {_TYPED} \{{(.*)\}}")
_STEP = re.compile(rf"{_TYPED} = (\w+)\((.*?)\) \{{(.*?)\}} of \{{(.*?)\}}{_LOC}")
_COPY = re.compile(rf"copy (\w+) (\w+) {_VALUE} to {_VALUE} \{{(.*)\}}{_LOC}")


# --- writing -------------------------------------------------------------------------------------
def print_schedule(plan: GraphSchedule) -> str:
    """The text. Raises GraphError for attributes that have none."""
    return "\n".join([*_lines(plan), ""])


def callees(plan: GraphSchedule) -> tuple[Any, ...]:
    """What the plan's groups call that is no part of its text."""
    return tuple(v for g in plan.groups for k, v in g.attrs if k in CALLEES)


def _lines(plan: GraphSchedule) -> Iterator[str]:
    numbers = {id(c): i for i, c in enumerate(callees(plan))}

    def typed(x: PlannedBuffer | GroupOperand | GroupStep) -> str:
        return f"%{x.name or '_'}: {extents_text(x.type, x.shape)}"

    yield f"schedule {plan.name!r} v{VERSION} target={plan.target!r}"
    for b in plan.buffers:
        yield f"  buffer {typed(b)} {_fields(b, ('name', 'shape', 'type'))}"
    for step in plan.steps:
        if isinstance(step, Transfer):
            yield f"  copy {step.name} {step.kind} %{step.source} to %{step.target} " \
                  f"{_braces({'nbytes': step.nbytes, 'ops': step.ops})}{where_text(step.where)}"
            continue
        head = _braces({"batch": step.batch} if step.batch else {})
        yield f"  group {step.name} {step.kind} over {_text(step.space)} grid {_text(step.grid)} " \
              f"{head}"
        yield f"    schedule {_schedule(step.schedule)}"
        if step.attrs:
            yield f"    attrs {_braces(dict(step.attrs), numbers)}"
        yield from (f"    read {typed(o)} {_operand(o)}" for o in step.reads)
        for s in step.steps:
            args = ", ".join(f"%{a}" if isinstance(a, str) else _text(a) for a in s.args)
            yield f"    {typed(s)} = {s.op}({args}) {_braces(dict(s.attrs))} of " \
                  f"{_fields(s, ('name', 'op', 'args', 'attrs', 'shape', 'type', 'where'))}" \
                  f"{where_text(s.where)}"
        yield from (f"    write {typed(o)} {_operand(o)}" for o in step.writes)
    yield from (f"  fate {i!r} {fate!r}" for i, fate in plan.fates)
    yield "  return " + ", ".join(f"%{name}" for name in plan.results)


def _operand(o: GroupOperand) -> str:
    return _fields(o, ("name", "shape", "type"))


def _schedule(s: Schedule) -> str:
    found = {k: v for k, v in s.values.items() if k not in s.extra_names}
    found |= {k: v for k in ("extra", "notes") if (v := getattr(s, k))}
    return _braces(found | {"source": s.source})


def _fields(x: Any, without: Sequence[str]) -> str:
    """Its other fields, where they are not their defaults."""
    return _braces({f.name: v for f in fields(x) if f.name not in without
                    and (v := getattr(x, f.name)) != f.default})


def _braces(given: Mapping[str, Any], numbers: Mapping[int, int] | None = None) -> str:
    def text(name: str, value: Any) -> str:
        if numbers is not None and name in CALLEES:
            return f"callee({numbers[id(value)]})"
        return _text(value, name)

    return keywords_text({k: text(k, v) for k, v in given.items()})


def _text(value: Any, name: str = "a step") -> str:
    def other(x: Any) -> str:
        raise GraphError(f"{name} has {x!r}, which the text of a schedule cannot hold")

    return value_text(value, other, [])


# --- reading -------------------------------------------------------------------------------------
def parse_schedule(text: str, called: Sequence[Any] = ()) -> GraphSchedule:
    """The plan of a text that print_schedule made. called: its callees, in order.

    Raises GraphError for a text of a newer version, one that lacks its callees, names of values
    that no buffer has, and any other text.
    """
    lines = text.splitlines()
    reader = _Reader(lines, called)
    try:
        plan = reader.plan()
    except (ValueError, SyntaxError, KeyError, IndexError, TypeError, AttributeError,
            RecursionError) as err:
        raise GraphError(f"line {reader.at} is no Schedule IR: {lines[reader.at - 1:reader.at]}",
                         hint=getattr(err, "message", "")) from err
    if reader.at != len(lines):
        raise GraphError(f"line {reader.at + 1} stands behind the end of the schedule")
    _need_names(plan)
    return plan


def _need_names(plan: GraphSchedule) -> None:
    known = {b.name for b in plan.buffers}
    used = [(f"{b.name} lies in", n) for b in plan.buffers for n in (b.of, b.over) if n]
    used += [(f"{s.name} copies", n) for s in plan.transfers for n in (s.source, s.target)]
    used += [(f"{g.name} has", o.name) for g in plan.groups for o in (*g.reads, *g.writes)]
    for who, name in [*used, *(("the function returns", n) for n in plan.results)]:
        if name not in known:
            raise GraphError(f"{who} %{name}, which is no buffer of the schedule")


class _Reader(TextLines):
    def __init__(self, lines: Sequence[str], called: Sequence[Any]):
        super().__init__(lines)
        self.called, self.held = called, list[str]()

    def _next(self, indent: str) -> str:
        """The next line, whose strings are held."""
        bare, self.held = self.next(indent)
        return bare

    def plan(self) -> GraphSchedule:
        found = re.fullmatch(r"schedule (_s0_) v(\d+) target=(_s1_)", self._next(""))
        if found is None:
            raise ValueError("no head")
        if int(found[2]) > VERSION:
            raise GraphError(f"the schedule is of version {found[2]}, this Tessera reads up to "
                             f"version {VERSION}", hint="read it with the Tessera that wrote it, "
                             "or a newer one")
        name, target = self._value(found[1]), self._value(found[3])
        buffers, fates = list[PlannedBuffer](), list[tuple[str, str]]()
        steps: list[ScheduledGroup | Transfer] = []
        while True:
            line = self._next("  ")
            word = line.partition(" ")[0]
            if word == "return":
                return GraphSchedule(name, target, tuple(buffers), tuple(steps),
                                     tuple(_NAME.findall(line)), tuple(fates))
            if word == "buffer":
                buffers.append(self._typed(PlannedBuffer, _matched(_BUFFER, line)))
            elif word == "group":
                steps.append(self._group(_matched(_GROUP, line)))
            elif word == "copy":
                found = _matched(_COPY, line)
                given = self._keywords(found[5])
                steps.append(Transfer(found[1], found[2], found[3], found[4],
                                      where=self._where(found["where"]), **given))
            else:
                _, op, fate = line.split(" ")
                fates.append((self._value(op), self._value(fate)))

    def _group(self, head: re.Match[str]) -> ScheduledGroup:
        space, grid, given = self._value(head[3]), self._value(head[4]), self._keywords(head[5])
        reads, writes, steps = list[GroupOperand](), list[GroupOperand](), list[GroupStep]()
        schedule, attrs = Schedule(), dict[str, Any]()
        while self.at < len(self.lines) and self.lines[self.at].startswith("    "):
            line = self._next("    ")
            word = line.partition(" ")[0]
            if word == "schedule":
                values = self._keywords(line[len("schedule {"):-1])
                schedule = Schedule(**values)
            elif word == "attrs":
                attrs = self._keywords(line[len("attrs {"):-1], self._callee)
            elif word in ("read", "write"):
                operand = self._typed(GroupOperand, _matched(_OPERAND, line))
                (reads if word == "read" else writes).append(operand)
            else:
                steps.append(self._step(_matched(_STEP, line)))
        return ScheduledGroup(head[1], head[2], space, tuple(reads), tuple(writes), tuple(steps),
                              schedule, grid, tuple(attrs.items()), **given)

    def _step(self, found: re.Match[str]) -> GroupStep:
        shape, kind = self._extents(found[2])
        args = self._value(f"({_NAME.sub(_quoted, found[4])}{',' * bool(found[4])})")
        return GroupStep("" if found[1] == "_" else found[1], found[3], args,
                         tuple(self._keywords(found[5]).items()), shape, kind,
                         where=self._where(found["where"]), **self._keywords(found[6]))

    def _typed(self, record: Callable[..., Any], found: re.Match[str]) -> Any:
        """A buffer or operand: `%v0: 'f32'[4, 3] {...}`."""
        shape, kind = self._extents(found[2])
        return record(found[1], shape, kind, **self._keywords(found[3]))

    def _extents(self, text: str) -> tuple[tuple[int, ...], NumericType]:
        kind, _, shape = text[:-1].partition("[")
        return read_extents(shape), as_type(self._value(kind))

    def _keywords(self, text: str, other: Callable[[Any], Any] = value_of) -> dict[str, Any]:
        return {k: other(v) for k, v in read_keywords(restore_strings(text, self.held)).items()}

    def _callee(self, node: Any) -> Any:
        if getattr(getattr(node, "func", None), "id", "") != "callee":
            return value_of(node)
        (number,) = map(value_of, node.args)
        if not 0 <= number < len(self.called):
            raise GraphError(f"line {self.at} calls object {number} of the program, and the reader "
                             f"was given {len(self.called)}", hint="parse_schedule(text, "
                             "callees(plan)): kernels and libraries' functions have no text")
        return self.called[number]

    def _where(self, text: str | None) -> Any:
        return None if text is None else read_where(restore_strings(text, self.held))

    def _value(self, text: str) -> Any:
        return read_value(restore_strings(text, self.held))


def _matched(pattern: re.Pattern[str], line: str) -> re.Match[str]:
    found = pattern.fullmatch(line)
    if found is None:
        raise ValueError(line)
    return found


def _quoted(name: re.Match[str]) -> str:
    return repr(name[1])


__all__ = ["callees", "parse_schedule", "print_schedule"]
