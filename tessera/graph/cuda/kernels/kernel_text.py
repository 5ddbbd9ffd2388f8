"""Lines of a generated kernel, each with the ops that it does."""

from __future__ import annotations

import ast
import functools
import hashlib
import keyword
import linecache
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from math import inf, nan, prod
from types import MappingProxyType
from typing import Any

from ....errors import SourceLine, short_path
from ....lazy_dataclass import dataclass
from ....numerics import NumericType, as_type
from ....tensor import Tensor, TensorType
from ....tile import MODULE as tile
from ....tile.builder.kernel_spec import KernelSpec
from ....tile.frontend.source import KernelSource
from ....tile.ir.argument_layout import ArgumentLayout
from ....tile.ir.ir import Function, Op, walk
from ....tile.ir.types import GlobalTensor, TileType
from ....tile.kernel.kernel import Kernel
from ....tile.passes.argument_layouts import with_layouts
from ....tile.passes.written_arguments import written_parameters
from ...op import OPS, GraphOp
from ...schedule.ir import GroupOperand, GroupStep, ScheduledGroup
from .failed_checks import OUTSIDE, note_check


@dataclass(frozen=True)
class Origin:
    """What a line of a kernel does: ids of the graph's ops, and the user's line."""

    ops: tuple[str, ...]
    where: SourceLine | None


@dataclass(frozen=True, eq=False)
class KernelText:
    """The text of a group's kernel.

    shapes: the extents in which the kernel takes each operand, reads before writes; parameters:
    their names.  layouts: by parameter, of those that lie otherwise in the array that is passed.
    origins: by line, from 1.
    checks: whether it asserts something, and so may name a line of the user's when it runs.
    """

    name: str
    text: str
    shapes: tuple[tuple[int, ...], ...]
    origins: dict[int, Origin]
    scope: dict[str, Any]
    checks: bool = False
    parameters: tuple[str, ...] = ()
    layouts: tuple[tuple[str, ArgumentLayout], ...] = ()

    @property
    def passed(self) -> tuple[tuple[int, ...], ...]:
        """The extents in which each operand is passed."""
        laid = dict(self.layouts)
        return tuple(laid[n].extents if n in laid else shape for n, shape in zip(
            self.parameters, self.shapes, strict=True))

    @property
    def file(self) -> str:
        """The name under which Python shows the text: the same in every process."""
        known = self.text + "".join(f"{n} {layout}" for n, layout in self.layouts)
        return f"<kernel {self.name} {hashlib.sha256(known.encode()).hexdigest()[:12]}>"


def mark(ops: tuple[str, ...], where: SourceLine | None) -> str:
    """`%7 file.py:12`: which op it is, and where the user wrote it."""
    at = f"{short_path(where.file)}:{where.line}" if where is not None and where.file else ""
    return " ".join([*ops[-1:], at]).strip()


