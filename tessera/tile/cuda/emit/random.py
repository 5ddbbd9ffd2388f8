"""Random words by the global index of an element, and dropout."""

from __future__ import annotations

import numpy as np

from tessera.numerics import as_key, fold_in
from tessera.tile.cuda.emit.emitter import Emitter, intrinsic
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.ir.ir import Op, Operand
from tessera.tile.ops.random import RUN
from tessera.tile.passes.index_runs import IndexRuns
from tessera.tile.passes.random_draws import DROPOUT, ROUNDING


def words_of(key: object) -> str:
    """A key that is known now, as two arguments."""
    return ", ".join(f"i32({int(np.int32(w))})" for w in as_key(key).view(np.int32))


def launch_key(e: Emitter) -> str:
    """The pair of words that is the launch's key: two parameters, folded with the number of the
    replay where the launch is part of a captured graph."""
    words = [e.param("seed", "launch", "i32", axis) for axis in (0, 1)]
    made = e.use("launch_key", "use(random.launch_key())")
    given = ", ".join([*words, e.param("replays", "replays", "i64")])
    return e.once("launch_key", f"{made}({given})")


def words(e: Emitter, pair: str) -> list[str]:
    """A pair as two arguments."""
    return [f"{e.use('pick', f'use(fragments.pick({i}))')}({pair})" for i in (0, 1)]


def stream_key(e: Emitter, pair: str, domain: int, hint: str) -> str:
    """The pair of a stream of its own, computed once."""
    fold = e.use("fold_in", intrinsic("random.fold_in", domain))
    return e.once(hint, f"{fold}({', '.join(words(e, pair))})")


def rounding_key(e: Emitter) -> list[str]:
    """The two words of the stream by which stores round."""
    return words(e, stream_key(e, launch_key(e), ROUNDING, "rounding_key"))


def rounding_word(e: Emitter, index: str) -> str:
    """The word by which a store rounds the element at an index of its tensor."""
    call = e.use("random_bits", intrinsic("random.random_bits", "int64"))
    return f"{call}({index}, {', '.join(rounding_key(e))})"


@emits("random_bits")
def _random_bits(e: Emitter, op: Op) -> None:
    (index, *key_words), seed = op.args, op.attr["seed"]
    found = not op.attr["runs"] and IndexRuns(e.made_by, e.known).count(index, RUN)
    if op.attr["runs"] or found:
        layout = e.layout(index)
        text = intrinsic("random.random_runs", e.dtype(index).name, layout.text, layout.shape,
                         **({"signed": True} if found else {}))
    else:
        text = intrinsic("random.random_bits", e.dtype(index).name)
    call = e.use("random_bits", text)
    if key_words:
        key = ", ".join(f"i32({e.name(w)})" for w in key_words)
    else:
        key = ", ".join(words(e, launch_key(e))) if seed is None else words_of(seed)
    e.define(op.outs[0], f"{call}({e.name(index)}, {key})")


@emits("drop")
def _drop(e: Emitter, op: Op) -> None:
    (made,), (x, batch, row, col, rows, cols, *given) = op.outs, op.args
    layout, p = e.layout(x), op.attr["p"]
    at_row, at_col = (e.index(layout, axis) if axis >= 0 else "i32(0)"
                      for axis in (len(layout.shape) - 2, len(layout.shape) - 1))

    def wide(v: Operand) -> str:
        return f"i64({e.name(v)})"

    start = (f"({wide(batch)} * {e.name(rows)} + {e.name(row)} + {at_row}) * {e.name(cols)} + "
             f"{e.name(col)} + {at_col}")
    aligned = min(e.known.divisor(col), e.known.divisor(cols)) >= 4
    threshold = int(np.uint32(min(p * 2.0**32, 2.0**32 - 1)).astype(np.int32))
    call = e.use("drop", intrinsic("random.drop", layout.text, layout.shape,
                                   kind_of(made.type.dtype), threshold, scale(e, x, p),
                                   aligned=aligned))
    e.define(made, f"{call}({e.name(x)}, {start}, {wide(cols)}, {at_col}, {_key(e, op, given)})")


def scale(e: Emitter, x: Operand, p: float) -> float:
    """1 / (1 - p) as a number of the register."""
    return float(np.float64(1 / (1 - p)) if kind_of(e.dtype(x)) == "f64" else
                 np.float32(1 / (1 - p)))


def _key(e: Emitter, op: Op, given: list[Operand]) -> str:
    """The key of dropout's stream. given: the words of a key that is known when the kernel runs."""
    seed = op.attr["seed"]
    if seed is not None:
        return words_of(fold_in(as_key(seed), DROPOUT))
    if given:
        fold, pair = e.use("fold_in", intrinsic("random.fold_in", DROPOUT)), e.fresh("dropout_key")
        e.line(f"{pair} = {fold}({', '.join(f'i32({e.name(w)})' for w in given)})")
        return ", ".join(words(e, pair))
    return ", ".join(words(e, stream_key(e, launch_key(e), DROPOUT, "dropout_key")))
