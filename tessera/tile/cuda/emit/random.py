"""Random words by the global index of an element, and dropout."""

from __future__ import annotations

import numpy as np

from tessera.numerics import as_key, fold_in
from tessera.tile.cuda.emit.emitter import Emitter, kind_of
from tessera.tile.cuda.emit.lanes import intrinsic
from tessera.tile.cuda.emit.table import emits
from tessera.tile.ir import Op, Operand
from tessera.tile.ops.random import _DROPOUT


def words_of(key: object) -> str:
    """A key that is known now, as two arguments."""
    return ", ".join(f"i32({int(np.int32(w))})" for w in as_key(key).view(np.int32))


def run_key(e: Emitter) -> str:
    """The two words of the setting `seed`, at run time."""
    return ", ".join(e.param("seed", "seed", "i32", axis) for axis in (0, 1))


def drawn(e: Emitter, index: str) -> str:
    """The word by which a store rounds the element at an index of its tensor: of the stream of the
    seed and the kernel's name."""
    key = ", ".join(e.param("seed", "key", "i32", axis) for axis in (0, 1))
    return f"{e.use('random_bits', intrinsic('philox.random_bits', 'int64'))}({index}, {key})"


@emits("random_bits")
def _random_bits(e: Emitter, op: Op) -> None:
    (index, *key_words), seed = op.args, op.attr["seed"]
    if op.attr["runs"]:
        layout = e.layout(index)
        text = intrinsic("philox.random_runs", e.dtype(index).name, layout.text, layout.shape)
    else:
        text = intrinsic("philox.random_bits", e.dtype(index).name)
    call = e.use("random_bits", text)
    if key_words:
        key = ", ".join(f"i32({e.name(w)})" for w in key_words)
    else:
        key = run_key(e) if seed is None else words_of(seed)
    e.define(op.outs[0], f"{call}({e.name(index)}, {key})")


@emits("drop")
def _drop(e: Emitter, op: Op) -> None:
    (made,), (x, batch, row, col, rows, cols) = op.outs, op.args
    layout, p = e.layout(x), op.attr["p"]
    at_row, at_col = e.index(layout, len(layout.shape) - 2), e.index(layout, len(layout.shape) - 1)

    def wide(v: Operand) -> str:
        return f"i64({e.name(v)})"

    start = (f"({wide(batch)} * {e.name(rows)} + {e.name(row)} + {at_row}) * {e.name(cols)} + "
             f"{e.name(col)} + {at_col}")
    aligned = min(e.known.divisor(col), e.known.divisor(cols)) >= 4
    threshold = int(np.uint32(min(p * 2.0**32, 2.0**32 - 1)).astype(np.int32))
    call = e.use("drop", intrinsic("philox.drop", layout.text, layout.shape,
                                   kind_of(made.type.dtype), threshold, scale(e, x, p),
                                   aligned=aligned))
    e.define(made, f"{call}({e.name(x)}, {start}, {wide(cols)}, {at_col}, {_key(e, op)})")


def scale(e: Emitter, x: Operand, p: float) -> float:
    """1 / (1 - p) as a number of the register."""
    return float(np.float64(1 / (1 - p)) if kind_of(e.dtype(x)) == "f64" else
                 np.float32(1 / (1 - p)))


def _key(e: Emitter, op: Op) -> str:
    """The key of dropout's stream."""
    seed = op.attr["seed"]
    if seed is not None:
        return words_of(fold_in(as_key(seed), _DROPOUT))
    fold = e.use("fold_in", intrinsic("philox.fold_in", _DROPOUT))
    both = e.once("dropout_key", f"{fold}({run_key(e)})")
    return ", ".join(f"{e.use('pick', f'use(fragments.pick({i}))')}({both})" for i in (0, 1))
