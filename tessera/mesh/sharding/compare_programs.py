"""Before a program runs, its ranks compare what it is; before its first run, what they give it too.

One message says both: its header, which each rank sends to each other, carries a digest of the
program, and one number for each axis of the mesh. That is made of the first elements of all
operands of which the ranks along the axis hold the same block: parameters that every rank drew
with a seed of its own would else train on, each rank its own model. Another number is of the plain
operands alone, which change from call to call, and one more for each axis of what was left by calls
that exchanged nothing (plain_operands.py): these are sent in each.
"""

from __future__ import annotations

import json
import math
import re
import struct
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tessera.dims import show_shape
from tessera.errors import user_line
from tessera.graph.op import Aval
from tessera.numerics import as_type
from tessera.numerics.random_state import seed_and_step
from tessera.runtime.arrays import HOST
from tessera.tensor import Tensor, as_tensor

from ...lazy_dataclass import dataclass
from ..device_mesh import Mesh
from ..errors import DisagreementError, PolicyMismatch, RankAloneWarning
from ..layout import Layout
from ..ranks.call_numbers import ALIKE, LeftSamples, differing_operand, values_text
from ..ranks.envelope import MessageLabel, ranks_text
from ..ranks.group import Group
from ..ranks.ledger import CollectiveCall, agree
from .plain_operands import CallOfParts, LeftOperands, number_of, samples_of, was_written

F64 = as_type("f64")
SAMPLE, SHOWN = 4096, 4  # elements of an operand that are looked at, and shown where they differ
# Ranks on machines of two kinds may round differently what each computes for itself.
TOLERANCE = 1e-5
Number = Callable[[Tensor], float]
UNKNOWN = math.nan  # of a rank that has run the program before


@dataclass(frozen=True)
class GivenPart:
    """A rank's part of an operand. along: the axes over which others hold the same."""

    name: str
    part: Tensor
    along: tuple[str, ...]


def operands_of(mesh: Mesh, parts: Sequence[Tensor], layouts: Sequence[Layout | None],
                names: Sequence[str]) -> list[GivenPart]:
    """A rank's parts of what a program is given. layouts: None for a tensor that each rank has
    whole; names: of the first of them"""
    return [GivenPart(operand_name(i, part, at, names), part,
                      mesh.axes if at is None else at.repeated)
            for i, (part, at) in enumerate(zip(parts, layouts, strict=True))]


def operand_name(i: int, x: Tensor | Aval, at: Layout | None, names: Sequence[str]) -> str:
    """An operand for people: `lr, f64[]`, `operand 3, f32[4, 3] of (dp, -)`."""
    name = names[i] if i < len(names) else f"operand {i}"
    return f"{name}, {x.type}{show_shape(x.shape)}{f' of {at.describe()}' if at else ''}"


def random_state_of(mesh: Mesh) -> list[GivenPart]:
    """What the draws of a program follow from, beside keys: they are draws of whole tensors, so
    that all ranks draw with one seed and as many steps."""
    seed, step = seed_and_step()
    words = [float(seed & 0xFFFFFFFF), float(seed >> 32)]
    return [GivenPart(f"the {what} of its random draws", as_tensor(np.array(x)), mesh.axes)
            for what, x in (("seed", words), ("step", [float(step)]))]


