"""A region inside the function that has it: a tensor whose value moves on with each store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from ... import hooks
from ...errors import DTypeError, PrivilegeError, SourceLine, TraceError, user_line
from ...numerics import NumericType, as_type
from ...tensor import OPERATORS, Tensor, as_tensor
from .. import functions as F
from ..op import Aval
from ..operand import convert, to_compute
from ..ops.reduce import accumulate_dtype
from ..ops.shape import SLICE
from ..trace import Tracer, apply, at_line, current_builder
from .subscripts import covered_with, is_covered, shape_of_part, updated
from .types import HOW, Privilege, read, reduce_sum, write


class RegionTensor(Tracer):
    """A region inside the function that has it: a tensor whose value moves on with each store.

    `now`: what it holds. Sums are held in the accumulate type until the function ends.
    `covered`: which elements have been written: all (True), none (None) or those of a bool mask.
    """

    __slots__ = ("privilege", "label", "now", "covered", "changed", "taken", "stored", "where")

    def __init__(self, argument: Tracer, privilege: Privilege, label: str):
        self.builder, self.privilege, self.label = argument.builder, privilege, label
        self.stored = argument.type
        self.layout, self._shape, self.scale = argument.layout, argument.shape, argument.scale
        self.type, self.name, self.is_param = argument.type, None, argument.is_param
        self.covered: Any = None if privilege is write else True
        self.changed, self.taken = False, list[tuple[Any, list]]()
        self.where: SourceLine | None = None  # of the last store
        self.now: Tensor = argument
        if privilege.writes and argument.scale is not None:  # held as values, quantised at the end
            self.now = to_compute(argument)
            self.type, self.scale = self.now.type, None
        if privilege is reduce_sum:
            self.now = convert(to_compute(self.now), self._sum_type())

    def _sum_type(self) -> NumericType:
        return as_type(accumulate_dtype(self.stored))

    @property
    def value(self) -> Any:  # type: ignore[override]  # a slot of Tracer
        if self.privilege.combine is not None:
            self._refuse("may not be read")
        if self.covered is not True:
            self._refuse("is read before it is written" if self.covered is None else
                         "is read before all of it is written")
        return self.builder.value_of(self.now)

    @property
    def aval(self) -> Aval:
        return Aval(self._shape, self.type)

    def _refuse(self, what: str) -> NoReturn:
        raise PrivilegeError(f"{self.label} is Region[{self.privilege}]: it {what}",
                             hint=HOW[self.privilege.name].format(self.label))

    # --- parts --------------------------------------------------------------------------------
    def __getitem__(self, index: Any) -> Tensor:
        if self.privilege.combine is not None:
            return RegionPart(self, index)
        if not is_covered(self.covered, index):
            self._refuse("is read before it is written")
        return OPERATORS["__getitem__"](self if self.privilege is read else self.now, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, RegionPart) and value.region is self and value.added:
            value.added = False  # the second half of G[i] += value
            return
        if self.privilege is read:
            self._refuse("may not be written")
        if self.privilege is write:
            self._put(index, _unrounded(value))
        elif self.privilege is reduce_sum:
            self._refuse("may only be added to, not assigned")
        else:
            self._combine(index, self._operand(value))

    def __iadd__(self, value: Any) -> RegionTensor:
        if self.privilege is write:
            self[...] = self + value
        else:
            self.add(..., value)
        return self

    def add(self, index: Any, value: Any) -> None:
        """Accumulate a sum: only Region[reduce_sum] may."""
        if self.privilege is not reduce_sum:
            self._refuse("may not be written" if self.privilege is read else
                         "may not be added to")
        self._combine(index, _unrounded(value))

    def _combine(self, index: Any, value: Any) -> None:
        """now[index] = combine(now[index], value)"""
        assert self.privilege.combine is not None
        own = OPERATORS["__getitem__"](self.now, index)
        value = to_compute(as_tensor(value))
        self._put(index, getattr(F, self.privilege.combine)(own, convert(value, to_type(own))))

    def _put(self, index: Any, value: Any) -> None:
        if current_builder() is not self.builder:
            raise TraceError(
                f"{self.label} is stored into inside a function that is traced on its own (the "
                "body of a loop, a branch, what grad or vmap takes)",
                hint="return the value from there, and store it outside",
            )
        update = _part_value(value, self, index)
        self.now = updated(self.now, index, update)
        self.covered = covered_with(self.covered, index, self._shape)
        self.changed, self.where = True, user_line()

    def _operand(self, value: Any) -> Tensor:
        """v of `G[i] = ts.maximum(G[i], v)`. Raises PrivilegeError for anything else."""
        assert self.privilege.combine is not None
        for base, chain in self.taken:
            if not chain:
                found = _match(value, base, self.privilege.combine, self.builder)
                if found is not None:
                    chain.extend(found[1])
                    return found[0]
        return self._refuse("may not be assigned")

    # --- the end of the trace -----------------------------------------------------------------
    def close(self, results: Sequence[Tensor]) -> Tensor | None:
        """What the region holds at the end, in its own type; None when nothing was stored."""
        if self.privilege.combine is not None:
            self._check_reads(results)
        if not self.changed:
            return None
        with at_line(self.where):
            out = convert(self.now, self.type)
            return out if self.builder.mesh is None else hooks.shard.get()(out, self.layout)

    def _check_reads(self, results: Sequence[Tensor]) -> None:
        """Raise PrivilegeError at the first node that reads a region which is only reduced."""
        own = {id(node) for _, chain in self.taken for node in chain}
        seen = {base for base, _ in self.taken}
        seen |= {v for _, chain in self.taken for node in chain for v in node.outputs}
        for node in self.builder.nodes if seen else ():
            if id(node) not in own and any(v in seen for v in node.inputs):
                raise PrivilegeError(
                    f"{self.label} is Region[{self.privilege}]: it may not be read",
                    hint=HOW[self.privilege.name].format(self.label), where=node.where)
        for x in results:
            mine = x.region is self if isinstance(x, RegionPart) else \
                isinstance(x, Tracer) and not isinstance(x, RegionTensor) and x.value in seen
            if mine:
                self._refuse("may not be returned")

    def lent(self, privilege: Privilege, what: str) -> Tensor:
        """What it holds now, for a call that has it as a region. Raises PrivilegeError when that
        call's privilege goes further than this one."""
        mine = self.privilege
        if privilege is not mine and (mine is not write or self.covered is not True):
            self._refuse(f"cannot be {what}, a Region[{privilege}]")
        return convert(self.now, self.type)

    def replace(self, value: Tensor, whole: bool) -> None:
        """It holds `value` now, which a call has made of what it held; `whole`: all of it is
        known."""
        self.now = value if self.privilege is not reduce_sum else \
            convert(value, self._sum_type())
        self.covered = True if whole else self.covered
        self.changed, self.where = True, user_line()

    def __repr__(self) -> str:
        return f"Region[{self.privilege}] {self.label} {self.aval}"


