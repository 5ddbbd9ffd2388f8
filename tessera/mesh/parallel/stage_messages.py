"""How values go from a stage of a pipeline to its neighbours.

A value is a tree of tensors. Between ranks its leaves travel as bytes: what they are (structure,
shapes, types, layouts) is sent as text before the first message of each size. A distributed tensor
keeps its layout: each rank sends its part to the rank at the same place of the other part of the
mesh.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Protocol

import numpy as np

from tessera.errors import ArgumentError
from tessera.graph import tree
from tessera.graph.operand import compute_type
from tessera.numerics import NumericType, as_type
from tessera.tensor import Tensor
from tessera.tile.launch.resident import on_gpu

from ...lazy_dataclass import dataclass
from ..collectives.replicated import Same
from ..device_mesh import Mesh
from ..errors import MeshError
from ..layout import Layout, Split
from ..partition import local_shape
from ..ranks.array_bytes import byte_count, from_bytes, to_bytes
from ..ranks.envelope import MessageLabel, here_in
from ..ranks.transport import Request, Transport
from ..tensor import DistTensor
from ..world import mesh_rank
from .schedules import Backward, Forward, PipelineStep

_CONTAINERS = {"tuple": tuple, "list": list}


@dataclass(frozen=True)
class MessageSpec:
    """What a value is: its structure, and the shape, type and layout of each leaf; and along which
    axes of its mesh each is the same on all ranks, when that is known."""

    structure: tree.TreeDef
    leaves: tuple[tuple[tuple[int, ...], NumericType, Layout | None], ...]
    same: tuple[Same, ...] = ()

    @staticmethod
    def of(value: Any, same: Sequence[Same] = ()) -> MessageSpec:
        flat, structure = tree.flatten(value)
        return MessageSpec(structure, tuple((t.shape, t.type, t.layout) for t in flat), tuple(same))

    def cotangents(self, moves: Sequence[bool]) -> MessageSpec:
        """The form of the list of cotangents of its floating leaves."""
        leaves = tuple((shape, compute_type(numeric), layout)
                       for (shape, numeric, layout), m in zip(self.leaves, moves, strict=True) if m)
        return MessageSpec(tree.flatten([0] * len(leaves))[1], leaves)

    def text(self) -> str:
        leaves = [[shape, str(numeric), _layout_data(layout)]
                  for shape, numeric, layout in self.leaves]
        same = [None if s is None else sorted(axis for _, axis in s) for s in self.same]
        return json.dumps([_structure_data(self.structure), leaves, same])

    @staticmethod
    def parse(text: str, mesh: Mesh) -> MessageSpec:
        """The inverse of text, on the receiver's mesh."""
        structure, leaves, same = json.loads(text)
        return MessageSpec(_structure_of(structure), tuple(
            (tuple(shape), as_type(numeric), _layout_of(layout, mesh))
            for shape, numeric, layout in leaves), tuple(_same_on(axes, mesh) for axes in same))


def _same_on(axes: Sequence[str] | None, mesh: Mesh) -> Same:
    return frozenset((mesh, axis) for axis in (mesh.axes if axes is None else axes))


def _structure_data(structure: tree.TreeDef) -> Any:
    if structure.kind is None:
        return "*"
    name = getattr(structure.kind, "__name__", "")
    if structure.kind is type(None):
        return None
    if structure.kind is dict and all(isinstance(k, str) for k in structure.data):
        return ["dict", *([k, _structure_data(c)]
                          for k, c in zip(structure.data, structure.children, strict=True))]
    if _CONTAINERS.get(name) is structure.kind:
        return [name, *map(_structure_data, structure.children)]
    raise ArgumentError(f"a stage of a pipeline gives {structure}, which cannot be sent",
                        hint="tensors, or tuples, lists and dicts (by names) of them")


def _structure_of(data: Any) -> tree.TreeDef:
    if data == "*":
        return tree.LEAF
    if data is None:
        return tree.TreeDef(type(None))
    kind, *children = data
    if kind == "dict":
        return tree.TreeDef(dict, tuple(k for k, _ in children),
                            tuple(_structure_of(c) for _, c in children))
    return tree.TreeDef(_CONTAINERS[kind], None, tuple(map(_structure_of, children)))


def _layout_data(layout: Layout | None) -> Any:
    if layout is None:
        return None
    return [[[s.axes, s.cyclic, s.unit] for s in layout.splits], layout.pending, layout.op]


def _layout_of(data: Any, mesh: Mesh) -> Layout | None:
    if data is None:
        return None
    splits, pending, op = data
    return Layout(mesh, tuple(Split(tuple(axes), cyclic, unit) for axes, cyclic, unit in splits),
                  tuple(pending), op)


