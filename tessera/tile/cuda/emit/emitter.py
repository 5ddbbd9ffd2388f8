"""Writes the Numba-CUDA source of a function whose tiles have layouts.

One statement per op, with the user's line behind it. Values keep their names; a tile is a fragment
(a tuple of registers), a scalar a variable, a view nothing at all: its place is written where it
is read. What is needed once (intrinsics, thread numbers, strides) stands in front.
"""

from __future__ import annotations

import ast
import functools
import keyword
import pkgutil
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

from tessera.dims import Dim
from tessera.errors import SourceLine, UnsupportedTargetError
from tessera.lazy_dataclass import dataclass
from tessera.numerics import DType
from tessera.runtime.target import Target
from tessera.tile.cuda import intrinsics
from tessera.tile.cuda.emit.registry import AFTER, load_all
from tessera.tile.cuda.instruction import Kind
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.ir.ir import (
    Const,
    Def,
    For,
    Function,
    If,
    Names,
    Node,
    Op,
    Operand,
    SSAValue,
    While,
    defining_ops,
    definitions,
    uses,
)
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.register_layout import WARP_BITS, RegisterLayout
from tessera.tile.ir.types import GlobalTensor, Scalar, TileType, Type, is_lane
from tessera.tile.passes.integer_facts import Knowledge

INDENT = "    "
_FAMILIES = ", ".join(sorted(module.name for module in pkgutil.iter_modules(intrinsics.__path__)))
HEAD = f"""\
from tessera.tile.cuda import ptx, use
from tessera.tile.cuda.intrinsics import (
{textwrap.fill(_FAMILIES, 96, initial_indent="    ", subsequent_indent="    ")})
from tessera.tile.cuda.numba_gate import f32, f64, i32, i64
INF, NAN = float("inf"), float("nan")
"""


def bound_names(source: str) -> set[str]:
    """What a text binds at its top level."""
    made = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom):
            made |= {a.asname or a.name for a in node.names}
        elif isinstance(node, ast.Assign):
            made |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return made


BUILTINS = ("abs", "float", "int", "max", "min", "print", "range")
# Names that a value of the kernel may not have in the emitted text.
RESERVED = sorted({*bound_names(HEAD), *keyword.kwlist, *BUILTINS})


@dataclass(frozen=True)
class ArgumentFacts:
    """What holds for the arguments of this compilation.

    divisible: extents that are multiples of 16; eights: others that are of 8.  aligned: tensors
    that start at 16 bytes.
    shared: tensors that share memory with another, where one of the two is written.
    watched: tensors whose bad elements are counted, see emit/sentinels.py.  held: (line of the
    kernel, "any" or "nan"): values that are looked at beside a stored tile that is held alike.
    batched: one launch runs many calls: what differs between them is read from a table.
    """

    divisible: frozenset[str] = frozenset()
    aligned: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    watched: frozenset[str] = frozenset()
    held: frozenset[tuple[int, str]] = frozenset()
    batched: bool = False
    eights: frozenset[str] = frozenset()


IN_TABLE = ("tensor", "dim", "axis", "groups", "sentinels")  # parameters of each call of a batch


@dataclass(frozen=True)
class Parameter:
    """One launch parameter. kind: 'tensor' its pointer | 'dim' an extent, by its text | 'scalar' |
    'axis' the extent of the launch grid along `axis` | 'groups' the number of groups | 'claim',
    'report' of the error flags | 'count', 'lines' of printed lines |
    'kernel' the launch's number in reports | 'sentinels' the words of its sentinels |
    'seed' word `axis` of the key by which the launch draws | 'replays' where a captured launch
    finds the number of its replay, else 0 | 'map' a TMA descriptor of a tensor for `box`, which
    unfolds images where there are `windows` (Windows.copied) |
    of a batch 'table' of words, one for each call in every row: the call's first block, then its
    own parameters; 'calls', the call of each block; 'call_count', how many."""

    kind: str
    name: str
    abi: Kind
    axis: int = 0
    box: tuple[int, ...] = ()
    windows: tuple[tuple[int, ...], ...] = ()