@dataclass
class KernelWriter:
    """Collects the lines of one kernel."""

    group: ScheduledGroup
    lines: list[str] = field(default_factory=list)
    origins: dict[int, Origin] = field(default_factory=dict)
    scope: dict[str, Any] = field(default_factory=lambda: dict(NAMES))
    depth: int = 1
    checks: bool = False

    def line(self, text: str, step: GroupStep | None = None) -> None:
        origin = None
        if step is not None:
            origin = Origin(step.ops, step.where)
            text = f"{text}  # {mark(step.ops, step.where)}".rstrip(" #")
        self.lines.append("    " * self.depth + text)
        if origin is not None:
            self.origins[len(self.lines)] = origin

    def check_index(self, at: str, extent: int, step: GroupStep, wrap: bool = True,
                    unless: str = "") -> None:
        """Asserts that indices lie inside an extent. wrap: negative ones count from its end.
        unless: which of them are none."""
        low = -extent if wrap else 0
        inside = f"({at} >= {low}) & ({at} < {extent})"
        inside = f"({inside}) | {unless}" if unless else inside
        self.line(f'assert {inside}, "{OUTSIDE}{low}..{extent - 1}"', step)
        self.checks = True

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        self.line(head)
        self.depth += 1
        yield
        self.depth -= 1

    def type(self, numeric: NumericType) -> str:
        """The name by which the text knows a type."""
        plain = str(numeric)
        if plain.isidentifier() and not keyword.iskeyword(plain):
            self.scope[plain] = numeric.dtype
            return plain
        name = next((n for n, t in self.scope.items() if t == numeric), None)
        name = name or f"t{sum(isinstance(t, NumericType) for t in self.scope.values())}"
        self.scope[name] = numeric
        return name

    def annotation(self, operand: GroupOperand, dims: tuple[Any, ...]) -> str:
        extents = "".join(f"{d!r}, " for d in dims)
        return f"Tensor[{extents}{self.type(operand.type)}]"

    def finish_flat(self) -> KernelText:
        """The kernel of the group's operands, each as a run of its elements."""
        return self.finish_operands([(prod(o.shape),) for o in self.operands])

    def finish_operands(self, shapes: Sequence[tuple[int, ...]] | None = None) -> KernelText:
        """The kernel of the group's operands, each in these extents; in its own without."""
        taken = [o.shape for o in self.operands] if shapes is None else [*shapes]
        texts = [f"{capital(o.name)}: {self.annotation(o, dims)}"
                 for o, dims in zip(self.operands, taken, strict=True)]
        return self.finish(texts, f"(grid={self.group.grid})", taken)

    @property
    def operands(self) -> list[GroupOperand]:
        """Reads before writes; once what is both."""
        return [*{o.name: o for o in (*self.group.reads, *self.group.writes)}.values()]

    def finish(self, parameters: list[str], grid: str, shapes: list[tuple[int, ...]]) -> KernelText:
        """shapes: the extents in which each parameter is passed."""
        name = self.group.kernel
        head = [f"@kernel{grid}", f"def {name}({', '.join(parameters)}):"]
        origins = {n + len(head): o for n, o in self.origins.items()}
        text = "\n".join([*head, *self.lines]) + "\n"
        names = tuple(p.partition(":")[0] for p in parameters)
        return KernelText(name, text, tuple(shapes), origins, self.scope, self.checks, names)


NAMES: dict[str, Any] = {"tile": tile, "Tensor": Tensor, "inf": inf, "nan": nan}


def capital(name: str) -> str:
    """The tensor of a value: V7 of v7."""
    return name.capitalize()


class GroupKernel(Kernel):
    """A kernel that a graph function has inside: no observer of the user's kernels hears of it.

    layouts: by parameter, how it lies in the array that is passed.
    counted: results in which sentinels look for bad values: see `count`.
    """

    layouts: Mapping[str, ArgumentLayout] = MappingProxyType({})
    counted: frozenset[str] = frozenset()

    def __init__(self, fn: Any, text: str, tree: ast.FunctionDef, **how: Any):
        """tree: what the text was parsed to, and the function compiled from."""
        self._text, self._tree = text, tree
        super().__init__(fn, **how)

    @functools.cached_property
    def source(self) -> KernelSource:
        """At hand: nothing to look for in files, and nothing that may have changed there."""
        return KernelSource(self._tree, self.fn.__code__.co_filename, 1, 0,
                            tuple(self._text.splitlines(keepends=True)), self._captured)

    @property
    def annotations(self) -> dict[str, Any]:
        """With the extents of what is passed."""
        found = super().annotations
        return found | {n: TensorType(layout.extents, found[n].type)
                        for n, layout in self.layouts.items()}

    def compile(self, spec: KernelSpec, sizes: dict[str, int]) -> Function:
        """Traced on the extents that its text has."""
        written = super().annotations
        params = tuple((n, replace(t, dims=written[n].shape) if n in self.layouts else t)
                       for n, t in spec.params)
        return with_layouts(super().compile(replace(spec, params=params), sizes), self.layouts)

    def keep(self, spec: KernelSpec, sizes: dict[str, int], function: Function) -> None:
        super().keep(spec, sizes, function)
        self._untold.discard(id(function))

    def count(self, names: frozenset[str]) -> None:
        """Bad values in these results count for a program that launches it."""
        if not names <= self.counted:
            self.counted |= names
            for ready in self.launchers.values():  # made for fewer
                ready.clear()

    def watched_tensors(self, function: Function) -> frozenset[str]:
        """Of what it writes: those that count, and those of formats that numbers leave, where a
        cast may lose some. What is bad in another shows in what is made of it."""
        written = written_parameters(function)
        own = super().watched_tensors(function) & (self.counted | narrow_tensors(function))
        return written & (own | (byte_tensors(function) if casts_to_packed(function)
                                 else frozenset()))

    def function(self) -> Function:
        """Its Tile IR, which follows from the annotations."""
        self.inspect_ir("tile")
        assert self.last is not None
        return self.last


