"""Random numbers by Philox, the same for any tiling: keyed by (key of the launch or a seed, global
element index)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tessera.numerics import as_key, f32, fold_in, i64, random_bits_at, uint32
from tessera.tile.builder import edge_rules, rules
from tessera.tile.builder.op_tracer import OpTracer
from tessera.tile.ir import edges
from tessera.tile.ir.errors import KernelError, RuleError
from tessera.tile.ir.handles import Handle, is_number
from tessera.tile.ir.op_record import OPS, declare, macro
from tessera.tile.ir.types import Scalar, TileType
from tessera.tile.passes.random_draws import DROPOUT

RUN = 4  # words that one computation of Philox gives


def _index_rule(types: Any, attrs: Any) -> Any:
    t = types[0]
    rules.require_numbers((t,), "random_bits")
    if t.dtype.kind not in ("int", "uint"):
        raise RuleError(f"random_bits takes integer indices, got {t}")
    for word in types[1:]:
        if not isinstance(word, Scalar) or not word.uniform or word.dtype is not uint32:
            raise RuleError(f"the words of a key are one uint32 each for the group, got {word}")
    return replace(t, dtype=uint32)


def _bits_lower(t: OpTracer, index: Any, seed: Any = None, runs: Any = False) -> Any:
    index = t.ir.value_of(index)
    seed, words = _seed(t, seed)
    if runs and (not isinstance(index, Handle) or not isinstance(index.type, TileType)
                 or index.type.shape[-1] % RUN):
        t.fail(f"runs=True of {index}: it needs a tile of whole runs of {RUN}")
    return t.ir.emit("random_bits", [index, *words], seed=seed, runs=bool(runs))


def _seed(t: OpTracer, seed: Any) -> tuple[Any, list[Any]]:
    """(seed that is known, none) or (None, the two words of a key known when the kernel runs)."""
    if isinstance(seed, tuple) and len(seed) == 2:
        return None, [t.ir.to(w, uint32) if is_number(w) else t.ir.value_of(w) for w in seed]
    if seed is None or is_number(seed):
        return None if seed is None else t.ir.constant_int(seed, "seed"), []
    seed = t.ir.value_of(seed)
    if not isinstance(seed.type, Scalar) or seed.type.dtype.kind not in ("int", "uint") or \
            not t.ir.is_uniform(seed):
        t.fail(f"a seed is an integer, the same in all lanes, got {seed.type}",
               "seed=7, or a parameter: seed: int")
    if seed.type.dtype.bits < 64:
        seed = t.ir.cast(seed, i64)
    high = t.ir.arithmetic("bitand", (t.ir.arithmetic("shr", (seed, 32)), 0xFFFFFFFF))
    low = t.ir.arithmetic("bitand", (seed, 0xFFFFFFFF))
    return None, [t.ir.cast(low, uint32), t.ir.cast(high, uint32)]


def _unseeded(words: int) -> Any:
    """Whether an op draws by the launch's key: without a seed, and without the words of a key."""
    return lambda op: op.attr["seed"] is None and len(op.args) <= words


@declare(rule=_index_rule, attrs=("seed", "runs"), run=True, lower=_bits_lower,
         edges=edge_rules.elementwise, draws=_unseeded(1), layouts="same")
def random_bits(m: Any, op: Any, index: Any, *words: Any, seed: Any = None,
                runs: Any = False) -> Any:
    """Words of a Philox stream at these indices, as ts.numerics.random_bits gives: the seed's,
    else one of the launch's own.

    seed: an integer, or the two words of a key; known at once or when the kernel runs.
    runs: indices along the last axis are runs of four that begin at multiples of four. One
    computation gives the words of a run.
    """
    if op.attr["runs"]:
        _check_runs(index, op.where)
    if words:
        return _keyed(index, *words)
    return _words(m.launch_key if op.attr["seed"] is None else op.attr["seed"], index)


def _check_runs(index: np.ndarray, where: Any) -> None:
    parts = index.reshape(*index.shape[:-1], -1, RUN)
    first = parts[..., :1]
    if (first % RUN).any() or (parts != first + np.arange(RUN)).any():
        raise KernelError(f"random_bits(runs=True) of indices that are no runs of {RUN}",
                          where=where, hint="leave runs out")


