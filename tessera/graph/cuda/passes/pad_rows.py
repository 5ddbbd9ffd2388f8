"""Operands of large matmuls whose rows are no multiples of 16 bytes, with zeros behind their rows.

    x @ w, x [8192, 650] of 16 bits      # is pad(x) @ pad(w), of 656

TMA brings no such rows, and warps that fetch them in words of 2 or 4 bytes multiply at less than
half of the speed: 8192 x 10000 from 650 took 398 us (H200, 2026-11-28). A vocabulary of 30522 words
is such an axis, in the result's gradient. What makes an operand often writes its zeros too; else it
is copied, where that takes less than it saves.
"""

from __future__ import annotations

from ....runtime.generations import Generation
from ...ir import Graph, Node, Value, value_bytes
from ...schedule.loop_axes import extents_of
from ...simplify import Rewriter, rebuild, remove_dead
from .library_ops import EIGHT, saves_time, swaps_last


def pad_rows(graph: Graph, chip: Generation) -> Graph:
    if chip.warpgroup_matmul is None:
        return graph
    narrow = {n for n in chip.warpgroup_matmul.operands if n in ("bf16", "f16")}

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if node.op.name != "matmul" or any(
                v.aval.ndim != 2 or v.aval.dtype.name not in narrow or not all(
                    isinstance(n, int) and n for n in v.aval.shape) for v in inputs):
            return None
        (M, K), (_, N) = map(extents_of, inputs)
        turned = [_turned(rw, v) for v in inputs]
        (a, a_turned), (b, b_turned) = turned

        def more(extent: int, wanted: bool) -> int:
            return -extent % EIGHT if wanted else 0

        # A result that is larger than b is not cut: b is turned (`_Calls.is_brought_by_words`).
        turns = not b_turned and value_bytes(node.outputs[0]) > value_bytes(b) and bool(N % EIGHT)
        m, n = more(M, a_turned), more(N, not (b_turned or turns))
        k = more(K, not a_turned or b_turned or turns)
        copied = [value_bytes(v) for v, wanted in ((a, m or k), (b, n or k))
                  if wanted and not _is_joined(rw, v)]
        if not (m or n or k) or not saves_time(
                node, copied + [value_bytes(node.outputs[0])] * bool(n)):
            return None
        padded = [_padded(rw, a, (k, m) if a_turned else (m, k), a_turned),
                  _padded(rw, b, (n, k) if b_turned else (k, n), b_turned)]
        out = rw.emit("matmul", *padded, **node.attrs)
        if not (m or n):
            return out
        return rw.emit("slice", out, starts=(0, 0), stops=(M, N), steps=(1, 1))

    return remove_dead(rebuild(graph, visit))


def _turned(rw: Rewriter, v: Value) -> tuple[Value, bool]:
    """What lies in memory, and whether the operand is its transpose."""
    made = rw.made_by(v, "transpose")
    if made is not None and swaps_last(made.attrs["axes"]):
        return made.inputs[0], True
    return v, False


def _is_joined(rw: Rewriter, v: Value) -> bool:
    """Whether a copy makes it in any case, which then writes zeros too."""
    made = rw.producer.get(v)
    while made is not None and made.op.name == "reshape":
        made = rw.producer.get(made.inputs[0])
    return made is not None and made.op.name in ("concatenate", "pad")


def _padded(rw: Rewriter, x: Value, more: tuple[int, int], turned: bool) -> Value:
    """With so many zeros behind its rows and columns as they lie."""
    if any(more):
        zero = rw.emit("constant", value=0.0, type=x.aval.type)
        x = rw.emit("pad", x, zero, before=(0, 0), after=more, holes=(0, 0))
    return rw.emit("transpose", x, axes=(1, 0)) if turned else x


__all__ = ["pad_rows"]