def agree_on_program(group: Group, mine: CollectiveCall, mesh: Mesh, digest: str,
                     text: Callable[[], str], given: Callable[[], Sequence[GivenPart]],
                     number: Number | None, plain: Mapping[str, Tensor], left: LeftOperands
                     ) -> None:
    """Return when all ranks of a mesh run the same program, and are given what fits together.

    group: all ranks of the mesh   digest: of the program, in hexadecimal   text: the program
    given: what this rank gives it   number: of each, where these are looked at: when it runs for
    the first time, and again behind calls that some ranks alone have made   plain: its plain
    operands by name, which are looked at always, as is what calls in front of it left that sent
    nothing
    Raises DisagreementError with the first line in which programs differ, PolicyMismatch with the
    first operand of which ranks hold different values; on all ranks.
    """
    operands, by_program = given() if number else (), left.take()
    calls, of_parts = left.take_calls()
    numbers = [_number_along(operands, a, number) if number else UNKNOWN for a in mesh.axes]
    samples = samples_of([*plain.values()])
    numbers += [number_of(samples), *(sum(k[2] for k in by_program.values() if a in k[4])
                                      for a in mesh.axes)]
    told = _tell(group, mine, [int(digest[:15], 16), *map(_bits, numbers), KINDS.index(number),
                               calls])
    if told.count(told[0]) == len(told):
        return
    if len({t[0] for t in told}) > 1:
        raise _programs_differ(group, mine, text().splitlines())
    n = len(mesh.axes)
    apart = any(len({told[r][n + 2 + i] for r in ranks}) > 1
                for i, a in enumerate(mesh.axes) for ranks in mesh.groups(a))
    kinds = {t[-2] for t in told}  # of numbers, the same on all ranks
    first = kinds == {KINDS.index(first_number)}
    if apart and not first:
        _compare_left(group, mine, by_program)
    along = [[*map(_float, t[1:n + 1])] for t in told]
    others = len({t[-1] for t in told}) > 1
    left.epoch += others
    if others:
        _warn_of_calls(group, mine, of_parts)
    if len(kinds) > 1 or (others and number is None):
        operands, number = given(), KINDS[max(kinds)] or sampled_number
        along = _numbers_of_all(group, mine, mesh, operands, number)
    _need_alike(group, mine, mesh, along, operands, number or first_number)
    of_plain = [GivenPart(name, Tensor(np.array(values), F64), mesh.axes)
                for name, values in zip(plain, samples, strict=True)]
    _need_alike(group, mine, mesh, [[_float(t[n + 1])] * n for t in told], of_plain, first_number)
    if apart and first:
        _compare_left(group, mine, by_program)


def _warn_of_calls(group: Group, mine: CollectiveCall, own: Mapping[int, CallOfParts]) -> None:
    """Warn, on a rank that has computed with split tensors what others have not, at its line. It is
    no error: it may print what it computes."""
    by_rank = _swap(group, mine, {str(k): c.times for k, c in own.items()}, "calls")
    for call, made in own.items():
        fewer = [r for r, other in zip(group.ranks, by_rank, strict=True)
                 if other.get(str(call), 0) < made.times]
        if fewer and made.where is not None:
            warnings.warn_explicit(
                f"{made.name}() on a tensor that is split over {group.axis}, made by rank "
                f"{group.transport.rank} and not by {ranks_text(fewer)}: its result lacks their "
                "parts. All ranks of a mesh make an op on its tensors; x.local is this rank's part",
                RankAloneWarning, made.where.file, made.where.line)


def _swap(group: Group, mine: CollectiveCall, own: Any, what: str) -> list[Any]:
    """What each rank has, in their order."""
    data = np.frombuffer(json.dumps(own).encode(), np.uint8)
    counts = [n for (n,) in _tell(group, mine, [data.size])]
    got = group.swap_bytes([data] * group.size, counts, mine.label(group).of(what))
    return [json.loads(x.tobytes()) for x in got]


def _compare_left(group: Group, mine: CollectiveCall, left: LeftSamples) -> None:
    """Raise PolicyMismatch where ranks that made calls which sent nothing as often as others were
    given other plain operands."""
    found = differing_operand(_swap(group, mine, left, "operands"))
    if found is None:
        return
    name, by_rank = found
    by_values: dict[str, list[int]] = {}
    for rank, values in zip(group.ranks, by_rank, strict=True):
        by_values.setdefault(values_text(values) or "none", []).append(rank)
    shown = "\n".join(f"  {ranks_text(ranks)}: {text}" for text, ranks in by_values.items())
    raise PolicyMismatch(
        f"the ranks of {group.axis!r} have given different values of what they hold alike, "
        f"{name}, before {mine.op}:\n{shown}", where=mine.where, hint=ALIKE)


