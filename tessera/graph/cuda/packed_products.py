"""Matmuls of few rows with packed weights as launches of the library's kernel, which reads the
weights as they lie: x cast(w)' with w [N, K]. Others are made codes, and those bf16, before."""

from __future__ import annotations

from typing import Any

from ...kernels.gemm_packed import MOST_ROWS, TAKES, blocks, packed_nt
from ...numerics import f32
from ...tile.cuda.lower.multiply_codes import holds
from ...tile.interpreter.launch import Config
from ..ir import Graph, Node, Value
from ..ops.kernel import KERNEL, KernelCall
from ..simplify import Rewriter, rebuild, remove_dead
from .library_ops import joined, swaps_last


def multiply_packed(graph: Graph) -> Graph:
    """Such matmuls as nodes of that kernel, which also rounds what is only read rounded."""
    readers: dict[Value, list[Node]] = {}
    for n in graph.nodes:
        for v in n.inputs:
            readers.setdefault(v, []).append(n)
    rounds = {n.outputs[0]: after[0] for n in graph.nodes if n.op.name == "matmul"
              and len(after := readers.get(n.outputs[0], [])) == 1 and _rounds(after[0])
              and n.outputs[0] not in graph.outputs}

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Any:
        made = node if node.op.name == "matmul" and node.outputs[0] not in rounds else \
            rw.made_by(inputs[0], "matmul") if node in rounds.values() else None
        if made is None or made.attrs["accum"] is not f32:
            return None
        x, out = _rows(rw, made.inputs[0]), node.outputs[0].aval
        w = _weights(rw, made.inputs[1], x)
        if w is None or out.ndim != 2 or not all(isinstance(n, int) for n in out.shape):
            return None
        (M, N), K = map(int, out.shape), int(x.aval.shape[1])
        if not 0 < M <= MOST_ROWS or 0 in (N, K):
            return None
        rw.where = joined(node.where, [made, *([node] if made is not node else [])])
        zero = rw.emit("constant", value=0, type=out.type)
        given = (x, w, rw.emit("broadcast_to", zero, shape=out.shape))
        sizes = dict(zip(("BM", "BN", "BK"), blocks(M, N, K), strict=True))
        call = KernelCall(packed_nt, Config(), ("X", "W", "D"), tuple(v.aval.type for v in given),
                          (("S", None), *sizes.items()), frozenset(("X", "W", "S", "D", *sizes)),
                          written=("D",))
        launch = Node(KERNEL, given, {"call": call}, (Value(out),), rw.where)
        rw.add(launch)
        return launch.outputs[0]

    return remove_dead(rebuild(graph, visit))


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


def _weights(rw: Rewriter, v: Value, x: Value) -> Value | None:
    """The packed tensor [N, K] whose transpose, cast without loss, a value is."""
    turned = False
    kinds = [x.aval.dtype]
    while not v.aval.dtype.packed:
        kinds.append(v.aval.dtype)
        cast, turn = rw.made_by(v, "cast"), rw.made_by(v, "transpose")
        if cast is not None:
            v = cast.inputs[0]
        elif turn is not None and swaps_last(turn.attrs["axes"]):
            v, turned = turn.inputs[0], not turned
        else:
            return None
    while (turn := rw.made_by(v, "transpose")) is not None and swaps_last(turn.attrs["axes"]):
        v, turned = turn.inputs[0], not turned
    plain = x.aval.dtype.name in TAKES and x.aval.ndim == v.aval.ndim == 2 and turned
    policy = v.aval.type.policy
    scaled = policy.scaled or policy.custom or policy.per_channel is not None
    return v if plain and not scaled and all(holds(t, v.aval.dtype) for t in kinds) else None


__all__ = ["multiply_packed"]