_WIDE = float(as_type("bf16").dtype.max)


def narrow_tensors(function: Function) -> frozenset[str]:
    """The tensors of a kernel whose formats have fewer exponents than f32 and bf16, and those of
    integers."""
    return frozenset(p.value.name for p in function.params if isinstance(p.type, GlobalTensor)
                     and p.type.dtype.kind in ("float", "int", "uint")
                     and (p.type.dtype.kind != "float" or float(p.type.dtype.max) < _WIDE))


def byte_tensors(function: Function) -> frozenset[str]:
    return frozenset(p.value.name for p in function.params if isinstance(p.type, GlobalTensor)
                     and p.type.dtype.name == "uint8")


def casts_to_packed(function: Function) -> bool:
    """Whether it makes codes of less than a byte, which it stores as bytes."""
    types = (d.type for n in walk(function.body) if isinstance(n, Op) for d in n.outs)
    return any(isinstance(t, TileType) and t.dtype.packed for t in types)


def compiled(source: KernelText, group: ScheduledGroup) -> GroupKernel:
    """The kernel of a text, with the group's schedule."""
    lines = source.text.splitlines(keepends=True)
    for at, origin in source.origins.items() if source.checks else ():
        if lines[at - 1].lstrip().startswith("assert "):
            note_check(source.file, at, origin.where)
    linecache.cache[source.file] = (len(source.text), None, lines, source.file)
    module = ast.parse(source.text, source.file)
    (tree,) = module.body
    assert isinstance(tree, ast.FunctionDef)

    def kernel(fn: Any = None, *, grid: Any = None) -> Any:
        if fn is None:
            return functools.partial(kernel, grid=grid)
        return GroupKernel(fn, source.text, tree, schedule=group.schedule, grid=grid)

    scope = {"__name__": "tessera_kernel", "__file__": source.file, "kernel": kernel,
             **source.scope}
    exec(compile(module, source.file, "exec"), scope)  # noqa: S102
    made = scope[source.name]
    made.held_lines = frozenset(hidden_lines(source, group).items())
    made.layouts = MappingProxyType(dict(source.layouts))
    return made


def hidden_lines(source: KernelText, group: ScheduledGroup) -> dict[int, str]:
    """Lines of values that stay inside, and that a step behind them may hide when they are bad,
    though it should not: "any", or "nan" where infinities are no harm."""
    stored, hidden = {o.name for o in group.writes}, dict[str, str]()
    inside = {s.name: s for s in group.steps if s.name not in stored
              and s.type.dtype.kind == "float" and s.type.dtype.special != "none"}
    for step in group.steps:
        op = OPS.get(step.op)
        if op is None:  # a call of the library: what it makes of bad values shows
            continue
        for k, a in enumerate(step.args):
            if a not in inside or op.may_drop(k, "nan") or _carried(op, step, k):
                continue
            kind = "nan" if op.may_drop(k, "inf") else "any"
            hidden[a] = "any" if "any" in (kind, hidden.get(a)) else "nan"
    lines = enumerate(source.text.splitlines(), 1)
    return {n: hidden[name] for n, text in lines
            if (name := text.strip().split(" = ")[0]) in hidden}


def _carried(op: GraphOp, step: GroupStep, k: int) -> bool:
    if not op.converts:
        return op.carries(k)
    to = step.type
    return to.dtype.kind == "float" and to.dtype.special != "none" and not to.policy.saturate


__all__ = ["GroupKernel", "Origin", "KernelText", "KernelWriter", "capital", "compiled", "mark"]