def _keyed(index: np.ndarray, low: np.ndarray, high: np.ndarray,
           of: Callable[[Any], Any] = as_key) -> np.ndarray:
    """The words at [G, ...] indices, of each group's own key: [G, 1] or [1, 1] words.

    of: the stream that a key is for.
    """
    keys = np.concatenate(np.broadcast_arrays(low, high), axis=1)  # [G, 2]
    groups = max(len(keys), len(index))
    keys = np.broadcast_to(keys, (groups, 2))
    index = np.broadcast_to(index, (groups, *index.shape[1:]))
    out = np.empty(index.shape, np.uint32)
    for key in np.unique(keys, axis=0):
        mine = (keys == key).all(axis=1)
        out[mine] = _words(of(key), index[mine])
    return out


def _words(key: Any, index: np.ndarray) -> np.ndarray:
    index = np.asarray(index, np.int64)
    return random_bits_at(as_key(key), np.maximum(index, 0)).reshape(index.shape)


@macro()
def random_uniform(t: OpTracer, index: Any, seed: Any = None) -> Any:
    """Numbers in [0, 1) with 24 random bits each, at these indices of random_bits' stream."""
    bits = t.call_op(OPS["random_bits"], [index], {"seed": seed})
    top = t.ir.arithmetic("shr", (bits, 8))
    return t.ir.arithmetic("mul", (t.ir.cast(top, f32), 2.0**-24))


# --- dropout ----------------------------------------------------------------------------------
def _dropout_rule(types: Any, attrs: Any) -> Any:
    t = types[0]
    if not isinstance(t, TileType) or len(t.shape) not in (1, 2):
        raise RuleError(f"dropout needs a tile of one or two axes, got {t}")
    for at in types[1:]:
        if not isinstance(at, Scalar) or not at.uniform or at.dtype.kind == "float":
            raise RuleError(f"dropout needs integers that are one for the group, got {at}")
    if t.dtype.kind != "float":
        raise RuleError(f"dropout of {t}: a float tile")
    return t


@declare(rule=_dropout_rule, attrs=("p", "seed"), run=True, public=False,
         edges=edge_rules.edges_unchanged, draws=_unseeded(6), layouts="same")
def drop(m: Any, op: Any, x: Any, batch: Any, row: Any, col: Any, rows: Any, cols: Any,
         *words: Any) -> Any:
    """x / (1 - p), or 0 with probability p, by word (batch * rows + row) * cols + col of the stream
    for dropout of a seed, of the two words of a key, or of the launch."""
    p, seed = op.attr["p"], op.attr["seed"]
    batch, row, col, rows, cols = (np.reshape(v, (-1, *[1] * (x.ndim - 1))).astype(np.int64)
                                   for v in (batch, row, col, rows, cols))
    r = row + np.arange(x.shape[1])[None, :, None] if x.ndim == 3 else row
    c = col + np.arange(x.shape[-1])
    index = (batch * rows + r) * cols + c

    def stream(key: Any) -> Any:
        return fold_in(as_key(key), DROPOUT)

    drawn = _keyed(index, words[0], words[1], of=stream) if words else _words(
        stream(m.launch_key if seed is None else seed), index)
    kept = drawn >= np.uint32(min(p * 2.0**32, 2.0**32 - 1))
    return np.where(kept, x * x.dtype.type(1 / (1 - p)), x.dtype.type(0))


@macro()
def dropout(t: OpTracer, x: Any, p: Any, *, seed: Any = None) -> Any:
    """Each element is 0 with probability p, else scaled by 1 / (1 - p).

    The choice depends on the seed, or on the launch where none is given, and on the element's
    position in its matrix (and batch), not on the tiling. x must come from loads or matmuls of
    loads: they know their position.
    """
    if not isinstance(p, int | float) or isinstance(p, bool) or not 0 <= p < 1:
        t.fail(f"p={p!r}: a probability in [0, 1) known at compile time")
    if not isinstance(x, Handle) or not isinstance(x.type, TileType):
        t.fail("dropout needs a tile")
    if p == 0:
        return x
    axes = t.facts.of(x).axes
    placed = [a for a in axes if isinstance(a, edges.Edge) and a.placed]
    if len(axes) not in (1, 2) or len(placed) != len(axes):
        t.fail("dropout of a tile whose position in a tensor is not known",
               "it knows tiles of one or two axes that were loaded, or are matmuls of loaded ones;"
               " else compare random_uniform(index) of your own index with p")
    *rows, (col, width) = map(t.ir.bounds_of, placed)
    row, height = rows[0] if rows else (0, 1)
    seed, words = _seed(t, seed)
    matrix = t.grid.batch_coordinate(t.env)
    return t.ir.emit("drop", [x, matrix, row, col, height, width, *words], p=float(p), seed=seed)


@macro()
def dropout_in_kernel(t: OpTracer, x: Any, p: Any, *, seed: Any = None) -> Any:
    """As dropout."""
    return t.call_op(OPS["dropout"], [x, p], {"seed": seed})
