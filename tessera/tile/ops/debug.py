"""print, assert and breakpoint inside kernels."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from tessera.tile.errors import KernelAssertionError, RuleError
from tessera.tile.expressions import FText
from tessera.tile.handles import Handle, describe, is_number
from tessera.tile.memory import Place
from tessera.tile.ops.registry import declare, macro
from tessera.tile.types import Scalar, Tile

MAX_LINES = 64  # printed for one statement and batch of groups


def _literal(text: Any) -> str:
    """Text of a message as it stands: a message is a format of its values."""
    return str(text).replace("{", "{{").replace("}", "}}")


# --- print ------------------------------------------------------------------------------------
def _print_lower(t: Any, *values: Any, sep: Any = " ") -> None:
    parts: list[str] = []
    args: list[Handle] = []

    def add(x: Any) -> None:
        if isinstance(x, FText):
            for piece in x.parts:
                add(piece)
        elif isinstance(x, Handle):
            t.value_of(x)
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
    t.emit("print", args, text="".join(parts))


@declare(rule=lambda types, attrs: (), attrs=("text",), run=True, effect="report",
         lower=_print_lower, name="print")
def print_(m: Any, op: Any, *values: Any) -> Any:
    """print(...) of numbers, tiles and text: one line per group, per lane where they differ."""
    lane = any(np.ndim(v) == 2 and v.shape[1] > 1 for v in values) or (
        m.apart > 0)
    active = m.active((1, m.lanes if lane else 1))
    shown = 0
    for g in np.argsort(m.groups[:, 0], kind="stable"):
        for lane_no in np.nonzero(active[g])[0]:
            if shown >= MAX_LINES:
                m.report.printed.append("...")
                sys.stdout.write("...\n")
                return
            shown += 1
            text = op.attr["text"].format(*(_show(v, g, lane_no) for v in values))
            m.report.printed.append(text)
            sys.stdout.write(text + "\n")


def _show(value: np.ndarray, g: Any, lane: Any) -> str:
    if isinstance(value, Place):
        return f"<{value.memory.name}>"
    row = value[g if value.shape[0] > 1 else 0]
    if row.ndim == 1 and value.ndim == 2 and row.shape[0] in (1,):
        return str(row[0])
    return str(row[min(lane, row.shape[0] - 1)]) if value.ndim == 2 else np.array2string(row)


# --- assert -----------------------------------------------------------------------------------
def _assert_lower(t: Any, condition: Any, message: Any = "") -> None:
    if isinstance(message, FText):
        parts, values = [], []
        for p in message.parts:
            parts.append("{}" if isinstance(p, Handle) else _literal(p))
            values += [p] if isinstance(p, Handle) else []
        t.emit("device_assert", [t.truth(condition), *values], message="".join(parts))
        return
    t.emit("device_assert", [t.truth(condition)], message=_literal(message))


def _assert_rule(types: Any, attrs: Any) -> Any:
    for t in types:
        if not isinstance(t, Scalar | Tile):
            raise RuleError(f"assert needs values, got {t}")
    return ()


@declare(rule=_assert_rule, attrs=("message",), run=True, effect="report", lower=_assert_lower)
def device_assert(m: Any, op: Any, condition: Any, *values: Any) -> Any:
    """assert condition, message: stops the kernel and says which group and lane."""
    held = np.asarray(condition).reshape(condition.shape[0], -1)
    if held.all():
        return
    bad = ~held
    if m.mask is not None:
        width = bad.shape[1] if condition.ndim == 2 else 1
        mask = m.mask if m.mask.shape[1] == width or width == 1 else m.mask
        bad = (bad if condition.ndim == 2 else bad.any(axis=1, keepdims=True)) & mask
    if not bad.any():
        return
    g, lane = np.unravel_index(int(np.argmax(bad)), bad.shape)
    text = op.attr["message"].format(*(_show(v, g, lane) for v in values))
    who = f"group {int(m.groups[g if len(m.groups) > 1 else 0, 0])}"
    if bad.shape[1] > 1 and condition.ndim == 2:
        who = f"lane {lane} of {who}"
    raise KernelAssertionError(f"assertion failed in {who}: {text}", where=op.where)


# --- breakpoint -------------------------------------------------------------------------------
@macro(name="breakpoint")
def breakpoint_(t: Any) -> None:
    """breakpoint(): stops the interpreter with the kernel's names in `values`, as arrays whose
    first axis is the groups, and for scalars the second the lanes."""
    names = [(n, v) for n, v in t.env.items() if isinstance(v, Handle) and not n.startswith("__")]
    t.emit("stop", [v for _, v in names], names=tuple(n for n, _ in names))


object.__setattr__(breakpoint_, "public", False)


@declare(rule=lambda types, attrs: (), attrs=("names",), run=True, effect="report", public=False)
def stop(m: Any, op: Any, *values: Any) -> Any:
    """breakpoint() of a kernel."""
    seen = dict(zip(op.attr["names"], map(_value, values), strict=True))
    stopped_in_kernel(seen, op.where)


def _value(x: Any) -> Any:
    if isinstance(x, Place):
        return x.memory.flat.reshape(-1, *x.memory.shape) if x.memory.space != "global" else (
            x.memory.flat.reshape(x.memory.shape))
    return x


def stopped_in_kernel(values: dict[str, Any], where: Any) -> None:
    """The frame in which the debugger stops: look at values["name"], and at where."""
    sys.breakpointhook()
