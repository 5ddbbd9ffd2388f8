"""A kernel as one node of a graph: what it returns and what it writes are the node's results.

    y = k(x)                       under a trace: a node, y its result
    k(x, y)                        y stands for what was written from here on

The array that an argument held before is not touched: a graph's values do not change. On the CPU
the interpreter runs the kernel, and sees what it sees of any launch.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import hooks
from ...dims import Dim
from ...errors import DTypeError, TraceError, user_line
from ...kernels.softmax import softmax
from ...lazy_dataclass import dataclass
from ...numerics import NumericType, as_type
from ...tensor import Tensor, as_tensor
from ...tile.interpreter.launch import Config, extent, scalars_in_grid
from ...tile.ir.ir import Op, walk
from ...tile.ir.op_record import OPS as TILE_OPS
from ...tile.ir.types import GlobalTensor, Scalar
from ...tile.launch.repeated_call import grid_names
from ...tile.passes.batch_axes import batch_extent, with_batch_axes
from ...tile.passes.graph_arguments import held_in, with_given_results, with_loaded_numbers
from ...tile.passes.independent_extents import independent_extents
from ...tile.passes.random_draws import draws
from ...tile.passes.written_arguments import written_parameters
from .. import functions as F
from ..op import Arg, Aval, GraphOp, Sample
from ..trace import Tracer, apply, aval_of, current_builder, current_line
from .kernel_meaning import meaning, underivable

if TYPE_CHECKING:
    from ...tile.interpreter.arguments import Bound
    from ...tile.ir.ir import Function
    from ...tile.kernel.kernel import Kernel


@dataclass(frozen=True)
class KernelCall:
    """A call of a kernel, its tensors apart.

    names: the parameters that hold the tensors, in the order of the node's inputs; types: of them
    constants: the other arguments    explicit: the parameters that the call itself gave
    fresh: parameters of which it reads nothing and writes all, as who calls it knows
    returned, written: the node's results, first what the kernel returns, then what it writes
    drawn: a last input is the key by which it draws   reports: it prints, or asserts
    batch: extents in front of every result, the outermost first; batched: for each of them which
    inputs have it
    """

    kernel: Kernel
    config: Config
    names: tuple[str, ...]
    types: tuple[NumericType, ...]
    constants: tuple[tuple[str, Any], ...]
    explicit: frozenset[str]
    fresh: frozenset[str] = frozenset()
    returned: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    drawn: bool = False
    reports: bool = False
    batch: tuple[int, ...] = ()
    batched: tuple[tuple[bool, ...], ...] = ()

    def __str__(self) -> str:
        groups = "" if self.config == Config() else f"[{self.config.groups}, {self.config.lanes}]"
        given = ", ".join(f"{n}={v}" for n, v in self.constants if n in self.explicit)
        rows = f" vmap{list(self.batch)}" if self.batch else ""
        return f"{self.kernel.__name__}{groups}({given}){rows}"

    def one(self, avals: Sequence[Aval]) -> list[Aval]:
        """The inputs of one launch: without the axes of the batch."""
        axes = [sum(b[i] for b in self.batched) for i in range(len(avals))]
        return [Aval(a.shape[n:], a.type) for a, n in zip(avals, axes, strict=True)]

    def bound(self, avals: Sequence[Aval]) -> Bound:
        """The arguments of one launch, by their types."""
        tensors = dict(zip(self.names, self.one(avals), strict=False))
        return self.kernel.bind_types({**dict(self.constants), **tensors}, self.explicit)

    def results(self, avals: Sequence[Aval]) -> tuple[Aval, ...]:
        """The types of what it gives."""
        bound = self.bound(avals)
        function = self.kernel.typed(bound)
        made = {p.value.name: p.type for p in function.params if p.role == "output"}
        found = []
        for name in (*self.returned, *self.written):
            kind = made.get(name, bound.types[name] if name in bound.types else None)
            assert isinstance(kind, GlobalTensor)
            shape = tuple(extent(str(d), bound) for d in kind.dims)
            if name in made and function.result[0] == "scalar":
                shape = ()
            found.append(Aval((*self.batch, *shape), kind.numeric))
        return tuple(found)

    def arguments(self, arrays: Sequence[np.ndarray]) -> tuple[dict[str, Any], Any]:
        """(arguments by name, the launch's key or None) of one launch; what it writes is copied."""
        key = tuple(map(int, arrays[-1])) if self.drawn else None
        given = dict(self.constants)
        for name, x, numeric in zip(self.names, arrays, self.types, strict=False):
            own = np.array(x) if name in self.written else x
            given[name] = Tensor(own, numeric)
        ordered = {n: given[n] for n in self.kernel.signature.parameters
                   if n in self.names or n in self.explicit}
        return ordered, key

    def run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """One launch under the interpreter: its results as arrays."""
        given, key = self.arguments(arrays)
        made = self.kernel.run(self.config, (), given, target="cpu", key=key)
        every = made if isinstance(made, tuple) else (made,)
        returned = [x.array if isinstance(x, Tensor) else x for x in every] if self.returned else []
        return returned + [given[n].array for n in self.written]

    def run_rows(self, arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """One launch for each row of the batch."""
        return _run_rows(self, arrays)


# --- the op ------------------------------------------------------------------------------------
def _shape(*avals: Aval, call: KernelCall) -> tuple[Aval, ...]:
    return call.results(avals)


def _run(*arrays: np.ndarray, call: KernelCall) -> tuple[np.ndarray, ...]:
    return call.run_rows(arrays)


def _run_rows(call: KernelCall, arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    types = call.results([Aval(a.shape, t) for a, t in zip(arrays, _types(call), strict=True)])
    out = [np.empty(t.shape, t.dtype.numpy) for t in types]
    for row in itertools.product(*map(range, call.batch)):
        made = call.run([_row(a, row, i, call) for i, a in enumerate(arrays)])
        for whole, y in zip(out, made, strict=True):
            whole[row] = y
    return tuple(out)


def _types(call: KernelCall) -> tuple[NumericType, ...]:
    return (*call.types, as_type("uint32")) if call.drawn else call.types


def _row(a: np.ndarray, row: tuple[int, ...], position: int, call: KernelCall) -> np.ndarray:
    place: tuple[Any, ...] = tuple(i for i, b in zip(row, call.batched, strict=True)
                                   if b[position])
    return a[(*place, ...)]


def _batch(size: Any, batched: tuple, *xs: Tensor, call: KernelCall) -> tuple:
    """A launch for each row. What is written has the rows even where it came without."""
    full = [F.broadcast_to(x, (size, *x.shape)) if not b and n in call.written else x
            for x, b, n in itertools.zip_longest(xs, batched, call.names[:len(xs)])]
    flags = tuple(bool(b) or n in call.written
                  for b, n in itertools.zip_longest(batched, call.names))
    made = replace(call, batch=(size, *call.batch), batched=(flags, *call.batched))
    return apply(KERNEL, *full, call=made), True


def _meaning(*xs: Tensor, call: KernelCall) -> tuple[Tensor, ...]:
    """What the kernel computes, in ops that have derivatives."""
    avals = [aval_of(x) for x in xs]
    bound = call.bound(avals)
    work = call.kernel.specialised(bound, call.config)
    numbers = frozenset(n for n in call.names if isinstance(bound.types[n], Scalar))
    asked = scalars_in_grid(work.function, bound) | grid_names(call.kernel.grid)
    if call.drawn or call.config.groups is None and asked & numbers:
        raise underivable(call.kernel.__name__, current_line(), "it draws random numbers"
                          if call.drawn else "how many groups it has depends on data")
    made = with_loaded_numbers(with_given_results(work.function), numbers)
    operands = [held_in(n) if n in numbers else n for n in call.names]
    tensors = {o: F.expand_dims(x, -1) if n in numbers else x
               for o, n, x in zip(operands, call.names, xs, strict=True)}
    results = call.results(avals)
    for name, y in zip(call.returned, results, strict=False):
        tensors[name] = F.zeros((*call.batch, *(y.shape[len(call.batch):] or (1,))), y.type)
    if call.batch:
        has = {n: tuple(b[i] for b in call.batched) for i, n in enumerate(operands)}
        has |= dict.fromkeys((*call.returned, *call.written), (True,) * len(call.batch))
        made = with_batch_axes(made, len(call.batch), has, len(work.grid))
        bound.sizes.update((batch_extent(i), n) for i, n in enumerate(call.batch))
    work = replace(work, function=made, grid=(*call.batch, *work.grid))
    left = meaning(call.kernel.__name__, work, bound, tensors)
    return tuple(F.reshape(left[n], y.shape)
                 for n, y in zip((*call.returned, *call.written), results, strict=True))


def _axes(*avals: Aval, call: KernelCall) -> str:
    """Index letters: of each axis of the batch, and within a row those that the kernel states, else
    those that its body shows to be independent.

    What is launched by a grid that the call itself gives needs each row whole. A kernel that draws
    needs all of them: its numbers follow from the places of its groups.
    """
    rows, results = [*"αβγδεζηθ"][:len(call.batch)], call.results(avals)
    if call.drawn or len(rows) < len(call.batch):
        return ",".join("_" * a.ndim for a in avals) + "->" + ",".join(
            "_" * a.ndim for a in results)
    if call.config.groups is not None:
        one = ["_" * a.ndim for a in call.one(avals)]
        outs = ["_" * (a.ndim - len(rows)) for a in results]
    elif call.kernel.axes is None:
        one, outs = _shardable_letters(call, avals)
    else:
        one, outs = (side.split(",") for side in call.kernel.axes.split("->"))
    ins = [_letters(spec, i, rows, call) for i, spec in enumerate(one)]
    return ",".join(ins) + "->" + ",".join("".join(rows) + spec.strip() for spec in outs)


def _shardable_letters(call: KernelCall, avals: Sequence[Aval]) -> tuple[list[str], list[str]]:
    """The letters of a row's tensors, by the extents along which shards can be computed alone."""
    function = call.kernel.typed(call.bound(avals))
    letters = dict(zip(sorted(independent_extents(function)), string.ascii_letters, strict=False))
    found = {p.value.name: "".join(letters.get(str(d), "_") for d in p.type.dims)
             for p in function.params if isinstance(p.type, GlobalTensor)}
    one = [found.get(n, "_" * a.ndim) for n, a in zip(call.names, call.one(avals), strict=False)]
    outs = [found[n] for n in (*call.returned, *call.written)]
    return one, outs if function.result[0] != "scalar" else ["" for _ in outs]


def _letters(spec: str, position: int, rows: list[str], call: KernelCall) -> str:
    mine = [r for r, b in zip(rows, call.batched, strict=True) if b[position]]
    return "".join(mine) + spec.strip()


def _on_part(attrs: dict[str, Any], ins: Sequence[tuple], outs: Sequence[tuple]) -> dict[str, Any]:
    """The call of a rank that has some of the rows."""
    call = attrs["call"]
    return {"call": replace(call, batch=tuple(outs[0][:len(call.batch)]))} if outs else {}


def _samples() -> tuple[Sample, ...]:
    f32 = as_type("f32")
    call = KernelCall(softmax, Config(), ("x", "y"), (f32, f32), (("BM", 1),),
                      frozenset(("x", "y")), written=("y",))
    return (Sample((Arg((3, 20), "normal", False), Arg((3, 20), "normal", False)),
                   {"call": call}),)


IO, NONE = frozenset({"io"}), frozenset[str]()
KERNEL = GraphOp(
    "kernel",
    shape=_shape,
    ref=_run,
    derives=_meaning,
    batch=_batch,
    axes=_axes,
    local=_on_part,
    multi=True,
    smooth=False,
    samples=_samples(),
    also=lambda attrs: IO if attrs["call"].reports else NONE,  # it runs though nobody reads it
    doc="a tile kernel: what it returns, then what it writes",
)


# --- a call --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class KernelResults:
    """What a recorded call gave. new: the tensors that the kernel makes and returns; same: the
    parameters that it returns; written: what they stand for now, by parameter."""

    new: tuple[Tensor, ...]
    same: tuple[str, ...]
    written: dict[str, Tensor]

    @property
    def value(self) -> Any:
        """All of them: bare when it is one, else a tuple, what is new first."""
        every = [*self.new, *self.written.values()]
        return every[0] if len(every) == 1 else tuple(every)

    def with_value(self, value: Any) -> KernelResults:
        """These results as others compute them."""
        every = value if isinstance(value, tuple) else (value,)
        n = len(self.new)
        return KernelResults(every[:n], self.same, dict(zip(self.written, every[n:], strict=True)))


def record(kernel: Kernel, config: Config, arguments: dict[str, Any], explicit: frozenset[str],
           fresh: frozenset[str] = frozenset()) -> KernelResults:
    """A call of a kernel as a node. fresh: see KernelCall.

    Raises TraceError for extents that are not numbers and for what cannot be written.
    """
    tensors = {n: _operand(kernel, n, v) for n, v in arguments.items() if is_tensor(v)}
    others = tuple((n, v) for n, v in arguments.items() if n not in tensors)
    call = KernelCall(kernel, config, tuple(tensors), tuple(x.type for x in tensors.values()),
                      others, explicit, fresh)
    function, call = _completed(call, [aval_of(x) for x in tensors.values()])
    for name in call.written:
        _require_own(kernel, name, arguments[name])
    keys = [hooks.next_key.get()()] if call.drawn else []
    made = apply(KERNEL, *tensors.values(), *keys, call=call)
    n = len(call.returned)
    same = function.result[1:] if function.result[0] == "param" else ()
    return KernelResults(tuple(made[:n]), tuple(same),
                         dict(zip(call.written, made[n:], strict=True)))


def _completed(call: KernelCall, avals: list[Aval]) -> tuple[Function, KernelCall]:
    """The call with its results, and the Tile IR that they were read from."""
    function = call.kernel.typed(call.bound(avals))
    written = written_parameters(function)
    returned = tuple(p.value.name for p in function.params if p.role == "output")
    reports = any(isinstance(n, Op) and TILE_OPS[n.name].effect == "report"
                  for n in walk(function.body))
    return function, replace(call, returned=returned, drawn=draws(function), reports=reports,
                             written=tuple(n for n in call.names if n in written))


def is_tensor(x: Any) -> bool:
    """Whether an argument of a kernel is an array, of any library; one without axes is a number."""
    return isinstance(x, Tensor) or (isinstance(x, np.ndarray) and x.ndim > 0) or (
        not isinstance(x, np.ndarray | np.generic) and hasattr(x, "__dlpack__"))


def _operand(kernel: Kernel, name: str, x: Any) -> Tensor:
    made = as_tensor(x)
    policy = made.type.policy
    if made.scale is not None or policy.scaled or policy.per_channel is not None:
        raise DTypeError(f"{kernel.__name__}: argument {name} is {made.type}: kernels do not read "
                         "scaled types", where=user_line(),
                         hint="pass ts.dequantize(x), or codes and scale as two tensors")
    if any(isinstance(n, Dim) for n in made.shape):
        raise TraceError(f"{kernel.__name__}: argument {name} is {aval_of(made)}: a kernel needs "
                         "extents that are numbers", where=user_line(),
                         hint="call the function with arrays, or types whose extents are numbers")
    return made


def _require_own(kernel: Kernel, name: str, x: Any) -> None:
    """What a kernel writes under a trace is a value of that trace."""
    builder = current_builder()
    if builder is None or type(x) is Tracer and x.builder is builder:
        return
    what = f"a traced {aval_of(x)} of an enclosing function" if isinstance(x, Tracer) else \
        "a tensor from outside of the traced function"
    raise TraceError(f"{kernel.__name__} writes its argument {name}, which is {what}: a graph "
                     "cannot change it", where=user_line(),
                     hint="write into a value made inside, ts.zeros(...), and return it")


__all__ = ["KERNEL", "KernelCall", "KernelResults", "is_tensor", "record"]