# --- a distributed tensor on another part of the mesh ---------------------------------------------
def onto(value: Any, mesh: Mesh | None) -> Any:
    """A value whose distributed tensors lie on this part of their mesh. Without a part the value
    itself. Raises MeshError for a tensor that lies elsewhere, ArgumentError for one that is split
    over an axis that the part does not have."""
    return value if mesh is None else tree.map_tree(lambda t: _onto(t, mesh), value)


def _onto(t: Any, mesh: Mesh) -> Any:
    if not isinstance(t, DistTensor) or t.mesh == mesh:
        return t
    number = {world: rank for rank, world in enumerate(t.mesh.world_ranks)}
    if not number.keys() >= set(mesh.world_ranks):
        raise MeshError(f"a tensor on {t.mesh} is used by a stage on {mesh}",
                        hint="make it on the stage's part of the mesh: mesh.sub(pp=stage)")
    held = {r: t.held[number[w]] for r, w in enumerate(mesh.world_ranks) if number[w] in t.held}
    return _laid(t, held, mesh)


def across(value: Any, mesh: Mesh | None) -> Any:
    """A value whose distributed tensors lie on this part instead of one beside it, rank by rank."""
    return value if mesh is None else tree.map_tree(
        lambda t: _laid(t, t.held, mesh) if isinstance(t, DistTensor) else t, value)


def _laid(t: DistTensor, held: Mapping[int, Tensor], mesh: Mesh) -> DistTensor:
    return DistTensor(held, t.shape, t.type, _layout_on(t.layout, mesh), is_param=t.is_param,
                      name=t.name)


def _layout_on(layout: Layout, mesh: Mesh) -> Layout:
    used = {a for split in layout.splits for a in split.axes} | set(layout.pending)
    gone = sorted(used - set(mesh.axes))
    if gone:
        raise ArgumentError(f"a tensor in the layout {layout} cannot be used by one stage, whose "
                            f"ranks are {mesh}", hint=f"no dimension may be split over {gone[0]!r}")
    return replace(layout, mesh=mesh)


# --- links ---------------------------------------------------------------------------------------
class StageLink(Protocol):
    """What brings the input of a step: put by one stage, taken by the other.

    A Forward step takes a value, and along which axes each of its tensors is the same. A Backward
    step takes the list of cotangents of its stage's floating results: await_cotangents says of
    which value, and which of its leaves are floating.
    `expect` begins a receive ahead of time, where its size is known.
    """

    def put(self, step: PipelineStep, value: Any, same: Sequence[Same] = ()) -> None: ...

    def await_cotangents(self, step: PipelineStep, value: Any, moves: Sequence[bool]) -> None: ...

    def expect(self, step: PipelineStep) -> None: ...

    def take(self, step: PipelineStep) -> tuple[Any, Sequence[Same]]: ...

    def close(self) -> None: ...


class Shelf:
    """The link of stages that are all in this process."""

    def __init__(self, parts: Sequence[Mesh | None]):
        self.parts = parts
        self.values: dict[PipelineStep, tuple[Any, Sequence[Same]]] = {}

    def put(self, step: PipelineStep, value: Any, same: Sequence[Same] = ()) -> None:
        self.values[step] = across(value, self.parts[step.stage % len(self.parts)]), same

    def await_cotangents(self, step: PipelineStep, value: Any, moves: Sequence[bool]) -> None:
        pass

    def expect(self, step: PipelineStep) -> None:
        pass

    def take(self, step: PipelineStep) -> tuple[Any, Sequence[Same]]:
        return self.values.pop(step)

    def close(self) -> None:
        pass


class Coming(Protocol):
    """A tensor that is on its way."""

    def wait(self) -> Tensor: ...


@dataclass(frozen=True)
class HostMessage:
    """One that comes through the memory of hosts. index: of the GPU that it goes to, if any."""

    request: Request
    data: np.ndarray
    shape: tuple[int, ...]
    type: NumericType
    index: int | None

    def wait(self) -> Tensor:
        self.request.wait()
        array = from_bytes(self.data, self.type.dtype, prod(self.shape)).reshape(self.shape)
        made = Tensor(array, self.type)
        return made if self.index is None else on_gpu(made, self.index)


