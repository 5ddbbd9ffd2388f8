"""Matmuls of few rows with packed weights as launches of the library's kernel, which reads the
weights as they lie: x cast(w)' with w [N, K], and x dequantize(w)' with a scale for each row or one
for all. Weights of other matmuls are made codes, and those bf16, before."""

from __future__ import annotations

from typing import Any

from .... import config
from ....kernels.gemm_packed import MOST_ROWS, TAKES, blocks, laid, packed_nt, widened
from ....lazy_dataclass import dataclass
from ....numerics import as_type, f32
from ....numerics.packed_order import order_of
from ....runtime.generations import Generation
from ....tile.cuda.lower.multiply_codes import holds
from ....tile.interpreter.launch import Config
from ...ir import Graph, Node, Value, readers_of
from ...op import Aval
from ...ops.kernel import KERNEL, KernelCall
from ...simplify import Rewriter, rebuild, remove_dead
from .library_ops import merged_line, swaps_last


@dataclass(frozen=True)
class PackedWeights:
    """w: packed, [N, K].  scale: a number, or one for each row, [N, 1] or [1, N]; None: 1."""

    w: Value
    scale: Value | None


def multiply_packed(graph: Graph, chip: Generation) -> Graph:
    """Such matmuls as nodes of that kernel, which also rounds what is only read rounded."""
    readers = readers_of(graph)
    rounded, rounds = set[Value](), set[Value]()  # matmuls, and casts of them
    for n in graph.nodes:
        after = readers.get(n.outputs[0], []) if n.op.name == "matmul" else []
        if len(after) == 1 and _rounds(after[0]) and n.outputs[0] not in graph.outputs:
            rounded.add(n.outputs[0])
            rounds.add(after[0].outputs[0])

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        made: Node | None = None
        if node.op.name == "matmul" and node.outputs[0] not in rounded:
            made = Node(node.op, inputs, node.attrs, node.outputs, node.where)
        elif node.outputs and node.outputs[0] in rounds:
            made = rw.made_by(inputs[0], "matmul")
        if made is None or made.attrs["accum"] is not f32:
            return None
        x, out = _rows(rw, made.inputs[0]), node.outputs[0].aval
        found = _weights(rw, made.inputs[1], x)
        if found is not None and not _met(found.w.aval, x.aval, chip):
            return None
        whole = all(isinstance(n, int) for n in (*out.shape, *x.aval.shape))
        if found is None or out.ndim != 2 or not whole or not (
                0 < out.shape[0] <= MOST_ROWS) or 0 in (out.shape[1], x.aval.shape[1]):
            return None
        rw.where = node.where if node.op.name == "matmul" else merged_line(node.where, [made, node])
        return _launch(rw, x, found, out)

    return remove_dead(rebuild(graph, visit))


def _launch(rw: Rewriter, x: Value, weights: PackedWeights, out: Aval) -> Value:
    """What the kernel leaves in its parameter D."""
    (M, N), K = map(int, out.shape), int(x.aval.shape[1])
    codes, scale = weights.w.aval.type, weights.scale
    if widened(x.aval.type, codes, M):
        x = rw.emit("cast", x, source=x.aval.type, to=as_type("f16"))
    use = blocks(M, N, K, x.aval.type, codes)
    constants: dict[str, Any] = {"BM": use.rows, "BN": use.columns, "BK": use.depth,
                                 "RESIDENT": use.resident, "STREAMED": use.streamed,
                                 "AHEAD": use.ahead, "DIVIDED": use.divided}
    given = {"X": x, "W": weights.w}
    if scale is None:
        constants["S"] = None
    else:
        given["S"] = rw.emit("reshape", scale, shape=(N,)) if scale.aval.shape else \
            rw.emit("broadcast_to", scale, shape=(N,))
    zero = rw.emit("constant", value=0, type=out.type)
    given["D"] = rw.emit("broadcast_to", zero, shape=out.shape)
    call = KernelCall(packed_nt, Config(), tuple(given), tuple(v.aval.type for v in given.values()),
                      tuple(constants.items()), frozenset((*given, *constants)), written=("D",))
    made = Node(KERNEL, tuple(given.values()), {"call": call}, (Value(out),), rw.where)
    rw.add(made)
    return made.outputs[0]


def _rounds(node: Node) -> bool:
    """Whether a node rounds f32 to the nearest number of 16 bits."""
    if node.op.name != "cast":
        return False
    to = node.attrs["to"]
    return to.dtype.name in ("bf16", "f16") and to.policy.rounding == "nearest_even" and not (
        to.policy.saturate or to.policy.scaled or to.policy.custom)


def _rows(rw: Rewriter, v: Value) -> Value:
    """What the left operand was widened from."""
    while (cast := rw.made_by(v, "cast")) is not None and v.aval.dtype is f32:
        v = cast.inputs[0]
    return v


def _weights(rw: Rewriter, v: Value, x: Value) -> PackedWeights | None:
    """The packed tensor [N, K] whose transpose a value is, cast without loss or times scales of
    its rows."""
    turned, scale, kinds = False, None, [x.aval.dtype]
    while (node := rw.producer.get(v)) is not None:
        if node.op.name == "transpose" and swaps_last(node.attrs["axes"]):
            turned = not turned
        elif node.op.name == "dequantize" and scale is None and v.aval.ndim == 2:
            scale = node.inputs[1]
            if scale.aval.shape not in ((), _of_rows(v, turned)):
                return None
        elif node.op.name not in ("cast", "retype"):
            break
        v = node.inputs[0]
        kinds.append(v.aval.dtype)
    plain = x.aval.dtype.name in TAKES and x.aval.ndim == v.aval.ndim == 2 and turned
    return PackedWeights(v, scale) if plain and v.aval.dtype.packed and all(
        holds(t, v.aval.dtype) for t in kinds) else None


def _met(w: Aval, x: Aval, chip: Generation) -> bool:
    """Whether codes lie as the kernel reads them: those of an order of their own it reads beside
    one type, and in the form of warpgroups alone, which kernels that are checked do not have."""
    if not order_of(w.type, w.shape):
        return True
    K = w.shape[-1]
    return chip.warpgroup_matmul is not None and not config.debug and isinstance(K, int) and laid(
        x.type, w.type, K)


def _of_rows(v: Value, turned: bool) -> tuple[Any, ...]:
    """The shape of scales of the rows of [N, K], where a value is that, or its transpose."""
    return (v.aval.shape[0], 1) if turned else (1, v.aval.shape[1])


__all__ = ["multiply_packed"]
