"""print, assert and breakpoint inside kernels."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from tessera.tile.builder.edge_masks import Along
from tessera.tile.builder.op_tracer import OpTracer
from tessera.tile.interpreter.memory import MemoryBox
from tessera.tile.ir.errors import RuleError, failed_assert
from tessera.tile.ir.handles import FText, Handle, describe, is_number
from tessera.tile.ir.op_record import declare, macro
from tessera.tile.ir.types import Scalar, TileType

MAX_LINES = 64  # printed for one statement and batch of groups


def _literal(text: Any) -> str:
    """Text of a message as it stands: a message is a format of its values."""
    return str(text).replace("{", "{{").replace("}", "}}")


# --- print ------------------------------------------------------------------------------------
def _print_lower(t: OpTracer, *values: Any, sep: Any = " ") -> None:
    parts: list[str] = []
    args: list[Handle] = []

    def add(x: Any) -> None:
        if isinstance(x, FText):
            for piece in x.parts:
                add(piece)
        elif isinstance(x, Handle):
            t.ir.value_of(x)
            args.append(x)
            parts.append("{}")
        elif isinstance(x, str) or is_number(x) or x is None:
            parts.append(_literal(x))
        elif isinstance(x, tuple | list) and not any(isinstance(v, Handle) for v in x):
            parts.append(_literal(x))
        elif isinstance(x, tuple | list):
            parts.append("(")
            for i, v in enumerate(x):
                if i:
                    parts.append(", ")
                add(v)
            parts.append(")")
        else:
            t.fail(f"print of {describe(x)}", "print numbers, scalars, tiles and text")

    for i, v in enumerate(values):
        if i:
            parts.append(_literal(sep))
        add(v)
    t.ir.emit("print", args, text="".join(parts), ranks=_ranks(args))


def _ranks(args: list[Any]) -> tuple[int, ...]:
    """How many axes each value has, 0 of a scalar: an array [groups, n] is either."""
    return tuple(len(x.type.shape) if isinstance(x, Handle) and isinstance(x.type, TileType) else 0
                 for x in args)


@declare(rule=lambda types, attrs: (), attrs=("text", "ranks"), run=True, effect="report",
         lower=_print_lower, name="print", layouts="any")
def print_(m: Any, op: Any, *values: Any) -> Any:
    """print(...) of numbers, tiles and text: one line per group, per lane where they differ."""
    ranks = op.attr["ranks"]
    lane = m.apart > 0 or any(not rank and v.shape[1] > 1
                              for v, rank in zip(values, ranks, strict=True))
    active = m.active((1, m.lanes if lane else 1))
    shown = 0
    for g in np.argsort(m.groups[:, 0], kind="stable"):
        for lane_no in np.nonzero(active[g])[0]:
            if shown >= MAX_LINES:
                m.report.printed.append("...")
                sys.stdout.write("...\n")
                return
            shown += 1
            text = op.attr["text"].format(*_lane_values(values, ranks, g, lane_no))
            m.report.printed.append(text)
            sys.stdout.write(text + "\n")


def _lane_values(values: tuple, ranks: tuple[int, ...], g: Any, lane: Any) -> list[str]:
    """What a lane of a group sees of values: its own number of a scalar, all of a tile."""
    out = []
    for value, rank in zip(values, ranks, strict=True):
        row = value[g if value.shape[0] > 1 else 0]
        out.append(np.array2string(row) if rank else str(row[min(lane, row.shape[0] - 1)]))
    return out


# --- assert -----------------------------------------------------------------------------------
def _assert_lower(t: OpTracer, condition: Any, message: Any = "") -> None:
    pieces = message.parts if isinstance(message, FText) else (message,)
    values = [p for p in pieces if isinstance(p, Handle)]
    text = "".join("{}" if isinstance(p, Handle) else _literal(p) for p in pieces)
    args = [t.ir.truth(condition), *values]
    t.ir.emit("device_assert", args, message=text, ranks=_ranks(args))


def _assert_rule(types: Any, attrs: Any) -> Any:
    for t in types:
        if not isinstance(t, Scalar | TileType):
            raise RuleError(f"assert needs values, got {t}")
    return ()


def _all_of(types: Any, attrs: Any) -> list[Along]:
    """What does not exist holds."""
    rank = len(types[0].shape) if isinstance(types[0], TileType) else 0
    return [Along(0, i, 1.0, said="an assert") for i in range(rank)]


@declare(rule=_assert_rule, attrs=("message", "ranks"), run=True, effect="report",
         lower=_assert_lower, combines=_all_of, layouts="any")
def device_assert(m: Any, op: Any, condition: Any, *values: Any) -> Any:
    """assert condition, message: stops the kernel and says which group and lane."""
    of_tile, *ranks = op.attr["ranks"]
    bad: Any = ~np.asarray(condition)
    if not bad.any():
        return
    if of_tile:
        bad = bad.reshape(bad.shape[0], -1).any(axis=1, keepdims=True)
    if m.mask is not None:
        bad = bad & m.mask
    if not bad.any():
        return
    g, lane = np.unravel_index(int(np.argmax(bad)), bad.shape)
    text = op.attr["message"].format(*_lane_values(values, tuple(ranks), g, lane))
    who = f"group {int(m.groups[g if len(m.groups) > 1 else 0, 0])}"
    if bad.shape[1] > 1 and not of_tile:
        who = f"lane {lane} of {who}"
    raise failed_assert(who, text, op.where)


# --- breakpoint -------------------------------------------------------------------------------
@macro(name="breakpoint", public=False)
def breakpoint_(t: OpTracer) -> None:
    """breakpoint(): stops the interpreter with the kernel's names in `values`, as arrays whose
    first axis is the groups, and for scalars the second the lanes."""
    names = [(n, v) for n, v in t.env.items() if isinstance(v, Handle) and not n.startswith("__")]
    t.ir.emit("stop", [v for _, v in names], names=tuple(n for n, _ in names))




@declare(rule=lambda types, attrs: (), attrs=("names",), run=True, effect="report", public=False,
         layouts="any")
def stop(m: Any, op: Any, *values: Any) -> Any:
    """breakpoint() of a kernel."""
    seen = dict(zip(op.attr["names"], map(_value, values), strict=True))
    stopped_in_kernel(seen, op.where)


def _value(x: Any) -> Any:
    if isinstance(x, MemoryBox):
        return x.memory.flat.reshape(-1, *x.memory.shape) if x.memory.space != "global" else (
            x.memory.flat.reshape(x.memory.shape))
    return x


def stopped_in_kernel(values: dict[str, Any], where: Any) -> None:
    """The frame in which the debugger stops: look at values["name"], and at where."""
    sys.breakpointhook()
