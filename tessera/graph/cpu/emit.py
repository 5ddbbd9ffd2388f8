"""Writes the loops of a program as Python source for one pattern of inner strides.

The generated function handles every shape and stride: extents and strides are words of a table
(`layout.py`). Its form:

    while a chunk of rows can be claimed:             threads share the chunks, from both ends
        for each line of rows in the chunk:           a line: rows one leading stride apart
            for each row of the line:
                row values known from the start
                for j in columns: ...                 one loop per pass, see passes.py
                row values known after that pass
    the thread that ends the last chunk adds the chunks' column sums

A column sum has two arrays for each chunk: at most ROWS rows are added up in the first, in their
own type, which is then added to the second, in f64 (integers need the second alone).

A pattern has one character for each stream (inputs, iotas and random bits, full and column
outputs): '0' the value is constant along the row, '1' unit stride, 's' any stride.
"""

from __future__ import annotations

from dataclasses import field

from ...lazy_dataclass import dataclass
from ..schedule.loop_dtypes import register_of
from .interpret import identity
from .passes import LoopPasses, Pass, plan_passes
from .program import REDUCTIONS, LoopOp, LoopProgram
from .spell import cast, number, spell, strip

# Terms summed in their own type, one after another, before that sum is added in f64: columns of a
# row (several lanes take them in turns), rows of a column sum.
BLOCK, ROWS = 512, 128
HEADER = ("chunks", "chunk_rows", "rows", "width", "count", "line_rows", "rank", "keep_bytes")
CALL_WORDS = 4  # chunks taken, chunks done, finished, address of the partial column sums
RANDOM_SCOPE = 15
PLACELESS = ("column_sum", "count", "row_count")  # outputs that no row has a part of


@dataclass(frozen=True)
class Stream:
    """Something with strides over the iteration space: an array, or an index counted like one."""

    name: str
    kind: str  # 'input' | 'index' | 'full' | 'row' | 'column_sum' | 'count' | 'row_count'
    position: int  # of the input, op or output
    dtype: str


def streams(program: LoopProgram) -> tuple[Stream, ...]:
    """Inputs, then iota and random ops, then outputs: the order of patterns and stride tables."""
    first = len(program.inputs)
    out = [Stream(f"x{i}", "input", i, x.dtype) for i, x in enumerate(program.inputs)]
    out += [
        Stream(f"i{first + k}", "index", k, "int64")
        for k, op in enumerate(program.ops) if op.kind in ("iota", "random_bits")
    ]
    out += [Stream(f"y{i}", o.mode, i, o.dtype) for i, o in enumerate(program.outputs)]
    return tuple(out)


@dataclass
class LoopWriter:
    """Lines of source with an indentation depth."""

    lines: list[str] = field(default_factory=list)
    depth: int = 0

    def __call__(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)


def emit(program: LoopProgram, pattern: str) -> str:
    """The source of the function `loops(layout, call, scratch)`."""
    return _Emitter(program, pattern).source()