# --- what ranks tell each other ------------------------------------------------------------------
def _tell(group: Group, mine: CollectiveCall, numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """The numbers of all ranks. They go where extents go that may vary."""
    return agree(group, replace(mine, shape=tuple(numbers)), range(len(numbers)))


def _texts(group: Group, mine: CollectiveCall, text: str) -> str:
    """A line for each text that a rank has, with the ranks."""
    label = MessageLabel(text, None, mine.key(group, ()))
    me = group.transport.rank
    got = group.transport.meet((r for r in group.ranks if r != me), label)
    by_text: dict[str, list[int]] = {}
    for r in group.ranks:
        by_text.setdefault(got[r].text if r in got else text, []).append(r)
    return "\n".join(f"  {ranks_text(ranks)}: {line}" for line, ranks in by_text.items())


def _bits(x: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


# --- programs ------------------------------------------------------------------------------------
def _programs_differ(group: Group, mine: CollectiveCall, lines: Sequence[str]
                     ) -> DisagreementError:
    """The error that shows the first line that is not the same, found by bisection."""
    least = min(n for (n,) in _tell(group, mine, [len(lines)]))
    low, high = 0, least  # the first `low` lines are the same
    while low < high:
        middle = (low + high + 1) // 2
        told = _tell(group, mine, [zlib.crc32("\n".join(lines[:middle]).encode())])
        low, high = (middle, high) if len(set(told)) == 1 else (low, middle - 1)
    rest = [*lines[low:], "(nothing further)"]
    if re.match(r"operand \d+ is ", rest[0]):
        return DisagreementError(
            f"the ranks of {group.axis!r} give {mine.op} its arguments in different orders:\n"
            f"{_texts(group, mine, rest[0])}", where=mine.where,
            hint="a dict keeps the order in which it was filled, and that of a set of strings "
            "differs between processes: fill it from a list, or from sorted(names)")
    if given := re.match(r" *%(\d+): (.*) = input$", rest[0]):
        name = lines[int(given[1])].rpartition(" is ")[2] or "an operand"
        return DisagreementError(
            f"the ranks of {group.axis!r} give {mine.op} operands of different shapes or types:\n"
            f"{_texts(group, mine, f'{name}, {given[2]}')}", where=mine.where,
            hint="a batch is one tensor that all ranks make alike, each of its own part: "
            "ts.dist.from_local makes it of parts that ranks have")
    mapped = next((line for line in rest if re.search(r"# \S+:\d+  ", line)), rest[0]).strip()
    shown = _texts(group, mine, mapped)
    if len(_without_places(shown)) == 1:
        first = _texts(group, mine, rest[0].strip())
        if len(_without_places(first)) > 1:  # a constant has no line of the user's
            shown = f"{first}\n  in {mapped}"
    return DisagreementError(
        f"the ranks of {group.axis!r} have traced {mine.op} differently:\n{shown}",
        where=mine.where,
        hint="it must be one function on all ranks, of operands of one type and shape; look for a "
        "branch that depends on the rank")


def _without_places(shown: str) -> set[str]:
    """The lines that ranks have, but for where they stand in the user's program."""
    return {line.partition(": ")[2].partition("    # ")[0] for line in shown.splitlines()}


# --- values --------------------------------------------------------------------------------------
def _sample(x: Tensor) -> np.ndarray:
    """The first elements of a tensor as f64, 0 where they are not finite; bytes of a packed one."""
    if x.place == HOST:
        array = x.buffer if x.dtype.packed else x.array
        found = array.flat[:SAMPLE]
    elif x.offloaded:
        return np.zeros(0)
    else:
        kind = np.dtype(np.uint8) if x.dtype.packed else x.dtype.numpy
        found = np.empty(min(SAMPLE, x.storage.nbytes // kind.itemsize), kind)
        if found.size:
            x.storage.device.synchronize()
            x.storage.read(found)
    found = found.astype(np.float64)
    return np.where(np.isfinite(found), found, 0.0)


def first_number(x: Tensor) -> float:
    """A number that other elements, another order and other sizes of them change."""
    found = _sample(x)
    size = float(np.abs(found).sum())
    weights = np.cos(np.arange(found.size) ** 2 * 0.1 + 1.0)
    return float(weights @ found) / size + 7 * math.log2(size) if size else 0.0


def sampled_number(x: Tensor) -> float:
    """The same of a few elements, in a microsecond or two; 0 of what lies on a GPU."""
    return number_of(samples_of([x]))


KINDS = (None, sampled_number, first_number)


def _number_along(operands: Sequence[GivenPart], axis: str, number: Number) -> float:
    """Of all operands of which the ranks along an axis hold the same."""
    return sum(number(x.part) * (1 + i * 0.618034 % 1)
               for i, x in enumerate(operands) if axis in x.along)


def _differing_axis(mesh: Mesh, told: Sequence[Sequence[float]], count: int) -> str | None:
    """The first axis along which numbers differ. told: by rank and axis"""
    for i, axis in enumerate(mesh.axes):
        for group in mesh.groups(axis):
            known = [told[r][i] for r in group if not math.isnan(told[r][i])]
            if known and max(known) - min(known) > TOLERANCE * count:
                return axis
    return None


def _numbers_of_all(group: Group, mine: CollectiveCall, mesh: Mesh,
                    operands: Sequence[GivenPart], number: Number) -> list[list[float]]:
    own = [_bits(_number_along(operands, a, number)) for a in mesh.axes]
    return [[*map(_float, t)] for t in _tell(group, mine, own)]


def _need_alike(group: Group, mine: CollectiveCall, mesh: Mesh, told: Sequence[Sequence[float]],
                operands: Sequence[GivenPart], number: Number) -> None:
    """Raise PolicyMismatch where numbers of operands differ along an axis. told: by rank, axis"""
    axis = _differing_axis(mesh, told, len(operands))
    if axis is not None:
        raise _values_differ(group, mine, mesh, axis, operands, number)


def _values_differ(group: Group, mine: CollectiveCall, mesh: Mesh, axis: str,
                   operands: Sequence[GivenPart], number: Number) -> PolicyMismatch:
    """The error that shows the first operand of which ranks along an axis hold different values."""
    found = operands[-1]
    for found in operands:
        own = number(found.part) if axis in found.along else 0.0
        told = _tell(group, mine, [_bits(own if a == axis else 0.0) for a in mesh.axes])
        if _differing_axis(mesh, [[*map(_float, t)] for t in told], 1):
            break
    values = _sample(found.part)
    by_rank = _swap(group, mine, values.tolist(), "values")
    others = [by_rank[r] for r in mesh.group(group.index, axis)]
    at = next((i for i, same in enumerate(zip(*others, strict=False)) if len({*same}) > 1), 0)
    at = at if at >= SHOWN else 0
    shown = _texts(group, mine, f"from element {at} on " * bool(at) + "bytes " *
                   found.part.dtype.packed + ", ".join([
                       *(f"{v:.6g}" for v in values[at:at + SHOWN]),
                       *["..."] * (len(values) > at + SHOWN)]))
    return PolicyMismatch(
        f"the ranks along {axis!r} give {mine.op} different values of what they hold alike, "
        f"{found.name}:\n{shown}", where=mine.where, hint=ALIKE)


# --- of a program that runs alone ----------------------------------------------------------------
def need_alike_alone(what: str, given: Sequence[Tensor], names: Sequence[str]) -> None:
    """Raise PolicyMismatch where one process holds the parts of all ranks, has written into some,
    and they are no longer the same where they hold the same block."""
    for i, x in enumerate(given if was_written(given) else ()):
        parts = {} if x.layout is None else x.read_parts
        for axis in x.layout.repeated if parts else ():
            for group in x.layout.mesh.groups(axis):
                apart = next((r for r in group if not _same_bytes(parts[group[0]], parts[r])), None)
                if apart is not None:
                    shown = "\n".join(f"  rank {r}: {_shown_from_difference(parts[r], parts[s])}"
                                      for r, s in ((group[0], apart), (apart, group[0])))
                    raise PolicyMismatch(
                        f"{what} is given different values of what the ranks along {axis!r} hold "
                        f"alike, {operand_name(i, x, x.layout, names)}:\n{shown}",
                        where=user_line(), hint="x.local is the part of rank 0 where a program "
                        "runs alone, and each rank's own under a launcher: write x[...] = values, "
                        "or the same into all of x.parts that hold the block")


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.buffer is b.buffer or a.buffer.tobytes() == b.buffer.tobytes()


def _shown_from_difference(x: Tensor, other: Tensor) -> str:
    """Some values, from the first in which the other has another one."""
    values, others = (as_tensor(t).numpy().astype(np.float64).reshape(-1) for t in (x, other))
    at = int(np.argmax((values != others) & ~(np.isnan(values) & np.isnan(others))))
    at = at if at >= SHOWN else 0
    return f"from element {at} on " * bool(at) + values_text(values[at:at + SHOWN].tolist())


__all__ = ["GivenPart", "agree_on_program", "first_number", "need_alike_alone", "operand_name",
           "operands_of", "random_state_of", "sampled_number"]
