"""One self-registering record per op of the tile language.

A record says everything about an op: its type rule, its meaning (a NumPy function on arrays whose
first axis is the groups, or a function of the interpreter for what touches memory, order or ids),
how a call in a kernel becomes IR, and samples for tests. `ts.tile.<name>` is the record itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import field
from typing import Any

import numpy as np

from tessera.errors import TraceError
from tessera.lazy_dataclass import dataclass

OPS: dict[str, TileOp] = {}
EFFECTS = ("pure", "read", "write", "atomic", "alloc", "async", "sync", "report")
LAYOUTS = ("", "same", "rows", "any", "reduced", "first")
ACCESSES = ("", "tile", "scattered", "element", "vector", "copy")
ASYNC_COPIES = ("", "issue", "commit", "wait")


@dataclass(frozen=True, eq=False)
class TileOp:
    """name       of the op in kernels, in the IR and in the generated source
    family     file it is declared in: the heading in the docs
    operands   names of the run-time arguments; attrs: of the compile-time ones
    defaults   of attrs (and of operands that may be left out: None)
    rule       (types of the arguments, attrs) -> type or tuple of types; raises RuleError
    numpy      the meaning of a pure op: (arrays, **attrs) -> array(s)
    run        the meaning of any other: (machine, op, arrays) -> array(s) or None
    lower      (tracer, *args, **kwargs) -> value, when a call is not simply one op
    effect     one of EFFECTS: what may not be removed, merged or moved over it
    group      all lanes of the group must arrive together
    total      gives a value for any operands and touches nothing else: may be computed where its
               result is not asked for
    public     whether kernels call it by name (ts.tile.name)
    eager      what a call outside of kernels does
    edges      (Carry) -> what the result's axes know of edges (ir/edges.py); None: cannot carry
    combines   (types, attrs) -> Alongs: axes along which elements of operands meet each other
    zero       what a zero does to the other operand: 'keeps' it (x + 0) or 'wins' (x * 0)
    moves      the result has the operand's elements in other places
    fills      operand 1 is what the place of operand 0 holds afterwards
    least      (least values of the operands, None: not known) -> the least value of the result
    samples    functions of a generator that give arguments, for tests and docs
    layouts    'same': its tile operands and its result have one layout, as in the family
               elementwise; 'rows': so, and warps have whole rows where there are many; 'any': it
               takes a tile in any layout; 'reduced': in any, and the result has what is left of
               it; 'first': so, and each thread has all of the result's last axis; '': a rule of
               its own in assign_layouts
    positions  the operand that is a tile of positions
    joined_by  of a reduction: the op that makes one of two partial results; "": none does
    neutral    of a reduction: the element that changes nothing; None: this is no reduction
    widens     of a reduction: computed in the compute type of its operand's
    access     what a read or write of memory moves: a 'tile' or 'scattered' elements of one, by the
               group; an 'element' or a 'vector' by each thread; a 'copy' between memories
    place      of an access: the operand that is the memory it reads or writes; of a copy, reads
    alias      the result is the memory of operand 0, seen in another way
    part       and a part of it, at coordinates that the other operands are
    async_copy of cp.async, whose copies become groups: it issues one, commits them or waits
    by_thread  says what each thread does: who writes it has chosen the group
    pointwise  an element of the result depends on that element of the operands alone; so are all
               of the family elementwise
    exact      in every format: the result has the type of operands that agree
    special    computed by the special function units, of which there are few
    multiplies a matmul of operands 0 and 1, tiles or shared memory, that is added to operand 2
    draws      op -> whether it draws by the key of the launch; None: never
    cuda       emission for the CUDA targets, filled by tile/cuda
    """

    name: str
    family: str
    doc: str
    operands: tuple[str, ...] = ()
    attrs: tuple[str, ...] = ()
    defaults: dict[str, Any] = field(default_factory=dict)
    rule: Callable | None = None
    numpy: Callable | None = None
    run: Callable | None = None
    lower: Callable | None = None
    effect: str = "pure"
    group: bool = False
    total: bool = False
    public: bool = True
    eager: Callable | None = None
    samples: tuple[Callable, ...] = ()
    edges: Callable | None = None
    combines: Callable | None = None
    zero: str = ""
    moves: bool = False
    fills: bool = False
    least: Callable | None = None
    multiplies: bool = False
    draws: Callable[[Any], bool] | None = None
    layouts: str = ""
    positions: int | None = None
    special: bool = False
    joined_by: str = ""
    neutral: float | None = None
    widens: bool = False
    access: str = ""
    place: int = 0
    alias: bool = False
    part: bool = False
    async_copy: str = ""
    by_thread: bool = False
    pointwise: bool = False
    exact: bool = False
    cuda: dict[str, Callable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name in OPS:
            raise ValueError(f"tile op {self.name!r} is declared twice")
        for field_, known in (("effect", EFFECTS), ("layouts", LAYOUTS), ("access", ACCESSES),
                              ("async_copy", ASYNC_COPIES)):
            if getattr(self, field_) not in known:
                raise ValueError(f"tile op {self.name!r}: {field_} {getattr(self, field_)!r} is "
                                 f"none of {known}")
        OPS[self.name] = self

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        return self.doc

    @property
    def signature(self) -> str:
        if self.lower is not None:
            _, *found = inspect.signature(self.lower).parameters.values()
            bare = inspect.Signature([p.replace(annotation=p.empty) for p in found])
            return f"{self.name}{bare}"
        parts = [n + (f"={self.defaults[n]}" if n in self.defaults else "")
                 for n in (*self.operands, *self.attrs)]
        return f"{self.name}({', '.join(parts)})"

    @property
    def reads(self) -> bool:
        """Whether it is an access that brings what memory holds."""
        return bool(self.access) and self.effect in ("read", "async")

    @property
    def writes(self) -> bool:
        """Whether it changes memory before the next op."""
        return self.effect in ("write", "atomic")

    def value_of(self, *numbers: float) -> Any:
        """An elementwise op on numbers that are known, by its meaning; None when it has none."""
        if self.family != "elementwise" or self.numpy is None or self.attrs:
            return None
        with np.errstate(all="ignore"):
            return self.numpy(*map(np.asarray, numbers)).item()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.eager is not None:
            return self.eager(*args, **kwargs)
        raise TraceError(
            f"ts.tile.{self.name} has a meaning only inside a @ts.kernel",
            hint="call it in the body of a kernel; on whole arrays use the op of ts, for example "
            "ts.matmul, ts.exp, ts.sum", code="E_OUTSIDE_KERNEL",
        )

    def __repr__(self) -> str:
        return f"ts.tile.{self.name}"


def declare(*, rule: Callable | None = None, attrs: tuple[str, ...] = (), name: str | None = None,
            run: bool = False, **facts: Any) -> Callable[[Callable], TileOp]:
    """Makes an op from its meaning: parameters are the operands, those in `attrs` compile-time.

    run: the function is `(machine, op, *operands)`, not a function of arrays only.
    facts: the other fields of TileOp, by name.
    """

    def make(meaning: Callable) -> TileOp:
        parameters = list(inspect.signature(meaning).parameters.values())[2 if run else 0:]
        return TileOp(
            name or meaning.__name__, meaning.__module__.rpartition(".")[2],
            inspect.getdoc(meaning) or "",
            tuple(p.name for p in parameters if p.name not in attrs), attrs,
            {p.name: p.default for p in parameters if p.default is not p.empty},
            rule, None if run else meaning, meaning if run else None, **facts)

    return make


def macro(*, name: str | None = None, eager: Callable | None = None, public: bool = True
          ) -> Callable:
    """A name of ts.tile that becomes other ops where it is called: (tracer, *args) -> value."""

    def make(lower: Callable) -> TileOp:
        return TileOp(name or lower.__name__.rstrip("_"), lower.__module__.rpartition(".")[2],
                      inspect.getdoc(lower) or "", lower=lower, eager=eager, public=public)

    return make
