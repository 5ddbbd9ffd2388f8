"""What ops of the tile language are in ops of the graph, by name: an op's step, with the values of
its operands, gives the value of its result. See kernel_meaning.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...numerics import as_type
from ...numerics.policy import saturate
from ...tensor import Tensor, as_tensor
from ...tile.ir.op_record import OPS
from ...tile.ir.types import Scalar, TileType
from .. import functions as F
from . import elementwise, maths, reduce  # noqa: F401  MEANINGS takes their functions
from .kernel_blocks import BlockedTile, is_recorded, map_blocks, multiplied, product, reduced
from .kernel_places import where_else

if TYPE_CHECKING:
    from ...tile.ir.ir import Op
    from .kernel_meaning import KernelRecorder


SHAPED = ("expand_dims", "reshape", "broadcast_to", "transpose", "permute", "matmul", "reduce_sum",
          "reduce_max", "reduce_min", "reduce_prod", "edge_mask", "causal_mask", "span_mask",
          "cumsum", "cummax", "cumprod", "argmax", "argmin", "sort", "argsort", "exchange",
          "smallest", "one_along", "piece_ends")
MASKED = ("edge_mask", "causal_mask")
WARP = 32


@dataclass(frozen=True)
class RecordedOp:
    """An op while it is recorded."""

    machine: KernelRecorder
    op: Op
    type: Any

    @property
    def lead(self) -> int:
        return len(self.machine.grid)

    def axis(self, x: Tensor) -> int | tuple[int, ...]:
        """Where the tile's axis, or all of them, lie in x."""
        axis = self.op.attr["axis"]
        return tuple(range(self.lead, x.ndim)) if axis is None else self.lead + axis


def _ignoring_step(f: Callable) -> Callable:
    return lambda step, *xs: f(*xs)


def _reduced(f: Callable) -> Callable:
    def run(step: RecordedOp, x: Tensor) -> Tensor:
        y = f(x, axis=step.axis(x))
        return F.expand_dims(y, -1) if isinstance(step.type, Scalar) else y

    return run


def _matmul(step: RecordedOp, x: Tensor, y: Tensor, *accumulator: Tensor) -> Tensor:
    out = product(step.type.dtype)(x, y)
    return out + accumulator[0] if accumulator else out


def _convert(step: RecordedOp, x: Tensor) -> Tensor:
    attr = step.op.attr
    numeric = as_type(step.type.dtype)
    if attr.get("saturate"):
        numeric = numeric @ saturate
    return F.cast(x, numeric)


def _permute(step: RecordedOp, x: Tensor) -> Tensor:
    n = step.lead
    return F.transpose(x, (*range(n), *(n + a for a in step.op.attr["axes"])))


def _shaped(step: RecordedOp, x: Tensor) -> Tensor:
    return F.reshape(x, (*x.shape[:step.lead], *step.type.shape))


def _broadcast(step: RecordedOp, x: Tensor) -> Tensor:
    n, shape = step.lead, step.type.shape
    if x.ndim - n != len(shape):  # a number
        x = F.reshape(x, (*x.shape[:n], *(1,) * len(shape)))
    return F.broadcast_to(x, (*x.shape[:n], *shape))


def _masked(step: RecordedOp, x: Tensor, *numbers: Tensor) -> Tensor:
    """An op that replaces elements by their places alone."""
    op = step.op
    mask = kept_places(step.machine, op)
    mask = mask.apart() if isinstance(mask, BlockedTile) else mask
    return where_else(mask, x, op.attr.get("fill", -np.inf))


def _spanned(step: RecordedOp, x: Tensor, bounds: Tensor, start: Tensor) -> Tensor:
    """-inf where a column of the tensor is none that its row's bound lets be seen."""
    first = F.reshape(start, (*start.shape[:step.lead], 1, 1))
    columns = F.arange(x.shape[-1], dtype="int32") + first
    kept = columns < bounds if step.op.attr["behind"] else columns >= bounds
    return F.where(kept, x, -np.inf)


def kept_places(m: KernelRecorder, op: Op) -> Any:
    """[*grid, *tile], with extents of 1 where they are alike: which elements such an op keeps."""
    given = [m.get(a) for a in op.args[1:]]
    if any(map(is_recorded, given)):
        m.refuse(f"the edge of {op.name} depends on elements")
    kind, n, attr = op.outs[0].type, len(m.grid), op.attr
    assert isinstance(kind, TileType)
    extents = kind.shape
    numbers = [m.over_grid(np.asarray(g, np.int64)[:, 0]) for g in given]

    def along(axis: int, first: np.ndarray) -> np.ndarray:
        shape = [1] * len(extents)
        shape[axis] = extents[axis]
        lead = first.reshape(*first.shape, *(1,) * len(extents))
        return lead + np.arange(extents[axis]).reshape(*(1,) * n, *shape)

    if op.name == "edge_mask":
        at = along(attr["axis"], numbers[0])
        stop = numbers[1].reshape(*numbers[1].shape, *(1,) * len(extents))
        return (at < stop) & (at >= 0) if attr.get("low") else at < stop
    keys = attr.get("keys", 1)
    queries = along(1 - keys, numbers[0])
    return m.compared("le", along(keys, numbers[1]), queries, extents)


