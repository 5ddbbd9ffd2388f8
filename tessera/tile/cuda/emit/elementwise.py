"""Arithmetic, comparison and maths of scalars and fragments alike: one intrinsic per op.

Integers of fewer than 32 bits were widened by the frontend, so an op sees i32, i64, f32 or f64;
whether an integer is unsigned its dtype says.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tessera.numerics import bf16, f32
from tessera.tile.cuda.emit.emitter import Emitter, literal
from tessera.tile.cuda.emit.layout_conversion import through_shared
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.intrinsics import bf16_pairs, fast_math
from tessera.tile.cuda.intrinsics.casts import same_register
from tessera.tile.cuda.intrinsics.elementwise import BODIES
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.cuda.intrinsics.narrow_floats import has_instructions
from tessera.tile.ir.ir import Const, Op, Operand
from tessera.tile.ir.modes import FAST_MATH
from tessera.tile.ir.numpy_values import poison
from tessera.tile.ir.register_layout import RegisterLayout
from tessera.tile.ir.types import TileType

PLAIN = {"add": "add", "sub": "sub", "mul": "mul", "neg": "neg", "bitand": "bit_and",
         "bitor": "bit_or", "bitxor": "bit_xor", "and": "bit_and", "or": "bit_or"}
DIVISIONS = frozenset({"div", "div_or_zero"})  # emitted in divide.py
COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


def operand(e: Emitter, x: Operand, result: object) -> str:
    """The expression of an operand beside a result: spread over its registers where it repeats."""
    if isinstance(x, Const) or not isinstance(result, TileType) or not isinstance(e.type(x),
                                                                                  TileType):
        return e.name(x)
    assert result.layout is not None
    return spread(e, e.name(x), e.layout(x), RegisterLayout.parse(result.layout, result.shape))


def spread(e: Emitter, text: str, small: RegisterLayout, large: RegisterLayout) -> str:
    """A fragment repeated along the axes where its tile has extent 1."""
    if small.shape == large.shape:
        return text
    wide = [i for i, n in enumerate(small.shape) if n == 1 and large.shape[i] != 1]
    indices = tuple(small.number[tuple(0 if i in wide else at for i, at in enumerate(base))]
                    for base in large.bases)
    if len(indices) == 1 and small.count == 1:
        return text
    return f"{e.use('pick', f'use(fragments.pick({indices}))')}({text})"


def unsigned(e: Emitter, x: Operand) -> bool:
    return e.dtype(x).kind == "uint"


def apply(e: Emitter, op: Op, intrinsic: str) -> None:
    """result = intrinsic(operands)"""
    (made,) = op.outs
    args = ", ".join(operand(e, x, made.type) for x in op.args)
    e.define(made, f"{intrinsic}({args})")


def _register(name: str, make: str) -> None:
    def emit(e: Emitter, op: Op) -> None:
        apply(e, op, e.use(name, f"use({make})"))

    emits(name)(emit)


for _name, _fragment in PLAIN.items():
    _register(_name, f"fragments.{_fragment}")


def _comparison(name: str, sign: str) -> None:
    def emit(e: Emitter, op: Op) -> None:
        signless = unsigned(e, op.args[0])
        apply(e, op, e.use(name, f"use(fragments.compare({sign!r}"
                           f"{', unsigned=True' if signless else ''}))"))

    emits(name)(emit)


for _name, _sign in COMPARE.items():
    _comparison(_name, _sign)


@emits("where")
def _where(e: Emitter, op: Op) -> None:
    apply(e, op, e.use("where", "use(fragments.where)"))


def _by_power(e: Emitter, op: Op) -> bool:
    """Emits a division that rounds down, or its remainder, by a power of two that is known now."""
    power = op.args[1] if op.name in ("floordiv", "mod") else None
    if not isinstance(power, Const) or power.dtype.kind != "int" or power.value < 1 or (
            int(power.value) & int(power.value) - 1):
        return False
    shift = op.name == "floordiv"
    by = replace(power, value=int(power.value).bit_length() - 1 if shift else power.value - 1)
    name = "shift_right_signed" if shift else "bit_and"
    apply(e, replace(op, args=(op.args[0], by)), e.use(name, f"use(fragments.{name})"))
    return True


def maths(e: Emitter, name: str, kind: str) -> str:
    """The intrinsic of an op on registers of a kind, as this function computes it."""
    if kind == "f32" and name in fast_math.FAST and FAST_MATH in e.function.modes:
        return e.use(name, f"use(fast_math.operation({name!r}))")
    return e.use(name, f"use(elementwise.operation({name!r}, {kind!r}))")


def _maths(name: str) -> None:
    def emit(e: Emitter, op: Op) -> None:
        if _by_power(e, op):
            return
        kind = e.dtype(op.args[0])
        tag = "u" if kind.kind == "uint" else ""
        apply(e, op, maths(e, name, f"{tag}{kind_of(kind)}"))

    emits(name)(emit)


# Ops whose body stands in intrinsics/elementwise.py, by the kind of their operands.
for _name in dict.fromkeys(name for name, _ in BODIES):
    if _name not in DIVISIONS:
        _maths(_name)


@emits("running_max")
def _running_max(e: Emitter, op: Op) -> None:
    slack = float(op.attr["slack"])
    kind = kind_of(e.dtype(op.args[0]))
    apply(e, op, e.use("running_max", f"use(elementwise.running_max({slack!r}, {kind!r}))"))


@emits("convert")
def _convert(e: Emitter, op: Op) -> None:
    source, to, attr = e.dtype(op.args[0]), op.outs[0].type.dtype, op.attr
    rounding, saturate = attr.get("rounding", "nearest_even"), bool(attr.get("saturate", False))
    if same_register(source, to, saturate) or to is bf16 and is_bf16(e, op.args[0]):
        e.define(op.outs[0], e.name(op.args[0]))
        return
    if to is bf16 and not saturate and rounding == "nearest_even" and _in_pairs(e, op):
        return
    made = f"use(casts.cast({source.name!r}, {to.name!r}, {rounding!r}, {saturate}" \
           f"{', True' if has_instructions(to, e.generation) else ''}))"
    apply(e, op, e.use(f"to_{to}", made))


# Whose results are bf16 numbers where their operands are.
KEEP = frozenset({"neg", "abs", "maximum", "minimum", "where", "broadcast_to", "expand_dims",
                  "convert_layout"})


def is_bf16(e: Emitter, x: Operand, depth: int = 8) -> bool:
    """Whether an f32 is known to be a bf16 number."""
    if isinstance(x, Const):
        return x.dtype is f32 and not np.float32(x.value).view(np.uint32) & 0xFFFF
    made = e.made_by.get(x)
    if e.dtype(x) is bf16:
        return True
    if made is None or not depth or e.dtype(x) is not f32:
        return False
    if made.name == "convert":
        return e.dtype(made.args[0]) is bf16
    args = made.args[1:] if made.name == "where" else made.args
    return made.name in KEEP and all(is_bf16(e, a, depth - 1) for a in args)


def _in_pairs(e: Emitter, op: Op) -> bool:
    """Emits the rounding of a sum or product of bf16 numbers together with it (bf16_pairs.py)."""
    made, (out,) = e.made_by.get(op.args[0]), op.outs
    if made is None or made.name not in bf16_pairs.NAMES or not isinstance(out.type, TileType) or (
            not e.generation.bf16_pairs or not all(is_bf16(e, a) for a in made.args)):
        return False
    assert out.type.layout is not None
    if RegisterLayout.parse(out.type.layout, out.type.shape).count % 2:
        return False
    name = f"{made.name}_bf16"
    apply(e, replace(op, args=made.args), e.use(name, f"use(bf16_pairs.rounded({made.name!r}))"))
    return True


@emits("with_bits")
def _with_bits(e: Emitter, op: Op) -> None:
    kinds = [kind_of(d) for d in (e.dtype(op.args[0]), op.outs[0].type.dtype)]
    apply(e, op, e.use("with_bits", f"use(elementwise.with_bits({kinds[0]!r}, {kinds[1]!r}))"))


@emits("popcount")
def _popcount(e: Emitter, op: Op) -> None:
    dtype = e.dtype(op.args[0]).name
    apply(e, op, e.use(f"popcount_{dtype}", f"use(elementwise.popcount({dtype!r}))"))


@emits("encode_bytes")
def _encode_bytes(e: Emitter, op: Op) -> None:
    """Of what a cast rounds, by the rounding alone: the codes need not become numbers before."""
    (x,), dtype = op.args, op.attr["dtype"]
    made = e.made_by.get(x)
    rounding, saturate = "nearest_even", False
    if made is not None and made.name == "convert" and e.dtype(made.args[0]) is f32:
        op, rounding = replace(op, args=made.args), made.attr.get("rounding", rounding)
        saturate = bool(made.attr.get("saturate", False))
    hardware = has_instructions(dtype, e.generation)
    apply(e, op, e.use("bytes_of", f"use(casts.encode_bytes({dtype.name!r}, {rounding!r}, "
                       f"{saturate}, {hardware}))"))


@emits("convert_random")
def _convert_random(e: Emitter, op: Op) -> None:
    to, saturate = op.outs[0].type.dtype, bool(op.attr.get("saturate", False))
    made = f"use(casts.cast_random({to.name!r}, {saturate}))"
    apply(e, op, e.use(f"to_{to}_at_random", made))


# --- making tiles ---------------------------------------------------------------------------------
@emits("constant")
def _constant(e: Emitter, op: Op) -> None:
    e.define(op.outs[0], literal(op.attr["value"], op.attr["dtype"]))


@emits("undefined")
def _undefined(e: Emitter, op: Op) -> None:
    dtype = op.attr["dtype"]
    e.define(op.outs[0], literal(poison((), dtype).item(), dtype))


def full(e: Emitter, t: TileType, value: str) -> str:
    """A fragment of one number."""
    assert t.layout is not None
    count = RegisterLayout.parse(t.layout, t.shape).count
    make = e.use("full", f"use(fragments.full({kind_of(t.dtype)!r}, {count}))")
    return f"{make}({value})"


@emits("full")
def _full(e: Emitter, op: Op) -> None:
    (made,) = op.outs
    assert isinstance(made.type, TileType)
    e.define(made, full(e, made.type, literal(op.attr["value"], op.attr["dtype"])))


@emits("broadcast_to")
def _broadcast(e: Emitter, op: Op) -> None:
    (made,), (x,) = op.outs, op.args
    assert isinstance(made.type, TileType)
    if isinstance(e.type(x), TileType):
        e.define(made, operand(e, x, made.type))
    else:
        e.define(made, full(e, made.type, e.name(x)))


@emits("arange")
def _arange(e: Emitter, op: Op) -> None:
    (made,) = op.outs
    layout = e.layout(made.value)
    at = e.index(layout, 0)
    start = int(op.attr["start"])
    at = f"i32({at} + {start})" if start else at
    made_by = e.use("positions", f"use(tiles.positions({layout.text!r}, {layout.shape}, 0))")
    text = f"{made_by}({at})"
    if made.type.dtype.name != "int32":
        cast = e.use("cast", f"use(casts.cast('int32', {made.type.dtype.name!r}))")
        text = f"{cast}({text})"
    e.define(made, text)


@emits("ramp")
def _ramp(e: Emitter, op: Op) -> None:
    (made,) = op.outs
    layout = e.layout(made.value)
    make = e.use("ramp", f"use(tiles.ramp({layout.text!r}, {layout.shape}))")
    start, step = map(e.name, op.args)
    e.define(made, f"{make}({start}, {step}, {e.index(layout, 0)})")


@emits("expand_dims", "transpose", "permute")
def _relabelled(e: Emitter, op: Op) -> None:
    """The registers stay; their order in the fragment follows the new labels."""
    (made,), (x,) = op.outs, op.args
    before, after = e.layout(x), e.layout(made.value)
    back = before.insert(op.attr["axis"]) if op.name == "expand_dims" else \
        before.permuted(op.attr.get("axes", (1, 0)))
    assert back.threads == after.threads, f"{op.name}: {before.text} to {after.text}"
    e.define(made, reordered(e, e.name(x), back, after))


def reordered(e: Emitter, text: str, before: RegisterLayout, after: RegisterLayout) -> str:
    """A fragment in another order of its registers; both layouts hold the same elements."""
    indices = tuple(before.number[base] for base in after.bases)
    if indices == tuple(range(before.count)):
        return text
    return f"{e.use('pick', f'use(fragments.pick({indices}))')}({text})"


@emits("reshape")
def _reshape(e: Emitter, op: Op) -> None:
    (made,), (x,) = op.outs, op.args
    before, after = e.layout(x), e.layout(made.value)
    free = before.reshaped(after.shape)
    if free is not None and free.threads == after.threads and set(free.bases) == set(after.bases):
        e.define(made, reordered(e, e.name(x), free, after))
        return

    e.define(made, through_shared(e, e.name(x), before, after, e.dtype(x)))


# --- masks ----------------------------------------------------------------------------------------
@emits("edge_mask")
def _edge_mask(e: Emitter, op: Op) -> None:
    x, start, stop = op.args
    (made,) = op.outs
    axis, fill = op.attr["axis"], op.attr["fill"]
    layout = e.layout(x)
    left = f"i32({e.name(stop)} - {e.name(start)} - {e.index(layout, axis)})"
    dtype = made.type.dtype
    of = f"({layout.text!r}, {layout.shape}, {axis}, {kind_of(dtype)!r}, {number(fill, dtype)})"
    if op.attr.get("low"):
        first = f"i32(-{e.name(start)} - {e.index(layout, axis)})"
        make = e.use("edge_mask_low", f"use(tiles.mask_between{of})")
        e.define(made, f"{make}({e.name(x)}, {first}, {left})")
        return
    together = min(e.known.divisor(start), e.known.divisor(stop), layout.run(axis))
    of = f"{of[:-1]}, {together})" if together > 1 else of
    e.define(made, f"{e.use('edge_mask', f'use(tiles.mask{of})')}({e.name(x)}, {left})")


def number(value: float, dtype: object) -> str:
    """A fill value as text in the header."""
    if kind_of(dtype)[0] != "f":  # type: ignore[arg-type]
        return str(int(value))
    return repr(float(value)).replace("inf", "INF").replace("nan", "NAN")


@emits("causal_mask")
def _causal_mask(e: Emitter, op: Op) -> None:
    x, q0, k0 = op.args
    (made,) = op.outs
    layout, keys = e.layout(x), op.attr.get("keys", 1)
    room = f"i32({e.name(q0)} + {e.index(layout, 1 - keys)} - {e.name(k0)} - " \
           f"{e.index(layout, keys)})"
    make = e.use("causal_mask", f"use(elementwise.causal_mask({layout.text!r}, {layout.shape}, "
                 f"{kind_of(made.type.dtype)!r}{'' if keys else ', keys=0'}))")
    e.define(made, f"{make}({e.name(x)}, {room})")


@emits("span_mask")
def _span_mask(e: Emitter, op: Op) -> None:
    x, bounds, start = op.args
    (made,) = op.outs
    layout = e.layout(x)
    make = e.use("span_mask", f"use(elementwise.span_mask({layout.text!r}, {layout.shape}, "
                 f"{kind_of(made.type.dtype)!r}, {op.attr['behind']}))")
    e.define(made, f"{make}({e.name(x)}, {operand(e, bounds, made.type)}, "
                   f"i32({e.name(start)} + {e.index(layout, 1)}))")


@emits("own_row")
def _own_row(e: Emitter, op: Op) -> None:
    """Of a kernel whose warps do not specialise, or have several blocks of rows: all rows."""
    more = op.attr["size"] - 1 if op.attr["last"] else 0
    e.define(op.outs[0], f"i32({e.name(op.args[0])} + {more})")


@emits("own_iterations")
def _own_iterations(e: Emitter, op: Op) -> None:
    e.define(op.outs[0], e.name(op.args[0]))


__all__ = ["apply", "full", "number", "operand", "reordered", "spread"]
