"""Builds Tile IR: emits typed ops, promotes, folds constants."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from tessera.numerics import DType, bool_, f32, i32, i64, uint64
from tessera.numerics.policy import saturates_itself
from tessera.tile.builder.edge_facts import EdgeFacts
from tessera.tile.builder.edge_masks import within
from tessera.tile.builder.rules import compute_dtype, integers, logical, promote, shifted
from tessera.tile.builder.source_position import SourcePosition
from tessera.tile.builder.value_table import ValueTable
from tessera.tile.ir.affine import Form
from tessera.tile.ir.edges import Edge
from tessera.tile.ir.errors import RuleError
from tessera.tile.ir.handles import (
    Handle,
    NeedConstants,
    TensorRow,
    Traced,
    Undefined,
    describe,
    is_number,
)
from tessera.tile.ir.ir import Const, Def, Names, Node, Op, Operand, SSAValue
from tessera.tile.ir.numpy_values import rounded
from tessera.tile.ir.op_record import OPS, TileOp
from tessera.tile.ir.types import PEER, Buffer, GlobalTensor, Scalar, TileType, Type, View

FOLD: dict[str, Callable] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "floordiv": operator.floordiv, "mod": operator.mod, "pow": operator.pow, "lt": operator.lt,
    "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
    "bitand": operator.and_, "bitor": operator.or_, "bitxor": operator.xor, "shl": operator.lshift,
    "shr": operator.rshift, "neg": operator.neg, "bitnot": operator.invert, "not": operator.not_,
    "maximum": max, "minimum": min, "abs": abs,
}
SIGN = {"neg", "abs"}  # of integers they take a bit more: -x of a uint8, abs(x) of an int8
UNIT = {"add": 0, "sub": 0, "mul": 1, "floordiv": 1}  # x op unit is x, of integers


class IRBuilder:
    """Builds the nodes of the block that is being traced."""

    def __init__(self, values: ValueTable, facts: EdgeFacts, position: SourcePosition):
        self.values, self.facts, self.position = values, facts, position
        self.names = Names()
        self.block: list[Node] = []
        self.divergent = 0  # depth of control that depends on the lane

    def fail(self, message: str, hint: str | None = None, **kw: Any) -> NoReturn:
        self.position.fail(message, hint, **kw)

    # --- ops ----------------------------------------------------------------------------------
    def emit(self, name: str, args: Sequence[Any], hint: str = "t", **attrs: Any) -> Any:
        """Appends an op; its result as a Handle (None, or a tuple of several)."""
        record = OPS[name]
        given = tuple(self.operand(a) for a in args)
        types = [self.type_of(a) for a in args]
        if record.group and self.divergent:
            self.fail(f"{name} needs the whole group, but only some lanes come here: the branch or "
                      "loop around it depends on the lane",
                      "move it out, or make the condition the same for all lanes",
                      code="E_DIVERGENCE")
        self._require_boxes(record, given)
        self._require_own(record, types)
        assert record.rule is not None
        try:
            made = record.rule(types, attrs)
        except RuleError as err:
            self.fail(err.message, err.hint)
        facts = [self.facts.of(a) for a in args]
        if record.combines is not None and any(f.axes for f in facts):  # known to be right by now
            args = within(self, record, list(args), attrs)
            given = tuple(self.operand(a) for a in args)
            types = [self.type_of(a) for a in args]
        kinds: tuple[Type, ...] = made if isinstance(made, tuple) else (made,)
        if self.divergent and record.effect == "atomic":  # each lane that comes here updates
            kinds = tuple(replace(k, uniform=False) if isinstance(k, Scalar) else k for k in kinds)
        outs = tuple(Def(self.names.fresh(hint), k) for k in kinds)
        op = Op(name, given, outs, tuple(sorted(attrs.items())), self.position.where())
        self.block.append(op)
        for d in outs:
            self.values.defined_by[d.value] = op
        if outs and isinstance(kinds[0], Scalar) and kinds[0].dtype.kind in ("int", "uint"):
            self.values.forms.note(name, outs[0].value, given)
        self.facts.carry(record, op, types, facts)
        handles = tuple(Handle(d.value, d.type) for d in outs)
        return handles[0] if len(handles) == 1 else (handles or None)

    def _require_boxes(self, record: TileOp, given: tuple[Operand, ...]) -> None:
        """Views of unfolded images are no boxes: whole tiles of them are loaded, and stored where
        no pixel is in two windows."""
        for x in given:
            made = self.values.defined_by.get(x) if isinstance(x, SSAValue) else None
            if made is None or made.name != "windows":
                continue
            if record.access != "tile" or record.effect not in ("read", "write"):
                self.fail(f"{record.name} of windows of images",
                          "load them: ts.tile.load(ts.tile.windows(...))")
            reach = zip(*(made.attr[n] for n in ("window", "dilation", "stride")), strict=True)
            if record.effect == "write" and any(d * (k - 1) >= s for k, d, s in reach):
                self.fail("a store to windows that overlap: elements of one tile would meet",
                          "windows of at most their stride")

    def _require_own(self, record: TileOp, types: Sequence[Type]) -> None:
        """Of another group's shared memory elements are written, and nothing is read."""
        if any(isinstance(t, Buffer) and t.space == PEER for t in types) and (
                record.access != "element" or record.effect != "write"):
            self.fail(f"{record.name} of another group's shared memory, of which elements are "
                      "written and nothing is read",
                      "let it write to yours, then ts.tile.cluster_barrier(...)")

    def last(self) -> Any:
        """What was emitted last here."""
        return self.block[-1] if self.block else None

    def named(self, value: Any, name: str, before: Any = None) -> Any:
        """A fresh value gets the user's name.

        before: last(), before the value's expression was evaluated: an older value may be known
        elsewhere by the name that it has, as an element of a list or another function's argument
        """
        last = self.last()
        if last is before or not isinstance(value, Handle) or not isinstance(last, Op) or (
                len(last.outs) != 1):
            return value
        made = last.outs[0]
        if made.value != value.value or not made.value.name.startswith("t"):
            return value
        if made.value.name.rstrip("0123456789") not in ("t", "t_") or name.startswith("__"):
            return value
        self.names.taken.discard(made.value.name)
        self.names.next["t"] = max(0, self.names.next.get("t", 0) - 1)
        new = self.names.fresh(name)
        op = replace(last, outs=(Def(new, made.type),))
        self.block[-1] = op
        self.values.defined_by[new] = op
        self.facts.renamed(made.value, new)
        if made.value in self.values.forms.of:
            self.values.forms.of[new] = self.values.forms.of.pop(made.value)
        if made.value in self.values.forms.below:
            self.values.forms.below[new] = self.values.forms.below.pop(made.value)
        return replace(value, value=new)

    def operand(self, x: Any) -> Operand:
        if isinstance(x, Handle):
            return x.value
        if isinstance(x, Const):
            return x
        if is_number(x):
            made = self.literal(x)
            return replace(made, value=self.position.told(made.value, made.dtype))
        if isinstance(x, Undefined):
            self.fail(x.why)
        self.fail(f"{describe(x)} is no value that an op can take")

    def literal(self, x: Any, dtype: DType | None = None) -> Const:
        """A Python number as a constant; in its own default type unless given."""
        if dtype is None:
            if isinstance(x, bool):
                dtype = bool_
            elif isinstance(x, int):
                dtype = i32 if -(2**31) <= x < 2**31 else i64
            else:
                dtype = f32
        if dtype.kind in ("int", "uint"):
            if isinstance(x, float):
                self.fail(f"the float {x!r} where {dtype} is needed", f"write int({x!r})")
            if not dtype.min <= x <= dtype.max:
                self.fail(f"{x} does not fit into {dtype} ({dtype.min} .. {dtype.max})",
                          "cast the other operand to a wider type: ts.tile.cast(x, ts."
                          f"{'u32' if 0 <= x < 2**32 and dtype.bits == 32 else 'i64'})")
        return Const(bool(x) if dtype.kind == "bool" else x, dtype)

    def type_of(self, x: Any) -> Type:
        if isinstance(x, Handle):
            return x.type
        const = x if isinstance(x, Const) else self.literal(x)
        return Scalar(const.dtype)

    # --- arithmetic ---------------------------------------------------------------------------
    def arithmetic(self, name: str, xs: Sequence[Any], hint: str = "t") -> Any:
        """An elementwise op on numbers, scalars and tiles, after promotion; constants fold."""
        if not any(isinstance(x, Handle | TensorRow | Undefined) for x in xs):
            return self.fold(name, xs)
        xs = [self.value_of(x) for x in xs]
        xs = self.align(xs)
        if OPS[name].rule is logical:
            return self.emit(name, [self.truth(x) for x in xs], hint)
        if name == "div" and self.promoted(xs, name).kind != "float":
            xs = [self.cast(x, f32) if isinstance(x, Handle) else float(x) for x in xs]
        if name in UNIT and isinstance(xs[0], Handle) and xs[1] == UNIT[name] and (
                xs[0].type.dtype.kind in ("int", "uint") and isinstance(xs[1], int)):
            return xs[0]
        if name in ("add", "mul") and isinstance(xs[1], Handle) and xs[0] == UNIT[name] and (
                xs[1].type.dtype.kind in ("int", "uint") and isinstance(xs[0], int)):
            return xs[1]
        first = 1 if name == "where" else 0
        dtype = self.promoted(xs[first:], name)
        if OPS[name].rule is shifted and all(isinstance(x, Handle) and (
                x.type.dtype.kind != "float") for x in xs):
            return self.emit(name, self._shift(*xs), hint)
        if OPS[name].rule in (integers, shifted):
            self._require_bits(xs)
        same = [self.to(x, dtype) for x in xs[first:]]
        return self.emit(name, [*xs[:first], *same], hint)

    def _shift(self, x: Handle, by: Handle) -> list[Handle]:
        """What is shifted keeps its type: uint32 << int32 is uint32. A number of bits below 0 stays
        outside of 0..bits - 1 as an unsigned number of the same bits."""
        dtype = compute_dtype(x.type.dtype)
        if dtype.kind == "uint" and by.type.dtype.kind == "int":
            by = self.cast(by, i64 if dtype.bits == 64 else i32)
            by = self.emit("with_bits", [by], self.hint(by), dtype=dtype)
        return [self.cast(x, dtype), self.cast(by, dtype)]

    def _require_bits(self, xs: Sequence[Any]) -> None:
        """uint64 beside a signed number would go through int64, and lose what that does not
        hold."""
        dtypes = {x.type.dtype for x in xs if isinstance(x, Handle)}
        signed = [d for d in dtypes if d.kind == "int"]
        if uint64 in dtypes and signed:
            self.fail(f"bits of uint64 and {signed[0]}: no integer type holds both",
                      "cast the signed one: ts.tile.cast(x, ts.uint64)")

    def fold(self, name: str, xs: Sequence[Any]) -> Any:
        if name == "and":
            return xs[0] and xs[1]
        if name == "or":
            return xs[0] or xs[1]
        if name == "where":
            return xs[1] if xs[0] else xs[2]
        try:
            return FOLD[name](*xs)
        except (TypeError, ValueError, ArithmeticError, KeyError) as err:
            self.fail(f"{' and '.join(map(describe, xs))}: {err}",
                      "these are compile-time values, computed as Python does")

    def call_python(self, f: Any, *args: Any) -> Any:
        """A Python function of compile-time values."""
        try:
            return f(*args)
        except (TypeError, ValueError, ArithmeticError) as err:
            self.fail(f"{getattr(f, '__name__', f)}: {err}")

    def value_of(self, x: Any) -> Any:
        """x as something arithmetic takes; an error that says how to get it."""
        if isinstance(x, Undefined):
            self.fail(x.why)
        if isinstance(x, TensorRow) or (isinstance(x, Handle)
                                        and isinstance(x.type, GlobalTensor | Buffer | View)):
            self.fail(f"{describe(x)} is a place in memory, not a value",
                      "load it: ts.tile.load(...), or index one element; there are no pointers, "
                      "x[i] has the elements at a tile of positions i")
        if isinstance(x, Handle) or is_number(x):
            return x
        self.fail(f"{describe(x)} cannot be computed with at run time",
                  "arrays are arguments of the kernel, and so is this one: w: ts.Tensor[...], then "
                  "ts.tile.load(w[0:64])" if hasattr(x, "__array__") or hasattr(x, "__dlpack__")
                  else "numbers, scalars and tiles can")

    def truth(self, x: Any) -> Any:
        """Whether a number, or each element of a tile, is not 0."""
        if not isinstance(x, Traced):
            return bool(x)
        x = self.value_of(x)
        return x if x.type.dtype is bool_ else self.arithmetic("ne", [x, 0])

    def decided(self, x: Any, said: str, hint: str | None = None) -> Any:
        """The truth of what control depends on: a bool, or a scalar. A tile has no one truth."""
        if isinstance(x, Handle) and isinstance(x.type, TileType):
            self.fail(f"{said} on {describe(x)}: its elements may differ", hint)
        return self.truth(x)

    def align(self, xs: Sequence[Any]) -> list[Any]:
        """A rank-1 tile beside a rank-2 tile is a row statistic: it becomes a column."""
        shapes = [x.type.shape if isinstance(x, Handle) and isinstance(x.type, TileType) else ()
                  for x in xs]
        if max(map(len, shapes), default=0) != 2:
            return list(xs)
        self._require_rows(xs, shapes)
        return [self._column(x, xs, shapes) if len(shape) == 1 else x
                for x, shape in zip(xs, shapes, strict=True)]

    def _column(self, x: Handle, xs: Sequence[Any], shapes: Sequence[tuple]) -> Handle:
        """x as a column. Where the box is square its shape does not show that it lies along the
        columns' elements, not the rows': that is refused."""
        if self._lies_along(x, 0, 1, xs, shapes):
            self.fail(f"{describe(x)} lies along the columns' elements of the square tile "
                      "beside it, and would be spread along its rows'",
                      "a tile of rank 1 is a column: write w[None, :] for a row")
        return self.expand(x, 1)

    def _require_rows(self, xs: Sequence[Any], shapes: Sequence[tuple]) -> None:
        """The same of rows: t - row_mean(t)[None, :] of a square tile."""
        for x, shape in zip(xs, shapes, strict=True):
            if len(shape) == 2 and shape[0] == 1 and self._lies_along(x, 1, 0, xs, shapes):
                self.fail(f"{describe(x)} lies along the rows' elements of the square tile beside "
                          "it, and would be spread along its columns'",
                          "a tile of rank 1 is a column already: leave the [None, :] out")

    def _lies_along(self, x: Handle, at: int, other: int, xs: Sequence[Any],
                    shapes: Sequence[tuple]) -> bool:
        """Whether axis `at` of x goes over the elements that axis `other` of a square tile beside
        it has, and the tile's other axis has not."""
        own = self.facts.of(x).at(at)
        for y, shape in zip(xs, shapes, strict=True):
            if len(shape) != 2 or shape[0] != shape[1] or shape[0] == 1:
                continue
            same, across = (self.facts.of(y).at(i) for i in (other, 1 - other))
            if all(isinstance(e, Edge) and e.placed for e in (own, same, across)) and (
                    own.key == same.key != across.key):  # type: ignore[union-attr]
                return True
        return False

    def expand(self, x: Handle, axis: int) -> Handle:
        return self.emit("expand_dims", [x], axis=axis)

    def promoted(self, xs: Sequence[Any], name: str) -> DType:
        """The type of the computation; literals adapt to the others."""
        dtypes = [x.type.dtype for x in xs if isinstance(x, Handle)]
        literals = [x for x in xs if not isinstance(x, Handle)]
        if any(isinstance(x, float) for x in literals) and all(d.kind != "float" for d in dtypes):
            dtypes.append(f32)
        if not dtypes:
            return self.literal(literals[0]).dtype
        kept = OPS[name].exact and (name not in SIGN or dtypes[0].kind in ("float", "bool"))
        if kept and len(set(dtypes)) == 1 and (dtypes[0].kind != "bool" or not literals):
            if all(self.fits(x, dtypes[0]) for x in literals):
                return dtypes[0]
        return promote(dtypes)

    @staticmethod
    def fits(x: Any, dtype: DType) -> bool:
        """Whether a literal is a value of a narrow type, so that comparing needs no wider one."""
        if dtype.kind in ("int", "uint"):
            return isinstance(x, int) and dtype.min <= x <= dtype.max
        return dtype.bits >= 32 or x in (0, float("inf"), -float("inf"))

    def to(self, x: Any, dtype: DType) -> Any:
        if isinstance(x, Handle):
            return self.cast(x, dtype)
        if dtype.kind == "float":
            x = self.position.told(x, dtype)
            return Const(float(x) if dtype.bits >= 32 else rounded(x, dtype), dtype)
        if dtype.kind == "bool":
            return Const(bool(x), dtype)
        return self.literal(int(x) if isinstance(x, bool) else x, dtype)

    def cast(self, x: Handle, dtype: DType, **policy: Any) -> Handle:
        saturate = bool(policy.get("saturate", False))
        if x.type.dtype is dtype and not saturates_itself(dtype, saturate):
            return x
        return self.emit("convert", [x], self.hint(x), dtype=dtype, **policy)

    @staticmethod
    def hint(x: Any) -> str:
        return x.value.name if isinstance(x, Handle) else "t"

    def is_uniform(self, x: Any) -> bool:
        return not (isinstance(x, Handle) and isinstance(x.type, Scalar) and not x.type.uniform)

    # --- compile-time numbers -----------------------------------------------------------------
    def constant_int(self, x: Any, what: str) -> int:
        """x as a compile-time integer; named extents become constants of this specialisation."""
        if isinstance(x, bool) or not isinstance(x, int | Handle):
            self.fail(f"{what} must be an integer, got {describe(x)}")
        if isinstance(x, int):
            return x
        self.need_dims(self.values.forms.form(x.value))
        self.fail(f"{what} must be known at compile time",
                  "use a number, a module constant, a parameter that is one (B: int, or B=64), a "
                  "named extent, or an expression of them")

    def need_dims(self, form: dict) -> None:
        """Asks for a new trace with constants when only named extents, and what is computed from
        them, keep `form` symbolic."""
        found = [self.values.extents_behind(v) for v in form if v is not None]
        if found and None not in found:
            raise NeedConstants(frozenset().union(*found))  # type: ignore[arg-type]

    def bounds_of(self, edge: Edge) -> tuple[Any, Any]:
        """(first, extent) of an edge as operands."""
        assert edge.first is not None and edge.extent is not None
        first = edge.offset if edge.offset is not None else self.number(edge.first)
        return first, edge.size if edge.size is not None else self.number(edge.extent)

    def number(self, form: Form) -> Any:
        """A form as a value, computed here."""
        total: Any = form.get(None, 0)
        for value, c in form.items():
            if value is not None:
                x: Any = Handle(value, self.values.type_of_value(value))
                term = self.arithmetic("mul", (x, c))
                total = term if isinstance(total, int) and total == 0 else self.arithmetic(
                    "add", (total, term))
        return total
