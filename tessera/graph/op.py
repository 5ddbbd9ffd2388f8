"""The op record: everything about one graph op in one place.

A record holds the shape rule, the NumPy meaning, both derivative rules, the batching rule, the
index letters that give its sharding, effects, the loop template used by fusion, and samples.
Tests, docs and benchmarks iterate over `OPS`. Rules are written in ops, so derivatives
differentiate again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from ..dims import Dim, show_shape
from ..errors import ArgumentError, NumericsError, TesseraError
from ..lazy_dataclass import dataclass
from ..numerics import DType, NumericType
from .element import Element
from .flops import Flops, none, per_operand


@dataclass(frozen=True, slots=True)
class Aval:
    """What is known of a value while tracing: its extents and its numeric type."""

    shape: tuple[int | Dim, ...]
    type: NumericType

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __str__(self) -> str:
        return f"{self.type}{show_shape(self.shape)}"


@dataclass(frozen=True)
class Arg:
    """One random argument of a sample: its shape and what its elements are drawn from."""

    shape: tuple[int, ...]
    draw: str = "normal"  # normal | positive | unit (-1, 1) | distinct | apart (from 0 and each
    # other) | sorted | index:N (0..N-1) | onto:N (those, each of them) | offsets:N (rising from 0
    # to N) | bool | int | key |
    # type:<dtype>; matrices: spd (symmetric positive definite, eigenvalues apart) |
    # wellconditioned (singular values near 1 and apart) | dominant (the diagonal)
    diff: bool = True  # whether derivative tests may vary it


@dataclass(frozen=True)
class Sample:
    """Arguments on which the registry tests exercise an op."""

    args: tuple[Arg, ...]
    attrs: dict[str, Any] = field(default_factory=dict)


def sample(*args: Any, **attrs: Any) -> Sample:
    """`sample((2, 3), ((3,), "positive"), axis=0)`: shapes, or (shape, draw) pairs, and attrs."""
    made = []
    for a in args:
        if isinstance(a, Arg):
            made.append(a)
        elif a and isinstance(a[0], tuple):
            draw = a[1]
            made.append(Arg(a[0], draw, diff=draw.split(":")[0] in DIFFERENTIABLE_DRAWS))
        else:
            made.append(Arg(tuple(a)))
    return Sample(tuple(made), attrs)


DIFFERENTIABLE_DRAWS = frozenset({
    "normal", "off_integers", "positive", "unit", "distinct", "apart", "spd", "wellconditioned",
    "dominant",
})


@dataclass(frozen=True, slots=True)
class ResultMemory:
    """Where the results of an op lie.

    fresh    in buffers of their own
    view     in the memory of one operand, where strides can say it; copied where they cannot
             flat: with the elements in the same order, as a reshape has them
    donated  in a buffer given as out=, which may be that of one operand: ref reads and writes it
             element by element. A plan gives it so when nothing reads the operand afterwards
    """

    kind: str = "fresh"
    operand: int = 0
    flat: bool = False


FRESH, VIEW, FLAT_VIEW = ResultMemory(), ResultMemory("view"), ResultMemory("view", flat=True)


@dataclass(frozen=True)
class Indexed:
    """Operand 1 of an op holds indices along attribute axis.

    reads: the result has those elements of operand 0; else those of operand 0 are added at these
    places of the result, whose extent is attribute extent
    along: the indices have the shape of the elements; else one stands for a whole slice
    """

    reads: bool
    along: bool = False


@dataclass(frozen=True)
class VendorLibrary:
    """A vendor's library that does an op on GPUs as a whole.

    run(module, *arrays, **attrs) -> array(s): module has NumPy's names and these arrays (NumPy on
    a host, CuPy on a GPU). Where there is no result it raises LinAlgError, or gives what ref does
    not: both are errors of the user's line. failure() -> what ref raises there, if that is known
    """

    name: str
    run: Callable[..., Any]
    failure: Callable[[], NumericsError] | None = None


ENGINES = -1  # where a number of NCCL's blocks stands: copy engines, and no multiprocessor


def by_engines(attrs: Mapping[str, Any]) -> bool:
    """Whether an op that sends, with these attributes, takes no multiprocessor."""
    return bool(attrs.get("blocks", 0) == ENGINES)


@dataclass(frozen=True)
class Exchange:
    """How an op sends between ranks from the memory of a GPU.

    launch(sources, targets, index, stream, **attrs) -> bool: each an address and bytes, row-major,
    on GPU `index`, behind what the stream has; False where ranks have no way between their GPUs.
    Then ref does it on the host, of copies
    route(**attrs): which way that is, "nccl" or "host", "" before it is known; sends nothing
    replayed(index, stream, where, **attrs): what is called each time a CUDA graph that has it was
    launched on a stream
    in_place: whether each result may be written where its operand lies
    joins: whether the op of several operands is what several of it are, each of some
    ahead(sources, targets, index, stream, **attrs): what is launched in front of it in the stream
    of the kernels; what runs beside them is over then where it meets what this one gets
    """

    launch: Callable[..., bool]
    route: Callable[..., str]
    replayed: Callable[..., Callable[[], None]]
    in_place: bool = False
    joins: bool = False
    ahead: Callable[..., None] | None = None


@dataclass(frozen=True)
class NoRule:
    """Why an op has no derivative in one mode, and what to use instead.

    `reason` may name attributes of the node: "the rule of {primal.name} ...".
    """

    reason: str
    hint: str


@dataclass(frozen=True, eq=False)
class GraphOp:
    """One operation of the Graph IR.

    shape(*avals, **attrs) -> Aval, or a tuple of them when `multi`
    ref(*arrays, **attrs)  -> array(s); the meaning of the op
    vjp(g, y, *xs, **attrs) -> cotangents per input, None where there is none; g and y are tuples
                              when `multi` and g may then hold None
    jvp(ts, y, *xs, **attrs) -> tangent(s) of the output; ts holds None for a zero tangent
    batch(size, batched, *xs, **attrs) -> (y, batched outputs): xs with `batched[i]` have a new axis
                              0; y is a value or tuple, the flag one bool for all outputs.
                              Without it `expand` is batched, where there is one
    spread  the batching rule where a key among the operands was drawn by the batched function
            itself: one draw for all rows, so that they draw apart. A result that is not batched
            is such a key again; an op of no operands that has the rule draws one. Without it, or
            where it gives None, the key becomes one for each row
    residual(*xs, **attrs) -> (y, saved): used instead of the op in a forward pass that will be
                              reversed; vjp then gets saved=
    push(ts, *xs, **attrs) -> (y, tangents): op and jvp in one pass, when given
    expand(*xs, **attrs) -> y in smaller ops, when given: what a compiled graph runs, and fuses.
                              The derivative rules above are those of the whole op; one that is
                              missing is that of the smaller ops
    expand_gpu(*xs, **attrs) -> y in ops that have kernels, in place of `expand`: of an op that one
                              call does on a CPU, or whose parts a GPU's loops write where they
                              belong
    derives(*xs, **attrs) -> y in ops that have derivatives, of an op that runs as it is: missing
                              rules are those of these ops
    vjp of an op that holds graphs also gets wanted=: per input, whether its cotangent is used
    no_vjp, no_jvp  in place of a rule that cannot be: what the GradError says
    unroll(*xs, **attrs) -> y of an op that holds graphs, without them: a loop of known length again
                              and again, both branches of a choice. Targets that have no loops of
                              their own take it
    repeats(**attrs) -> HostLoop, of an op that holds the body of a loop: how a host runs it
            (graph/host_loop.py), on targets that have no loops of their own, where `unroll` would
            be too much or cannot be
    splits(**attrs) -> the op's results with that of a loop's body apart which need not wait for
            what is carried, as a rule (*xs, **attrs) -> y; None where there is nothing
    axes    index letters "...mk,...kn->...mn": equal letters are equal extents; the sharding rule.
            A letter of operands alone is reduced, so its shards give partial results; one of the
            result alone is an extent that attributes give; "1" has extent 1; "_" is an axis that
            every shard needs whole, or gives whole
    reduces how partial results of shards combine where a letter is reduced: sum | max | min; ""
            when they cannot
    linear  "each": a sum passes through each operand alone (products); "joint": through all
            together (add, reshape); "first": through operand 0; "" when it does not
    drops   positions of the operands whose bad values (NaN, infinity) a finite result may hide by
            right: what it did not choose. drops_inf: those of which it may hide an infinity, whose
            exact limit is finite. Sentinels report what any other op hides
    shows   positions of operands, besides those of which it is linear, of which each element goes
            into a sum of products: what is bad of them shows in the result
    local(attrs, ins, outs) -> the attributes of one shard, from the shapes of its operands and
            results; without it they are those of the whole op
    loop    an elementwise op as an expression over {0}, {1}, ... and its attributes, in the
            functions of graph/cpu/vocabulary.py: compiled loops run it, kernels for GPUs and what
            they cost follow from it
    tile    the expression in the tile language where it follows from no loop: a text, or a rule
            (**attrs) -> text or None (see graph/cuda/kernels/spell.py for the names it may use)
    element  (*avals, **attrs) -> Element, how one element of the result follows from elements of
            the operands: of an op that moves elements, or adds them where they meet
    lines   of an op on whole lines along attribute axis (the last where it has none): the positions
            in their "order" and the first of them, "top"; the place of the "largest" or "smallest";
            where a value stands in it, "search"; or "running" sum, prod, largest, smallest (their
            places), logsumexp, recurrence
    reduction  how elements along attribute axis combine: sum | max | min | prod | any | all; "" of
            what is no reduction (with attributes axis and keepdims)
    makes   of an op that computes from attributes and keys alone, what: "number" (an infinity of it
            is deliberate) | "range" | "key" | "bits"
            | "bits_at", those of the indices that operand 0 holds
    converts  between numeric types, attributes source and to: what it loses is counted
    codes   its result stands for the values of operand 0, and has their cotangent, integers too
    indexed  which operand is indexed by which, of takes and sums at places
    meets   of an op that writes slices at places that operand 1 holds, what stays of those that go
            to one place: the "max" | "min" | "last"
    picks   it reads as many elements of operand 0 as it gives
    flops   its operations, a rule of graph/flops.py. Without: none of a view, those of `expand`,
            as many as elements of operand 0 of a reduction, else one for each element of a result
    matmul  its operations are those of matmuls, at the rate of the type of its operands
    library  what does the op on GPUs in place of kernels of ours
    exchange  how it sends between ranks from a GPU, of an op with the effect "collective"
    host    ref runs on the host wherever the operands lie, of copies: "now", before the call that
            it is part of returns, or "later", when that call is waited for, of what only raises
    beside  an element follows from elements of the operands that stand elsewhere, in memory
    hint    what to do about a NaN or an infinity that it made
    gradient_hint  and that its gradient made
    also    (attrs) -> effects of a node with these attributes, beside `effects`
    memory  where the results lie: a ResultMemory, or a rule(**attrs) -> ResultMemory. Who owns a
            buffer follows from it alone; graph/schedule/check_memory_plan.py proves it of every
            plan
    """

    name: str
    shape: Callable[..., Any]
    ref: Callable[..., Any]
    vjp: Callable[..., Any] | None = None
    jvp: Callable[..., Any] | None = None
    no_vjp: NoRule | None = None
    no_jvp: NoRule | None = None
    batch: Callable[..., Any] | None = None
    spread: Callable[..., Any] | None = None
    residual: Callable[..., Any] | None = None
    expand: Callable[..., Any] | None = None
    unroll: Callable[..., Any] | None = None
    repeats: Callable[..., Any] | None = None
    splits: Callable[..., Any] | None = None
    expand_gpu: Callable[..., Any] | None = None
    derives: Callable[..., Any] | None = None
    push: Callable[..., Any] | None = None
    axes: str | Callable[..., str] | None = None
    reduces: str = ""
    linear: str = ""
    drops: tuple[int, ...] = ()
    shows: tuple[int, ...] = ()
    drops_inf: tuple[int, ...] = ()
    local: Callable[..., dict[str, Any]] | None = None
    multi: bool = False
    effects: frozenset[str] = frozenset()
    also: Callable[[dict[str, Any]], frozenset[str]] | None = None
    loop: str | None = None
    tile: str | Callable[..., str | None] | None = None
    loop_kinds: tuple[str, ...] = ("float", "int", "uint", "bool")  # of operands, for which a loop
    # gives what ref gives: one that raises for some values of a kind is called for that kind
    smooth: bool = True  # second derivatives exist almost everywhere and are tested
    differentiable: bool = True  # False: integer or boolean results, derivatives are zero
    samples: tuple[Sample, ...] = ()
    doc: str = ""
    out: bool = False  # ref takes out=, a buffer to write into
    memory: ResultMemory | Callable[..., ResultMemory] = FRESH
    element: Callable[..., Element] | None = None
    lines: str = ""
    graph_attrs: tuple[str, ...] = ()  # attrs that hold graphs (scan, cond, ...)
    reduction: str = ""
    makes: str = ""
    converts: bool = False
    codes: bool = False
    indexed: Indexed | None = None
    meets: str = ""
    picks: bool = False
    flops: Flops | None = None
    matmul: bool = False
    library: VendorLibrary | None = None
    exchange: Exchange | None = None
    host: str = ""
    hint: str = ""
    gradient_hint: str = ""
    beside: bool = False

    @property
    def placed(self) -> bool:
        """Whether an element follows from where it stands in the whole, as random bits do."""
        return self.makes == "bits" or self.beside or (
            isinstance(self.tile, str) and "{index}" in self.tile)

    def __post_init__(self) -> None:
        if self.name in OPS:
            raise ArgumentError(f"an op named {self.name!r} is registered already")
        if (self.vjp and self.no_vjp) or (self.jvp and self.no_jvp):
            raise ArgumentError(f"op {self.name!r} has a rule and a reason why it has none")
        OPS[self.name] = self

    def may_drop(self, position: int, kind: str) -> bool:
        """Whether a finite result hides a "nan" or "inf" of an operand by right."""
        return position in self.drops or (kind == "inf" and position in self.drops_inf)

    def carries(self, position: int) -> bool:
        """Whether a bad value of an operand always shows in the result: sums and products of it."""
        linear = self.linear in ("each", "joint") or (self.linear == "first" and position == 0)
        return (linear or position in self.shows) and position not in self.drops + self.drops_inf

    def lies(self, attrs: dict[str, Any]) -> ResultMemory:
        """Where the results of one node lie."""
        return self.memory if isinstance(self.memory, ResultMemory) else self.memory(**attrs)

    @property
    def free(self) -> bool:
        """Whether its results are made where they are needed, and take no memory."""
        return self.makes in ("number", "range", "key")

    @property
    def operations(self) -> Flops | None:
        """The rule of its operations, where it is not that of `expand` or one for each element."""
        if self.flops is not None:
            return self.flops
        if self.view or self.free:
            return none
        return per_operand if self.reduction else None

    @property
    def view(self) -> bool:
        """Whether it is a view whatever its attributes are: it moves elements and computes none."""
        return isinstance(self.memory, ResultMemory) and self.memory.kind == "view"

    def __repr__(self) -> str:
        return f"GraphOp({self.name})"


OPS: dict[str, GraphOp] = {}


def infer(op: GraphOp, avals: tuple[Aval, ...], attrs: dict[str, Any]) -> tuple[Aval, ...]:
    """Output avals by the op's shape rule; its errors gain the op and every operand."""
    try:
        out = op.shape(*avals, **attrs)
    except TesseraError as err:
        name_operands(err, op.name, {f"operand {i}": a for i, a in enumerate(avals)})
        raise
    return out if op.multi else (out,)


def name_operands(err: TesseraError, op_name: str, operands: dict[str, Any]) -> None:
    """Put the op's name before the message and its operands below it, once (the innermost adds
    the operands; an enclosing public function replaces them by its own arguments)."""
    lines = [f"  {name}: {aval}" for name, aval in operands.items()]
    bare = getattr(err, "bare_message", err.message)
    err.bare_message = bare  # type: ignore[attr-defined]
    err.message = "\n".join([f"{op_name}: {bare}", *lines])