def _lanes(f: Callable) -> Callable:
    """Over all lanes of the group."""
    def run(step: RecordedOp, x: Tensor) -> Tensor:
        m = step.machine
        return f(F.broadcast_to(x, (*x.shape[:-1], m.lanes)), axis=-1, keepdims=True)

    return run


def _warps(f: Callable) -> Callable:
    """Over the lanes of each warp, in every lane."""
    def run(step: RecordedOp, x: Tensor) -> Tensor:
        m = step.machine
        if m.lanes % WARP:
            m.refuse(f"a warp of a group of {m.lanes} lanes is not whole")
        wide = F.reshape(F.broadcast_to(x, (*x.shape[:-1], m.lanes)), (*x.shape[:-1], -1, WARP))
        y = F.broadcast_to(f(wide, axis=-1, keepdims=True), wide.shape)
        return F.reshape(y, (*x.shape[:-1], m.lanes))

    return run


def _scan(step: RecordedOp, x: Tensor) -> Tensor:
    """Sums over the lanes of a warp up to each."""
    lanes = step.machine.lanes
    wide = F.reshape(F.broadcast_to(x, (*x.shape[:-1], lanes)), (*x.shape[:-1], -1, WARP))
    return F.reshape(F.cumsum(wide, axis=-1), (*x.shape[:-1], lanes))


def _shuffled(step: RecordedOp, x: Tensor, *rest: Tensor) -> Tensor:
    """Values of other lanes: of which ones, the op's own meaning of lanes' numbers says."""
    m = step.machine
    given = [m.get(a) for a in step.op.args[1:]]
    if any(isinstance(g, Tensor | BlockedTile) for g in given):
        m.refuse("which lane's value it takes depends on elements")
    run = OPS[step.op.name].run
    assert run is not None
    of = run(m, step.op, m.lane_ids().repeat(m.count, 0), *given)
    if (of != of[:1]).any():
        m.refuse("which lane's value it takes differs between groups")
    return F.take(F.broadcast_to(x, (*x.shape[:-1], m.lanes)), as_tensor(of[0]), axis=-1)


def _position(f: Callable) -> Callable:
    def run(step: RecordedOp, x: Tensor) -> Tensor:
        if step.op.attr["axis"] is None:
            x = F.reshape(x, (*x.shape[:step.lead], -1))
            return F.expand_dims(f(x, axis=-1), -1)
        y = f(x, axis=step.lead + step.op.attr["axis"])
        return F.expand_dims(y, -1) if isinstance(step.type, Scalar) else y

    return run


def _exchanged(step: RecordedOp, x: Tensor) -> Tensor:
    """Which neighbour's value an element takes is the op's own meaning of their numbers."""
    axis, attr = step.axis(x), step.op.attr
    assert isinstance(axis, int)
    meaning = OPS[step.op.name].numpy
    assert meaning is not None
    of = meaning(np.arange(x.shape[axis])[None], axis=0, bit=attr["bit"])[0]
    return F.take(x, as_tensor(of), axis=axis)


def _take_element(step: RecordedOp, x: Tensor) -> Tensor:
    axis = step.axis(x)
    assert isinstance(axis, int)
    y = F.take(x, as_tensor(np.int64(step.op.attr["at"])), axis=axis)
    return F.expand_dims(y, -1) if isinstance(step.type, Scalar) else y