class _Emitter:
    """One program and pattern on their way to source."""

    def __init__(self, program: LoopProgram, pattern: str):
        self.program = program
        self.streams = streams(program)
        self.inner = dict(zip((s.name for s in self.streams), pattern, strict=True))
        self.first = len(program.inputs)
        iota_full = tuple(
            self.inner[s.name] != "0" for s in self.streams
            if s.kind == "index" and program.ops[s.position].kind == "iota"
        )
        full_inputs = tuple(self.inner[f"x{i}"] != "0" for i in range(self.first))
        self.plan: LoopPasses = plan_passes(program, full_inputs, iota_full)
        self.random = [
            self.first + k for k, op in enumerate(program.ops) if op.kind == "random_bits"
        ]
        self.columns = [s for s in self.streams if s.kind == "column_sum"]
        self.counts = [s for s in self.streams if s.kind in ("count", "row_count")]
        self.blocked_columns = [s for s in self.columns if self._partial(s) != "i64"]
        self.write = LoopWriter()

    # ---- the frame ----------------------------------------------------------------------------

    def source(self) -> str:
        w = self.write
        w("def loops(layout, call, scratch):")
        w.depth = 1
        w(f'"""Strides {"".join(self.inner.values())}:\n')
        w.lines += ["    " + line for line in str(self.program).splitlines()]
        w('"""')
        w("side = scratch & 1")
        w("scratch -= side")
        for i, s in enumerate(self.streams):
            if self.inner[s.name] == "s":
                w(f"{s.name}_col = column_stride(layout, {i})")
            if s.kind not in PLACELESS:
                w(f"{s.name}_row = row_stride(layout, {i})")
        for slot in range(len(self.plan.kept) + len(self.random)):
            w(f"keep{slot} = keep(layout, scratch, {slot})")
        w("while True:")
        w.depth = 2
        w("chunk = claim_unit(call, chunk_count(layout), side)")
        w("if chunk < 0:")
        w("    break")
        self._zero_columns()
        for s in self.counts:
            w(f"{s.name}_count = {number(0, 'i64')}")
        w("row = first_row(layout, chunk)")
        w("last = last_row(layout, chunk)")
        if self.blocked_columns:
            w(f"full = row + {ROWS}")
        w("while row < last:")
        w.depth = 3
        self._line()
        w.depth = 2
        self._move_columns()
        for s in self.counts:
            w(f"deposit({self._data(s)}, {s.name}_count)")
        self._finish()
        w.depth = 1
        w("await_word(call, 2, 1)")
        return "\n".join(w.lines) + "\n"

    def _data(self, s: Stream) -> str:
        """Where a stream starts. Read only by a thread that holds a chunk: later the arrays may be
        gone."""
        if s.kind == "index":
            return ""
        arrays = [other for other in self.streams if other.kind != "index"]
        return f"data(call, {CALL_WORDS + arrays.index(s)})"

    def _sums(self, chunk: str, k: int) -> str:
        """The second array of a chunk, in which column sum k ends."""
        return f"partial_sums(layout, call, {chunk}, {2 * k + 1}, {2 * len(self.columns)})"

    def _partial(self, s: Stream) -> str:
        """Register type a column sum is accumulated in."""
        register = self.program.registers[self.program.outputs[s.position].value]
        return register if register in ("f32", "f64") else "i64"

    def _total(self, s: Stream) -> str:
        return "i64" if self._partial(s) == "i64" else "f64"

    def _zero_columns(self) -> None:
        w = self.write
        if not self.columns:
            return
        for k, s in enumerate(self.columns):
            w(f"{s.name}_total = {self._sums('chunk', k)}")
            first = f"partial_sums(layout, call, chunk, {2 * k}, {2 * len(self.columns)})"
            w(f"{s.name}_part = {first if s in self.blocked_columns else f'{s.name}_total'}")
        w("for j in range(row_width(layout)):")
        for s in self.columns:
            kinds = {"part": self._partial(s), "total": self._total(s)}
            for what, kind in kinds.items() if s in self.blocked_columns else [("part", "i64")]:
                w(f"    store_{_memory(kind)}_partial({s.name}_{what}, j, {number(0, kind)})")

    def _move_columns(self) -> None:
        """What the first arrays hold is added to the second ones."""
        w = self.write
        if not self.blocked_columns:
            return
        w("for j in range(row_width(layout)):")
        for s in self.blocked_columns:
            kind = self._partial(s)
            here = f"load_f64_partial({s.name}_total, j)"
            item = cast(f"load_{kind}_partial({s.name}_part, j)", kind, "f64")
            w(f"    store_f64_partial({s.name}_total, j, {here} + {item})")
            w(f"    store_{kind}_partial({s.name}_part, j, {number(0, kind)})")

    def _line(self) -> None:
        """The rows of one line: their addresses, then the row loop."""
        w = self.write
        moving = [s for s in self.streams if s.kind not in PLACELESS]
        for s in moving:
            offset = f"row_offset(layout, {self.streams.index(s)}, row)"
            w(f"{s.name} = " + " + ".join(filter(None, [self._data(s), offset])))
        w("end = line_end(layout, row, last)")
        w("while row < end:")
        w.depth += 1
        self._row()
        for s in moving:
            w(f"{s.name} += {s.name}_row")
        w("row += 1")
        if self.blocked_columns:
            w("if row == full:")
            w.depth += 1
            w(f"full = row + {ROWS}")
            self._move_columns()
            w.depth -= 1
        w.depth -= 1

    def _finish(self) -> None:
        """The last thread adds the chunks' column sums in chunk order and says so."""
        w = self.write
        w("if claim(call, 1) == chunk_count(layout) - 1:")
        w.depth += 1
        for k, s in enumerate(self.columns):
            kind = self._total(s)
            memory = _memory(kind)
            out = self.program.outputs[s.position]
            w(f"total = {self._sums('0', k)}")
            w("for other in range(1, chunk_count(layout)):")
            w(f"    part = {self._sums('other', k)}")
            w("    for j in range(row_width(layout)):")
            w(f"        here = load_{memory}_partial(total, j)")
            w(f"        there = load_{memory}_partial(part, j)")
            w(f"        store_{memory}_partial(total, j, {_add(kind, 'here', 'there')})")
            w(f"{s.name} = {self._data(s)}")
            w("for j in range(row_width(layout)):")
            sum_text = cast(f"load_{memory}_partial(total, j)", kind, register_of(out.dtype))
            w(f"    store_{out.dtype}_out{s.position}({s.name}, {self._at(s)}, {sum_text})")
        w("claim(call, 2)")
        w.depth -= 1

    # ---- one row --------------------------------------------------------------------------------

    def _row(self) -> None:
        w = self.write
        w("cols = columns_of(layout, row)")
        for v in self.plan.rows_before:
            self._row_value(v)
        for k, v in enumerate(self.random):
            op = self._op(v)
            slot = len(self.plan.kept) + k
            w(f"philox_row(keep{slot}, i{v}, cols, v{op.args[0]}, v{op.args[1]})")
        for step in self.plan.passes:
            self._pass(step)
        for s in self.streams:
            if s.kind == "row":
                self._store(s, f"{s.name}", "0")
            if s.kind == "row_count":
                self._add_count(s, "i64", f"{s.name}_count")

    def _op(self, v: int) -> LoopOp:
        return self.program.ops[v - self.first]

    def _row_value(self, v: int) -> None:
        """A value that is constant along the row; reductions are bound by their pass."""
        if v < self.first:
            self.write(f"v{v} = load_{self.program.inputs[v].dtype}(x{v}, 0)")
        elif self._op(v).kind not in REDUCTIONS:
            self.write(f"v{v} = {self._compute(v, '0')}")

    def _compute(self, v: int, column: str) -> str:
        op = self._op(v)
        registers = self.program.registers
        names = tuple(f"v{a}" for a in op.args)
        match op.kind:
            case "map":
                return strip(spell(op.expr, names, tuple(registers[a] for a in op.args), op.dtype))
            case "const":
                return number(op.value, op.dtype)
            case "round":
                return f"round_{op.dtype}({cast(names[0], registers[op.args[0]], 'f32')})"
            case "random_bits":
                slot = len(self.plan.kept) + self.random.index(v)
                return f"load_uint32_keep{RANDOM_SCOPE}(keep{slot}, (i{v} & 3) + {column})"
        name = f"i{v}"
        step = {"0": "", "1": f" + {column}", "s": f" + {column} * {name}_col"}[self.inner[name]]
        return cast(name + step, "i64", op.dtype)

    def _at(self, s: Stream) -> str:
        """The element index of column j in a stream."""
        return f"j * {s.name}_col" if self.inner[s.name] == "s" else "j"

    def _pass(self, step: Pass) -> None:
        w = self.write
        if not step.reductions and not step.outputs:
            self._after(step)
            return
        w(f"# pass {step.level}")
        counts = [s for s in self.counts if s.position in step.outputs]
        for s in counts:
            w(f"{s.name}_here = {number(0, 'i32')}")
        blocked = [v for v in step.reductions if self._blocked(v)]
        for v in step.reductions:
            kind, dtype = self._op(v).kind, self._op(v).dtype
            w(f"t{v} = {'0.0' if v in blocked else number(identity(kind, dtype), dtype)}")
        if blocked:
            w(f"for start in range(0, cols, {BLOCK}):")
            w.depth += 1
            w(f"stop = where_i64(start + {BLOCK} < cols, start + {BLOCK}, cols)")
            for v in blocked:
                w(f"s{v} = f32(0.0)")
            w("for j in range(start, stop):")
        else:
            w("for j in range(cols):")
        w.depth += 1
        self._columns(step, blocked)
        w.depth -= 1
        if blocked:
            for v in blocked:
                w(f"t{v} += f64_from_f32(s{v})")
            w.depth -= 1
        for s in counts:
            w(f"{s.name}_count += i64_from_i32({s.name}_here)")
        self._after(step)

    def _blocked(self, v: int) -> bool:
        return self._op(v).kind == "reduce_sum" and self._op(v).dtype == "f32"

    def _columns(self, step: Pass, blocked: list[int]) -> None:
        w = self.write
        for v, how in step.steps:
            w(f"v{v} = {self._load(v) if how == 'load' else self._compute(v, 'j')}")
            if v in step.keeps:
                slot = self.plan.kept[v]
                w(f"store_{_memory(self.program.registers[v])}_keep{slot}(keep{slot}, j, v{v})")
        for v in step.reductions:
            op = self._op(v)
            total = f"s{v}" if v in blocked else f"t{v}"
            item = cast(f"v{op.args[0]}", self.program.registers[op.args[0]], op.dtype)
            verb = {"reduce_sum": "accumulate", "reduce_max": "maximum"}.get(op.kind, "minimum")
            w(f"{total} = {verb}_{op.dtype}({total}, {item})")
        for i in step.outputs:
            s = next(s for s in self.streams if s.name == f"y{i}")
            if s.kind == "full":
                self._store(s, s.name, self._at(s))
            elif s.kind == "count":
                self._add_count(s, "i32", f"{s.name}_here")
            else:
                self._add_column(s)

    def _load(self, v: int) -> str:
        if v >= self.first:
            slot = self.plan.kept[v]
            return f"load_{_memory(self.program.registers[v])}_keep{slot}(keep{slot}, j)"
        s = self.streams[v]
        return f"load_{s.dtype}(x{v}, {self._at(s)})"

    def _store(self, s: Stream, base: str, at: str) -> None:
        out = self.program.outputs[s.position]
        value = cast(f"v{out.value}", self.program.registers[out.value], register_of(out.dtype))
        self.write(f"store_{out.dtype}_out{s.position}({base}, {at}, {value})")

    def _add_column(self, s: Stream) -> None:
        kind, value = self._partial(s), self.program.outputs[s.position].value
        memory = _memory(kind)
        item = cast(f"v{value}", self.program.registers[value], kind)
        here = f"load_{memory}_partial({s.name}_part, j)"
        self.write(f"store_{memory}_partial({s.name}_part, j, {_add(kind, here, item)})")

    def _add_count(self, s: Stream, kind: str, total: str) -> None:
        value = self.program.outputs[s.position].value
        self.write(f"{total} = accumulate_{kind}({total}, {cast(f'v{value}', 'bool_', kind)})")

    def _after(self, step: Pass) -> None:
        """Bind the reductions of a pass, then the row values that follow from them."""
        for v in step.reductions:
            self.write(f"v{v} = f32_from_f64(t{v})" if self._blocked(v) else f"v{v} = t{v}")
        for v in step.rows_after:
            self._row_value(v)


def _memory(register: str) -> str:
    """The memory type that holds a register unchanged."""
    return {"i64": "int64", "i32": "int32", "u32": "uint32"}.get(register, register)


def _add(kind: str, a: str, b: str) -> str:
    return f"add_i64({a}, {b})" if kind == "i64" else f"{a} + {b}"