@dataclass
class EmittedLine:
    text: str
    where: SourceLine | None = None


@dataclass(frozen=True)
class Emitted:
    """A source text and what it takes.

    matmul_forms: what computes its matmuls: wgmma | mma | threads, each at most once.
    dependent: it may start before the kernel in front of it in the stream ends.
    cluster: how many blocks are launched as one.
    """

    name: str
    source: str
    parameters: tuple[Parameter, ...]
    shared_bytes: int
    lines: dict[int, tuple[str, int]]
    notes: tuple[str, ...]
    sites: tuple = ()  # what may be reported: fields of runtime.flags.Site
    columns: tuple[Parameter, ...] = ()  # of a batch: what its table has of each call
    matmul_forms: tuple[str, ...] = ()
    dependent: bool = False  # begins before the kernel in front of it ends
    cluster: int = 1


class Emitter:
    """State of one emission. Families of ops use its methods; see tessera/tile/cuda/emit/*.py."""

    def __init__(self, function: Function, lanes: int, target: Target, facts: ArgumentFacts,
                 checked: bool = False, vector: int | None = None):
        load_all()
        self.function, self.lanes, self.target, self.facts = function, lanes, target, facts
        self.generation = target.generation
        self.checked, self.vector = checked, vector  # vector: of the schedule
        self.types: dict[SSAValue, Type] = definitions(function)
        self.made_by = defining_ops(function.body)
        self.known = Knowledge(function, facts.divisible, facts.eights)
        self.names = Names([*(v.name for v in self.types), *RESERVED, function.name])
        self.spelled = {v: self._spelling(v) for v in self.types}
        self.header: dict[str, str] = {}
        self.parameters: dict[tuple, Parameter] = {}
        self.columns: dict[tuple, Parameter] = {}  # read from the table of a batch
        self.top: list[EmittedLine] = []  # computed once, in front
        self.cached: dict[str, str] = {}
        self.lines: list[EmittedLine] = []
        self.depth, self.loops = 1, 0
        self.spans_stored = 0
        self.met = 0  # the line where all threads met last in this iteration; 0: they did not
        self.divergent = 0  # conditions around this op that differ between lanes
        self.shared_bytes, self.notes = 0, []  # type: ignore[var-annotated]
        self.dependent = False  # waits for the kernel in front of it
        self.cluster = 1  # groups that are launched as one
        self.last_first = False  # blocks that start first are the last groups
        self.grid: tuple[int, ...] = ()  # the groups along each axis, where all launches have these
        self.streams = False  # nobody finds in L2 what is stored
        self.matmul_forms: dict[str, None] = {}
        self.sites: list[tuple[SourceLine | None, str, str, tuple[str, ...]]] = []
        self.where: SourceLine | None = None
        self.memo: dict[str, object] = {}  # what a family found out about the function
        # of views and buffers; see emit/memory_operands.py
        self.places: dict[SSAValue, object] = {}
        self.wide_extents: set[str] = set()  # variables of extents that may not fit 32 bits
        self.pool: tuple[str, int] | None = None  # of exchanges; see emit/layout_conversion.py
        self._constants = dict(function.constants)

    def _spelling(self, v: SSAValue) -> str:
        return self.names.fresh(v.name).name if v.name in RESERVED else v.name

    # --- reading the IR -----------------------------------------------------------------------
    def type(self, x: Operand) -> Type:
        return Scalar(x.dtype) if isinstance(x, Const) else self.types[x]

    def layout(self, x: Operand) -> RegisterLayout:
        """The layout of a tile."""
        t = self.type(x)
        assert isinstance(t, TileType) and t.layout is not None, f"{x} has no layout"
        return RegisterLayout.parse(t.layout, t.shape)

    def dtype(self, x: Operand) -> DType:
        return self.type(x).dtype

    # --- spelling -----------------------------------------------------------------------------
    def name(self, x: Operand) -> str:
        """The expression of an operand."""
        return literal(x.value, x.dtype) if isinstance(x, Const) else self.spelled[x]

    def fresh(self, hint: str) -> str:
        return self.names.fresh(hint).name

    def use(self, name: str, expression: str) -> str:
        """Binds an intrinsic in the header; equal expressions are bound once."""
        if expression not in self.header:
            self.header[expression] = self.fresh(name)
        return self.header[expression]

    def line(self, text: str) -> None:
        self.lines.append(EmittedLine(INDENT * self.depth + text, self.where))

    def define(self, d: Def, expression: str) -> None:
        self.line(f"{self.spelled[d.value]} = {expression}")

    def once(self, hint: str, expression: str) -> str:
        """A variable computed at the top of the kernel, from parameters and thread numbers."""
        if expression not in self.cached:
            self.cached[expression] = self.fresh(hint)
            self.top.append(EmittedLine(f"{INDENT}{self.cached[expression]} = {expression}"))
        return self.cached[expression]

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """`head:` and what is emitted inside, one level further in."""
        self.line(f"{head}:")
        self.depth += 1
        count, met = len(self.lines), self.met
        self.met = 0 if head.startswith(("while", "for")) else met
        yield
        self.met = met
        if len(self.lines) == count:
            self.line("pass")
        self.depth -= 1

    def note(self, text: str) -> None:
        """Something decided, for inspect_ir('target')."""
        if text not in self.notes:
            self.notes.append(text)

    # --- parameters ---------------------------------------------------------------------------
    def param(self, kind: str, name: str, abi: Kind, axis: int = 0,
              box: tuple[int, ...] = (), windows: tuple[tuple[int, ...], ...] = ()) -> str:
        """A launch parameter, declared once; returns its variable."""
        key = (kind, name, axis, box, windows)
        if key not in self.parameters and key not in self.columns:
            plain = kind in ("tensor", "scalar") or (kind == "dim" and isinstance(
                self.types.get(SSAValue(name)), Scalar))  # an extent may have a tensor's name
            spelled = self.spelled[SSAValue(name)] if plain else self.fresh(
                {"map": f"map_{name}", "axis": f"groups_{axis}"}.get(kind, name))
            if not spelled.isidentifier():
                spelled = self.fresh("extent")
            made = Parameter(kind, name, abi, axis, box, windows)
            if self.facts.batched and kind in IN_TABLE:
                self.columns[key] = made
                word = self.word(len(self.columns), abi)
                self.top.append(EmittedLine(f"{INDENT}{spelled} = {word}"))
            else:
                self.parameters[key] = made
            self.cached[repr(key)] = spelled
        return self.cached[repr(key)]

    @property
    def block_number(self) -> str:
        return self.numbered_block("block")

    def numbered_block(self, hint: str) -> str:
        """The number of this block, from the last one on where these are to start first."""
        number = self.use("block_number", "use('ctaid_x')") + "()"
        if self.last_first:
            count = self.use("block_count", "use('nctaid_x')")
            number = f"i32({count}() - 1 - {number})"
        return self.once(hint, number)

    def word(self, row: int, abi: Kind) -> str:
        """A word of this block's call, in a row of the table of a batch."""
        number = self.use("load_number", "use(thread_elements.load('global', 'int32'))")
        calls, table = self.param("calls", "calls", "i64"), self.param("table", "table", "i64")
        call = self.once("call", f"{number}({calls} + i64({self.block_number}) * 4)")
        at = self.once("word", f"{table} + i64({call}) * 8")
        step = self.once("step", f"i64({self.param('call_count', 'call_count', 'i32')}) * 8")
        load = number if abi == "i32" else self.use(
            "load_word", "use(thread_elements.load('global', 'int64'))")
        return f"{load}({at}{f' + {step} * {row}' if row else ''})"

    def extent(self, dim: int | Dim | str) -> str | int:
        """An extent of a tensor: a number, or the variable of a launch parameter."""
        text = str(dim)
        if text.isdigit():
            return int(text)
        if text in self._constants:
            return int(self._constants[text])
        declared = self.types.get(SSAValue(text))
        wide = isinstance(declared, Scalar) and declared.dtype.bits == 64
        spelled = self.param("dim", text, "i64" if wide else "i32")
        if wide:
            self.wide_extents.add(spelled)
        return spelled

    # --- threads ------------------------------------------------------------------------------
    @property
    def thread(self) -> str:
        return self.once("thread", self.use("thread_number", "use('tid_x')") + "()")

    def index(self, layout: RegisterLayout, axis: int) -> str:
        """The thread part of the index along an axis."""
        parts = []
        for first, to, count in layout.terms(axis):
            mask = (1 << count) - 1
            text = f"({self.thread} >> {first} & {mask})" if first else f"({self.thread} & {mask})"
            parts.append(f"({text} << {to})" if to else text)
        if not parts:
            return "i32(0)"
        return self.once(f"at_{axis}", f"i32({' | '.join(parts)})")

    def owner(self, layout: RegisterLayout) -> str | None:
        """Whether this thread is the first of its replicas; None: there are none."""
        bits = sum(1 << i for i in layout.replicas)
        beyond = 1 << len(layout.threads)
        if beyond < self.lanes:
            bits |= sum(1 << i for i in range(len(layout.threads), (self.lanes - 1).bit_length()))
        if not bits:
            return None
        return self.once("first", f"i32(({self.thread} & {bits}) == 0)")

    @property
    def warp_bits(self) -> int:
        """How many of the lowest thread bits lanes may be exchanged by. 0 where the last warp is
        not whole: its threads would ask lanes that do not exist, so all goes through memory."""
        whole = self.lanes % (1 << WARP_BITS) == 0 or self.lanes & (self.lanes - 1) == 0
        return WARP_BITS if whole else 0

    def sync(self) -> None:
        """Barrier of the group."""
        self.line(self.use("sync", "use('sync_threads')") + "()")
        self.met = len(self.lines)

    def scratch(self, size: int, alignment: int = 16) -> str:
        """Shared bytes that only this op uses: their address. Inside a loop, put a `sync` before
        the first write as well, unless threads `met`: the iteration before may still be read."""
        self.shared_bytes = -(-self.shared_bytes // alignment) * alignment
        at = self.shared_bytes
        self.shared_bytes += -(-size // 4) * 4  # codes below a byte are written by whole words
        make = self.use("shared_at", f"use(shared_memory.address({at}))")
        return self.once("scratch", make + "()")

    # --- nodes --------------------------------------------------------------------------------
    def nodes(self, nodes: tuple[Node, ...]) -> None:
        for node in nodes:
            self.where = node.where or self.where
            if isinstance(node, Op):
                emit = OPS[node.name].cuda.get("emit")
                if emit is None:
                    raise UnsupportedTargetError(
                        f"ts.tile.{node.name} is not there on {self.target}", where=node.where)
                emit(self, node)
                for look in AFTER:
                    look(self, node)
            elif isinstance(node, If):
                self.branch(node)
            else:
                self.loop(node)

    def set(self, targets: tuple[Def, ...], values: tuple[Operand, ...]) -> None:
        """Assigns at once: a value may be another target."""
        pairs = [(self.spelled[d.value], self.assigned(d, x))
                 for d, x in zip(targets, values, strict=True)]
        pairs = [(a, b) for a, b in pairs if a != b]
        taken = {a for a, _ in pairs}
        if any(b in taken for _, b in pairs):
            self.line(f"{', '.join(a for a, _ in pairs)} = {', '.join(b for _, b in pairs)}")
            return
        for a, b in pairs:
            self.line(f"{a} = {b}")

    def assigned(self, d: Def, x: Operand) -> str:
        if isinstance(x, Const) and isinstance(d.type, TileType):
            raise AssertionError(f"{d} gets a number")
        return self.name(x)

    @functools.cached_property
    def readers(self) -> dict[SSAValue, int]:
        """How often each value is read."""
        return uses(self.function.body)

    @contextmanager
    def decided_by(self, *conditions: Operand) -> Iterator[None]:
        """What is emitted inside runs in some lanes only, where a condition differs by lane."""
        lanes = any(is_lane(self.type(c)) for c in conditions)
        self.divergent += lanes
        yield
        self.divergent -= lanes

    def loop(self, node: For | While) -> None:
        bounds = (node.lo, node.hi, node.step) if isinstance(node, For) else (node.cond,)
        with self.decided_by(*bounds):
            self._loop(node)

    def _loop(self, node: For | While) -> None:
        self.set(node.carried, node.inits)
        self.loops += 1
        if isinstance(node, For):
            var, kind = self.spelled[node.var.value], kind_of(node.var.type.dtype)
            self.line(f"{var} = {kind}({self.name(node.lo)})")
            down = isinstance(node.step, Const) and node.step.value < 0
            with self.block(f"while {var} {'>' if down else '<'} {self.name(node.hi)}"):
                self.nodes(node.body)
                self.set(node.carried, node.yields)
                self.line(f"{var} = {kind}({var} + {self.name(node.step)})")
        else:
            with self.block("while True"):
                self.nodes(node.test)
                self.line(f"if {self.name(node.cond)} == 0: break")
                self.nodes(node.body)
                self.set(node.carried, node.yields)
        self.loops -= 1

    def branch(self, node: If) -> None:
        with self.decided_by(node.cond):
            self._branch(node)

    def _branch(self, node: If) -> None:
        with self.block(f"if {self.name(node.cond)} != 0"):
            self.nodes(node.then)
            self.set(node.outs, node.thens)
        if node.orelse or node.outs:
            with self.block("else"):
                self.nodes(node.orelse)
                self.set(node.outs, node.elses)

    # --- the whole ----------------------------------------------------------------------------
    def declare(self) -> None:
        """Parameters of the function itself, in their order."""
        for p in self.function.params:
            if isinstance(p.type, GlobalTensor):
                self.param("tensor", p.value.name, "i64")
            elif p.role == "dim":
                self.param("dim", p.value.name, kind_of(p.type.dtype))
            else:
                self.param("scalar", p.value.name, kind_of(p.type.dtype))

    def finish(self) -> Emitted:
        """Head, thread numbers and body as one text."""
        params = [self.cached[repr(key)] for key in self.parameters]
        text = [f'"""{self.function.name}: {self.lanes} lanes for {self.target}."""',
                *HEAD.splitlines(),
                *(f"{name} = {expression}" for expression, name in self.header.items()), "", "",
                f"def {self.function.name}({', '.join(params)}):"]
        lines: dict[int, tuple[str, int]] = {}
        for line in (*self.top, *self.lines):
            mark = ""
            if line.where is not None:
                lines[len(text) + 1] = (line.where.file, line.where.line)
                mark = f"  # {line.where.line}: {line.where.text.strip()}"
            text.append(line.text + mark)
        if len(self.lines) + len(self.top) == 0:
            text.append(f"{INDENT}pass")
        return Emitted(self.function.name, "\n".join([*text, ""]), tuple(self.parameters.values()),
                       self.shared_bytes, lines, tuple(self.notes), tuple(self.sites),
                       tuple(self.columns.values()), tuple(self.matmul_forms), self.dependent,
                       self.cluster)


def literal(value: object, dtype: DType) -> str:
    """A constant of the register kind: i32(5), f32(0.5), f32(-inf)."""
    kind = kind_of(dtype)
    if kind[0] == "f":
        number = repr(float(value))  # type: ignore[arg-type]
        return f"{kind}({number.replace('inf', 'INF').replace('nan', 'NAN')})"
    bits = 64 if kind == "i64" else 32
    number = int(value)  # type: ignore[call-overload]
    if number >= 1 << (bits - 1):
        number -= 1 << bits
    return f"{kind}({number})"


def intrinsic(name: str, *args: object, **options: object) -> str:
    """The text that makes an intrinsic; options that are off are left out."""
    given = [*map(repr, args), *(f"{k}={v!r}" for k, v in options.items() if v)]
    return f"use({name}({', '.join(given)}))"


__all__ = ["IN_TABLE", "ArgumentFacts", "Emitted", "Emitter", "Parameter", "intrinsic", "kind_of",
           "literal"]