def _piece_ends(step: RecordedOp, x: Tensor) -> Tensor:
    size = step.op.attr["size"]
    pieces = F.reshape(x, (*x.shape[:-1], x.shape[-1] // size, size))
    return F.take(pieces, as_tensor(np.int64(size - 1)), axis=-1)


def _exp_sub(x: Tensor, y: Tensor) -> Tensor:
    return F.where(x == -np.inf, 0.0, F.exp(x - y))


def _div_or_zero(x: Tensor, y: Tensor) -> Tensor:
    return F.where((x == 0) & (y == 0), 0.0, x / y)


MEANINGS: dict[str, Callable] = {
    **{name: _ignoring_step(f) for name, f in (
        ("add", operator.add), ("sub", operator.sub), ("mul", operator.mul),
        ("div", operator.truediv), ("neg", operator.neg), ("pow", operator.pow),
        ("mod", operator.mod), ("floordiv", operator.floordiv), ("lt", operator.lt),
        ("le", operator.le), ("gt", operator.gt), ("ge", operator.ge), ("eq", operator.eq),
        ("ne", operator.ne), ("and", operator.and_), ("or", operator.or_),
        ("not", operator.invert), ("bitand", operator.and_), ("bitor", operator.or_),
        ("bitxor", operator.xor), ("bitnot", operator.invert),
        ("shl", operator.lshift), ("shr", operator.rshift), ("abs", abs), ("exp_approx", F.exp),
        ("sigmoid_approx", F.sigmoid), ("fma", lambda x, y, z: x * y + z),
        ("exp_sub", _exp_sub), ("div_or_zero", _div_or_zero), ("maximum", F.maximum),
        ("minimum", F.minimum), ("atan2", F.atan2), ("exp", F.exp), ("exp2", F.exp2),
        ("expm1", F.expm1), ("log", F.log), ("log2", F.log2), ("log1p", F.log1p),
        ("sqrt", F.sqrt), ("rsqrt", F.rsqrt), ("sin", F.sin), ("cos", F.cos), ("tan", F.tan),
        ("atan", F.atan), ("tanh", F.tanh), ("floor", F.floor), ("ceil", F.ceil),
        ("round", F.round), ("trunc", F.trunc), ("erf", F.erf), ("erfc", F.erfc),
        ("sigmoid", F.sigmoid),
        ("isnan", F.isnan), ("isinf", F.isinf), ("where", F.where))},
    **{f"reduce_{name}": _reduced(f) for name, f in (
        ("sum", F.sum), ("max", F.max), ("min", F.min), ("prod", F.prod))},
    **{f"group_{name}": _lanes(f) for name, f in (
        ("sum", F.sum), ("max", F.max), ("min", F.min))},
    **{f"warp_{name}": _warps(f) for name, f in (
        ("sum", F.sum), ("max", F.max), ("min", F.min))},
    **dict.fromkeys(("shuffle", "shuffle_down", "shuffle_up", "shuffle_xor"), _shuffled),
    "vote_any": _warps(F.any), "vote_all": _warps(F.all), "warp_scan": _scan,
    "argmax": _position(F.argmax), "argmin": _position(F.argmin),
    "sort": lambda step, x: F.sort(x, axis=-1, descending=step.op.attr["descending"]),
    "argsort": lambda step, x: F.argsort(x, axis=-1, descending=step.op.attr["descending"]),
    "smallest": lambda step, x: F.sort(x, axis=-1)[..., :step.op.attr["k"]],
    "edge_mask": _masked, "causal_mask": _masked, "span_mask": _spanned,
    "running_max": lambda step, m, x: F.where(x > m + step.op.attr["slack"], x, m),
    "matmul": _matmul, "convert": _convert, "expand_dims": _shaped, "reshape": _shaped,
    "transpose": lambda step, x: F.swapaxes(x, -1, -2), "permute": _permute,
    "broadcast_to": _broadcast, "exchange": _exchanged, "one_along": _take_element,
    "piece_ends": _piece_ends,
    "cumsum": lambda step, x: F.cumsum(x, axis=step.axis(x)),
    "cummax": lambda step, x: F.cummax(x, axis=step.axis(x)),
    "cumprod": lambda step, x: F.cumprod(x, axis=step.axis(x)),
}

# --- blocks as they lie ------------------------------------------------------------------------
def _whole_reduction(f: Callable) -> Callable:
    return lambda op, args, shape: reduced(f, args[0], op.attr["axis"])


def _whole_sum(op: Op, args: list[Any], shape: tuple[int, ...]) -> BlockedTile | None:
    axis, (x,) = op.attr["axis"], args
    made = reduced(F.sum, x, axis)
    return made if made is None or axis is None else replace(made, summed=(x, axis))


def _whole_expand(op: Op, args: list[Any], shape: tuple[int, ...]) -> BlockedTile:
    axis, (x,) = op.attr["axis"], args
    return x.renamed({i: i + 1 for i in range(axis, len(x.shape))}, shape)


def _whole_permute(op: Op, args: list[Any], shape: tuple[int, ...]) -> BlockedTile:
    axes, (x,) = op.attr.get("axes", (1, 0)), args
    return x.renamed({a: i for i, a in enumerate(axes)}, shape)


def _whole_broadcast(op: Op, args: list[Any], shape: tuple[int, ...]) -> BlockedTile:
    (x,) = args
    form = tuple(tuple(p for p in group if x.extent(p) > 1) for group in x.form)
    return x.relabelled(form, shape, x.grid)


def _whole_matmul(op: Op, args: list[Any], shape: tuple[int, ...]) -> BlockedTile | None:
    if not all(isinstance(x, BlockedTile) for x in args[:2]):
        return None
    x, y = args[:2]
    made = multiplied(product(op.outs[0].type.dtype), x, y)
    if made is None:
        return None
    made = replace(made, products=((x, y),))
    if len(args) == 2 or isinstance(args[2], np.ndarray) and not args[2].any():
        return made
    return map_blocks(operator.add, (made, args[2]), shape)


WHOLE: dict[str, Callable] = {
    **{f"reduce_{name}": _whole_reduction(f) for name, f in (
        ("max", F.max), ("min", F.min), ("prod", F.prod))},
    "reduce_sum": _whole_sum, "expand_dims": _whole_expand, "transpose": _whole_permute,
    "permute": _whole_permute, "broadcast_to": _whole_broadcast, "matmul": _whole_matmul}

__all__ = ["MASKED", "MEANINGS", "SHAPED", "WHOLE", "RecordedOp", "kept_places"]