class RegionPart(Tracer):
    """`G[i]` of a region that is only reduced: it can be accumulated into, not read."""

    __slots__ = ("region", "index", "added", "base")

    def __init__(self, region: RegionTensor, index: Any):
        self.region, self.index, self.added = region, index, False
        self.builder, self.scale, self.name, self.is_param = region.builder, None, None, False
        self.layout = region.layout
        self._shape, self.type = shape_of_part(region.shape, index), region.type
        self.base: Any = None

    @property
    def value(self) -> Any:  # type: ignore[override]
        """For maximum and minimum, a value of its own, so that each of its uses can be checked."""
        if self.region.privilege is reduce_sum:
            self.region._refuse("may not be read")
        if self.base is None:
            own = OPERATORS["__getitem__"](self.region.now, self.index)
            zeros = (0,) * own.ndim
            self.base = apply(SLICE, own, starts=zeros, stops=tuple(own.shape),
                              steps=(1,) * own.ndim).value
            self.region.taken.append((self.base, []))
        return self.base

    @property
    def aval(self) -> Aval:
        return Aval(self._shape, self.type)

    def __iadd__(self, value: Any) -> RegionPart:
        self.region.add(self.index, value)
        self.added = True
        return self


def to_type(x: Tensor) -> NumericType:
    """The type in which values are combined with x."""
    return to_compute(x).type


def _unrounded(value: Any) -> Any:
    """`value` as the last function computed it, before it was rounded: it is rounded once, to the
    region's type."""
    if isinstance(value, Tracer) and not isinstance(value, RegionTensor | RegionPart):
        return value.builder.unrounded.get(value.value, value)
    return value


def _part_value(value: Any, region: RegionTensor, index: Any) -> Tensor:
    """`value` as the elements of region[index]: broadcast, in the type that is held."""
    kind = region.now.type
    if isinstance(value, int | float):
        value = F.full((), value, to_compute(region.now).type)
    value = as_tensor(value)
    if region.type.dtype.kind != "float" and value.dtype.kind == "float":
        raise DTypeError(f"{region.label} holds {region.type}, a {value.type} cannot be stored "
                         "into it", hint=f"ts.cast(value, ts.{region.type.dtype})")
    value = convert(value if value.scale is None else to_compute(value), kind)
    return F.broadcast_to(value, shape_of_part(region.shape, index))


def _match(value: Any, base: Any, combine: str, builder: Any) -> tuple[Tensor, list] | None:
    """(v, the nodes) when `value` is combine(base, v), conversions aside; else None."""
    if not isinstance(value, Tracer) or isinstance(value, RegionTensor | RegionPart):
        return None
    makers = {out: node for node in builder.nodes for out in node.outputs}
    node, up = _behind_casts(value.value, makers)
    if node is None or node.op.name != combine:
        return None
    for i, v in enumerate(node.inputs):
        last, down = _behind_casts(v, makers)
        root = down[-1].inputs[0] if down else v
        if root is base and (last is None or last.outputs == (base,)):
            return Tracer(builder, node.inputs[1 - i]), [*up, node, *down]
    return None


def _behind_casts(value: Any, makers: dict) -> tuple[Any, list]:
    """The node that made a value, conversions aside, and the nodes of those conversions."""
    node, casts = makers.get(value), []
    while node is not None and node.op.name == "cast":
        casts.append(node)
        node = makers.get(node.inputs[0])
    return node, casts
