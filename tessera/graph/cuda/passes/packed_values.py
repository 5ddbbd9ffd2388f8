"""Types of less than a byte in graphs on GPUs.

Arguments, results and the tensors of kernels lie packed, as everywhere (numerics/packing.py).
Inside, every element is a code in a byte, which the kernels of bytes move; a cast from such a type
is arithmetic on the code, and a cast to it ends in one:

    x: fp4 -> bytes of x -> codes -> decode -> f32 ... f32 -> encode -> codes -> bytes -> y: fp4

A matmul of values that were widened before takes the narrow ones: of codes as bf16 or int8, which
tensor cores multiply and which have all of them exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from ....numerics import (
    DType,
    NumericType,
    Policy,
    as_type,
    decode,
    encode,
    pack,
    row_bytes,
    unpack,
)
from ....numerics.packed_order import from_rows, in_rows, order_of
from ...element import Element, evaluate
from ...ir import Graph, Node, Value
from ...op import FLAT_VIEW, Aval, GraphOp, infer
from ...ops.contract import wide_type
from ...ops.convert import CAST, CAST_STOCHASTIC, RETYPE
from ...ops.kernel import KERNEL
from ...schedule.library_call import LibraryCall
from ...schedule.loop_axes import extents_of
from ...schedule.region_copies import MOVES
from ...simplify import Rewriter, rebuild, remove_dead
from ..kernels.spell import no_kernel
from . import laid_elements

BYTE, F32, BF16, INT8 = map(as_type, ("uint8", "f32", "bf16", "int8"))


# --- bytes and codes ------------------------------------------------------------------------------
def _rows(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, elements of one); a number is a row of one."""
    return (prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def _bytes_shape(shape: Sequence[int], dtype: DType) -> tuple[int, int]:
    rows, n = _rows(shape)
    return rows, row_bytes(n, dtype)


def _unpacked(x: Aval, bits: int, shape: tuple[int, int], beside: str) -> Element:
    """A code of a row of bytes."""
    if beside:
        return laid_elements.unpacked(bits, beside)
    if shape[1] == 1:
        return Element(f"x0[o0, 0] % {1 << bits}")
    if bits == 4:
        byte = "x0[o0, o1 // 2]"
        return Element(f"where(o1 % 2 == 0, {byte} % 16, {byte} // 16)")
    b0, b1, b2 = (f"x0[o0, o1 // 4 * 3 + {i}]" for i in range(3))
    return Element(f"where(o1 % 4 < 2, where(o1 % 4 == 0, {b0} % 64, {b0} // 64 + {b1} % 16 * 4), "
                   f"where(o1 % 4 == 2, {b1} // 16 + {b2} % 4 * 16, {b2} // 4))")


def _packed(x: Aval, bits: int, shape: tuple[int, int], beside: str) -> Element:
    """A byte of a row of codes; zeros behind its end."""
    if beside:
        return laid_elements.packed(bits, beside)
    if bits == 4:
        return Element("x0[o0, o1 * 2] + x0[o0, o1 * 2 + 1] * 16")
    c0, c1, c2, c3 = (f"x0[o0, o1 // 3 * 4 + {i}]" for i in range(4))
    return Element(f"where(o1 % 3 == 0, {c0} + {c1} % 4 * 64, where(o1 % 3 == 1, "
                   f"{c1} // 4 + {c2} % 16 * 16, {c2} // 16 + {c3} * 4))")


def _moved(element: Any, x: np.ndarray, bits: int, shape: tuple[int, int], beside: str
           ) -> np.ndarray:
    return evaluate(element(None, bits, shape, beside), shape, [x])


def _unused(*args: Any, **attrs: Any) -> Any:
    raise AssertionError("its values are made with their types")


BYTES_OF = LibraryCall("packed_bytes", shape=_unused, memory=FLAT_VIEW,
                       ref=lambda x, **attrs: x)
FROM_BYTES = LibraryCall("from_packed_bytes", shape=_unused, memory=FLAT_VIEW,
                         ref=lambda x, **attrs: x)
UNPACK = LibraryCall("unpack_codes", shape=_unused, element=_unpacked,
                     ref=partial(_moved, _unpacked))
PACK = LibraryCall("pack_codes", shape=_unused, element=_packed, ref=partial(_moved, _packed))


# --- codes and numbers ----------------------------------------------------------------------------
def _decode_text(kind: NumericType, to: NumericType) -> str:
    """Within a binade numbers are linear in their codes; of the sign the code has one bit."""
    dtype, code = kind.dtype, "tile.cast({0}, 'f32')"
    if dtype.kind != "float":
        top, whole = float(1 << dtype.bits - 1), float(1 << dtype.bits)
        return f"tile.cast(tile.where({code} >= {top}, {code} - {whole}, {code}), '{to.dtype}')"
    half = float(1 << dtype.sign_shift)
    size = f"tile.where({code} >= {half}, {code} - {half}, {code})"
    text = ""
    for e in range(_binades(dtype), 0, -1):
        first = (e - 1) << dtype.man
        linear = f"({size} - {first}.0) * {2.0 ** (e - dtype.bias - dtype.man)!r}"
        end = float((e + 1) << dtype.man)
        text = f"tile.where({size} < {end}, {linear}, {text})" if text else linear
    return f"tile.cast(tile.where({code} >= {half}, -({text}), {text}), '{to.dtype}')"


def _encode_text(kind: NumericType) -> str:
    """The code of the nearest number of the type, as its policy rounds."""
    dtype = kind.dtype
    if dtype.kind != "float":
        return f"tile.cast(tile.cast(tile.cast({{0}}, '{kind}'), 'int32') & " \
               f"{(1 << dtype.bits) - 1}, 'uint8')"
    number = f"tile.cast(tile.cast({{0}}, '{kind}'), 'f32')"
    text = ""
    for e in range(_binades(dtype), 0, -1):
        scale, first = 2.0 ** (dtype.bias + dtype.man - e), (e - 1) << dtype.man
        linear = f"tile.abs({number}) * {scale!r} + {first}.0"
        end = 2.0 ** (e + 1 - dtype.bias)
        text = f"tile.where(tile.abs({number}) < {end!r}, {linear}, {text})" if text else linear
    sign = f"tile.where({number} == 0.0, 1.0 / {number}, {number}) < 0.0"
    return f"tile.cast({text} + tile.where({sign}, {1 << dtype.sign_shift}.0, 0.0), 'uint8')"


def _round_text(kind: NumericType) -> str:
    """The number of the type to which random words round."""
    wide = "f32" if kind.dtype.kind == "float" else "int8"
    words = "tile.random_bits({index}, seed=({1}, {2}), runs={runs})"
    return f"tile.cast(tile.cast({{0}}, '{kind}', bits={words}), '{wide}')"


def _binades(dtype: DType) -> int:
    """Exponents that numbers have: the first one is that of the subnormals too."""
    return max(1, dtype.max_code >> dtype.man)


def _decoded(x: np.ndarray, kind: NumericType, to: NumericType) -> np.ndarray:
    return encode(decode(x.view(kind.dtype.numpy), kind.dtype), to.dtype)


def _encoded(x: np.ndarray, kind: NumericType) -> np.ndarray:
    made = encode(x, kind.dtype, rounding=kind.policy.rounding, saturate=kind.policy.saturate)
    return made.view(np.uint8) & np.uint8((1 << kind.dtype.bits) - 1)


DECODE = LibraryCall("decode", shape=_unused, ref=_decoded, tile=_decode_text, converts=True)
ENCODE = LibraryCall("encode", shape=_unused, ref=_encoded, tile=_encode_text, converts=True)
ROUND = LibraryCall("round_stochastic", shape=_unused, ref=_unused, tile=_round_text,
                    converts=True)
ELEMENTWISE = (DECODE, ENCODE)  # what a loop does beside other ops


# --- the passes -----------------------------------------------------------------------------------
def multiply_narrow(graph: Graph) -> Graph:
    """Matmuls of values that were widened from packed ones take bf16 and int8, which have all of
    them exactly: tensor cores multiply these."""

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        out = node.outputs[0].aval if node.outputs else None
        if node.op.name != "matmul" or out is None or node.attrs["accum"] is not out.dtype:
            return None
        (a, kind), (b, other) = (_narrow(rw, v) for v in inputs)
        packed = a.aval.dtype.packed or b.aval.dtype.packed
        if not packed or kind is None or kind != other or wide_type(kind.dtype) != out.type:
            return None
        given = [v if v.aval.type == kind else rw.emit("cast", v, source=v.aval.type, to=kind)
                 for v in (a, b)]
        return rw.emit("matmul", *given, accum=node.attrs["accum"])

    return remove_dead(rebuild(graph, visit))


def _narrow(rw: Rewriter, v: Value) -> tuple[Value, NumericType | None]:
    """What a value was widened from, and the type in which tensor cores take that."""
    found: tuple[Value, NumericType | None] = v, None
    while (cast := rw.made_by(v, "cast")) is not None:
        v = cast.inputs[0]
        dtype = v.aval.dtype
        if dtype.packed:
            return v, BF16 if dtype.kind == "float" else INT8
        if dtype not in (BF16.dtype, INT8.dtype):
            break
        found = v, as_type(dtype)
    return found


def open_packed(graph: Graph) -> Graph:
    """No value but arguments, results and what the user's kernels take is of a packed type."""
    values = [v for n in graph.nodes for v in (*n.inputs, *n.outputs)]
    if not any(v.aval.dtype.packed for v in (*values, *graph.inputs, *graph.outputs)):
        return graph
    return remove_dead(_Opened(graph).graph())


class _Opened:
    """codes: of each packed value; lies: the packed value that some codes were read from."""

    def __init__(self, source: Graph):
        self.source, self.rw = source, Rewriter()
        self.env: dict[Value, Value] = {}  # codes of packed values, the new ones of the others
        self.lies: dict[Value, Value] = {}

    def graph(self) -> Graph:
        g = self.source
        for v in g.given:
            self.env[v] = self.codes_of(v) if v.aval.dtype.packed else v
        for node in g.nodes:
            self.rw.where = node.where
            self.node(node)
        outputs = tuple(self.stored(self.env[v], v.aval) if v.aval.dtype.packed else self.env[v]
                        for v in g.outputs)
        return replace(g, nodes=tuple(self.rw.nodes), outputs=outputs)

    def node(self, node: Node) -> None:
        inputs = tuple(self.env[v] for v in node.inputs)
        packed = [v.aval.dtype.packed for v in (*node.inputs, *node.outputs)]
        if not any(packed):
            self.rw.add(Node(node.op, inputs, node.attrs, node.outputs, node.where))
            self.env |= {v: v for v in node.outputs}
        elif node.op is KERNEL or node.op.repeats:
            _need_rows(node)
            self.kernel(node, inputs)
        elif node.op in (CAST, CAST_STOCHASTIC):
            self.env[node.outputs[0]] = self.cast(node, inputs)
        elif node.op is RETYPE:
            self.env[node.outputs[0]] = inputs[0]
        elif not node.inputs:
            self.env[node.outputs[0]] = self.number(node)
        else:
            self.move(node, inputs)

    # --- between bytes and codes ----------------------------------------------------------------
    def new(self, op: GraphOp, aval: Aval, *inputs: Value, **attrs: Any) -> Value:
        made = Node(op, inputs, attrs, (Value(aval),), self.rw.where)
        self.rw.add(made)
        return made.outputs[0]

    def shaped(self, v: Value, shape: tuple[int, ...]) -> Value:
        return v if v.aval.shape == shape else self.rw.emit("reshape", v, shape=shape)

    def codes_of(self, v: Value) -> Value:
        shape, dtype = extents_of(v), v.aval.dtype
        raw = self.new(BYTES_OF, Aval(_bytes_shape(shape, dtype), BYTE), v)
        rows = _rows(shape)
        codes = self.new(UNPACK, Aval(rows, BYTE), raw, bits=dtype.bits, shape=rows,
                         beside=order_of(v.aval.type, shape))
        made = self.shaped(codes, shape)
        self.lies[made] = v
        return made

    def stored(self, codes: Value, aval: Aval) -> Value:
        """The packed value of codes."""
        known = self.lies.get(codes)
        if known is not None and known.aval == aval:
            return known
        own = extents_of(codes)
        shape = _bytes_shape(own, aval.dtype)
        raw = self.new(PACK, Aval(shape, BYTE), self.shaped(codes, _rows(own)),
                       bits=aval.dtype.bits, shape=shape, beside=order_of(aval.type, own))
        return self.new(FROM_BYTES, aval, raw)

    def kernel(self, node: Node, inputs: tuple[Value, ...]) -> None:
        """A kernel reads and writes packed memory; so does the loop of a host."""
        given = tuple(self.stored(v, old.aval) if old.aval.dtype.packed else v
                      for v, old in zip(inputs, node.inputs, strict=True))
        self.rw.add(Node(node.op, given, node.attrs, node.outputs, node.where))
        for v in node.outputs:
            self.env[v] = self.codes_of(v) if v.aval.dtype.packed else v

    # --- codes ----------------------------------------------------------------------------------
    def cast(self, node: Node, inputs: tuple[Value, ...]) -> Value:
        (x, *key), (old, *_), out = inputs, node.inputs, node.outputs[0].aval
        source, to = old.aval.type, out.type
        if source.dtype is to.dtype:
            return x
        if source.dtype.packed:
            wide = F32 if source.dtype.kind == "float" else INT8
            exact = to.dtype is BF16.dtype and source.dtype.kind == "float"
            wide = BF16 if exact else wide
            x = self.new(DECODE, Aval(x.aval.shape, wide), x, kind=_plain(source), to=wide)
        if not to.dtype.packed:
            if x.aval.dtype is to.dtype:
                return self.rw.emit("retype", x, to=to) if x.aval.type != to else x
            if key:
                return self.new(CAST_STOCHASTIC, out, x, *key, source=x.aval.type, to=to)
            return self.rw.emit("cast", x, source=x.aval.type, to=to)
        if key:
            wide = F32 if to.dtype.kind == "float" else INT8
            kind = NumericType(to.dtype, Policy(rounding="stochastic",
                                                saturate=to.policy.saturate))
            x = self.new(ROUND, Aval(out.shape, wide), x, *key, kind=kind)
        return self.new(ENCODE, Aval(out.shape, BYTE), x, kind=_plain(to))

    def number(self, node: Node) -> Value:
        """A constant, or a fill."""
        numeric = node.outputs[0].aval.type
        value = node.attrs.get("value")
        if value is None or "type" not in node.attrs:
            raise no_kernel(node, f"it makes {numeric}")
        code = _encoded(np.asarray(value, np.float32 if numeric.dtype.kind == "float" else None),
                        _plain(numeric))
        return self.rw.emit(node.op.name, **{**node.attrs, "value": int(code), "type": BYTE})

    def move(self, node: Node, inputs: tuple[Value, ...]) -> None:
        """An op that moves elements, whatever they are."""
        op = node.op
        moves = (op.name in MOVES or op.element is not None or op.lies(node.attrs).flat
                 or (op.indexed is not None and op.indexed.reads)
                 or op.name in ("broadcast_to", "where"))
        if not moves:
            raise no_kernel(node, "kernels of graphs compute with no type of less than a byte: "
                            "cast to f32 first")
        avals = infer(op, tuple(v.aval for v in inputs), node.attrs)
        made = Node(op, inputs, node.attrs, tuple(map(Value, avals)), node.where)
        self.rw.add(made)
        self.env |= zip(node.outputs, made.outputs, strict=True)


def _need_rows(node: Node) -> None:
    """An iteration of a loop has whole bytes of what lies packed."""
    if node.op.repeats is None:
        return
    form = node.op.repeats(**node.attrs)
    for v in (*form.split(node.inputs)[1], *node.outputs[form.carries:]):
        if v.aval.dtype.packed and v.aval.ndim < 2:
            raise no_kernel(node, f"an iteration takes or gives one {v.aval.dtype}, less than a "
                            "byte of a row: cast to int8 or f32 around the loop")


def _plain(numeric: NumericType) -> NumericType:
    """Of a type what decides the codes. Where no words are drawn, the nearest number is taken."""
    policy = numeric.policy
    rounding = "nearest_even" if policy.rounding == "stochastic" else policy.rounding
    return NumericType(numeric.dtype, Policy(rounding=rounding, saturate=policy.saturate))


# --- memory ---------------------------------------------------------------------------------------
def stored_array(a: np.ndarray, numeric: NumericType) -> np.ndarray:
    """Elements as they lie in memory: packed rows for types of less than a byte."""
    if not numeric.dtype.packed:
        return np.ascontiguousarray(a)
    return from_rows(pack(np.atleast_1d(a), numeric.dtype), numeric, a.shape)


def elements_of(raw: np.ndarray, numeric: NumericType, shape: tuple[int, ...]) -> np.ndarray:
    """The elements in memory that begins with them."""
    dtype = numeric.dtype
    if not dtype.packed:
        return raw.reshape(-1)[:prod(shape)].reshape(shape)
    last = shape[-1] if shape else 1
    rows = raw.reshape(-1).view(np.uint8).reshape(*shape[:-1], row_bytes(last, dtype))
    return unpack(in_rows(rows, numeric, shape), dtype, last).reshape(shape)


__all__ = ["DECODE", "ELEMENTWISE", "ROUND", "elements_of", "multiply_narrow", "open_packed",
           "stored_array"]