class Wire:
    """The link of a rank to the ranks before and after it.

    rows: of each microbatch; peers: the rank of each stage at this rank's place; part: the mesh of
    this rank's stages; index: the GPU that they run on, None on hosts
    """

    def __init__(self, transport: Transport, rows: Sequence[int], peers: Sequence[int],
                 part: Mesh, index: int | None):
        self.transport, self.rows, self.peers, self.part = transport, rows, peers, part
        self.index = index
        self.forms: dict[tuple[int, int], MessageSpec] = {}  # of a stage's input, by stage and rows
        self.pulls: dict[PipelineStep,
                         MessageSpec] = {}  # of the cotangents that a Backward step takes
        self.coming: dict[PipelineStep, tuple[MessageSpec, list[Coming]]] = {}
        self.going: list[Request] = []

    def _is_first(self, i: int) -> bool:
        """Whether no earlier microbatch has as many rows."""
        return self.rows[i] not in self.rows[:i]

    def put(self, step: PipelineStep, value: Any, same: Sequence[Same] = ()) -> None:
        tag, to = _tag(step), self._neighbour(step, put=True)
        form = MessageSpec.of(value, same)
        if isinstance(step, Forward) and self._is_first(step.microbatch):
            data = np.frombuffer(form.text().encode(), np.uint8)
            self.going.append(self.transport.isend(to, data, tag, _form_label(step)))
        for t in tree.flatten(value)[0]:
            self.send(to, step, t.local if isinstance(t, DistTensor) else t)
        self.going = [r for r in self.going if not r.done()]

    def send(self, to: int, step: PipelineStep, own: Tensor) -> None:
        """What a step takes, a tensor of it, to the rank that takes it."""
        self.going.append(self.transport.isend(
            to, to_bytes(own.array, own.dtype), _tag(step), _label(step, own.type)))

    def receive(self, source: int, step: PipelineStep, shape: tuple[int, ...],
                numeric: NumericType) -> Coming:
        """Begin to receive it."""
        data = np.empty(byte_count(prod(shape), numeric.dtype), np.uint8)
        request = self.transport.irecv(source, data, _tag(step), _label(step, numeric))
        return HostMessage(request, data, shape, numeric, self.index)

    def _neighbour(self, step: PipelineStep, put: bool) -> int:
        """The rank that has, or will take, the input of a step."""
        if put:
            return self.peers[step.stage]
        return self.peers[step.stage + (-1 if isinstance(step, Forward) else 1)]

    def await_cotangents(self, step: PipelineStep, value: Any, moves: Sequence[bool]) -> None:
        self.pulls[step] = MessageSpec.of(value).cotangents(moves)

    def expect(self, step: PipelineStep) -> None:
        self.begin(step)

    def begin(self, step: PipelineStep) -> None:
        """Begin to receive what a step takes, where its form is known."""
        if step in self.coming:
            return
        form = self.pulls.pop(step, None) if isinstance(step, Backward) else self.forms.get(
            (step.stage, self.rows[step.microbatch]))
        if form is None:
            return
        source = self._neighbour(step, put=False)
        self.coming[step] = form, [self.receive(source, step, self._local(leaf), leaf[1])
                                   for leaf in form.leaves]

    def take(self, step: PipelineStep) -> tuple[Any, Sequence[Same]]:
        key = (step.stage, self.rows[step.microbatch])
        if isinstance(step, Forward) and key not in self.forms:
            self.forms[key] = self._receive_form(step)
        self.begin(step)
        form, coming = self.coming.pop(step)
        made = [self._made(leaf, c.wait()) for leaf, c in zip(form.leaves, coming, strict=True)]
        return tree.unflatten(form.structure, made), form.same

    def _receive_form(self, step: PipelineStep) -> MessageSpec:
        source = self._neighbour(step, put=False)
        coming = self.transport.irecv(source, None, _tag(step), _form_label(step))
        coming.wait()
        assert coming.buffer is not None
        return MessageSpec.parse(coming.buffer.tobytes().decode(), self.part)

    def _local(self, leaf: Any) -> tuple[int, ...]:
        shape, numeric, layout = leaf
        if layout is None:
            return shape
        return local_shape(layout, shape, mesh_rank(self.part), numeric.dtype)

    def _made(self, leaf: Any, part: Tensor) -> Tensor:
        shape, numeric, layout = leaf
        if layout is None:
            return part
        return DistTensor({mesh_rank(self.part): part}, shape, numeric, layout)

    def close(self) -> None:
        """Wait until everything has been sent."""
        for request in self.going:
            request.wait()


def _label(step: PipelineStep, numeric: NumericType) -> MessageLabel:
    """Of a tensor that a step takes."""
    return here_in(f"{step} of stage {step.stage}", numeric.dtype.name)


def _form_label(step: PipelineStep) -> MessageLabel:
    """Of what tells the form of what a step takes."""
    return here_in(f"the form of {step} of stage {step.stage}")


def _tag(step: PipelineStep) -> int:
    return 2 * step.stage + isinstance(step, Backward)
