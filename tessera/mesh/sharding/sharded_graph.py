"""Running a graph of distributed tensors: partition it once, then every rank its own part.

`run_op` runs one op outside of any graph, `ShardedProgram` a compiled function. Both are handed to
the graph layer, which knows nothing of meshes.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tessera import config, hooks
from tessera.dims import show_shape
from tessera.errors import ArgumentError, TesseraError, user_line
from tessera.graph.donation import alone
from tessera.graph.host_copy import HostCopy
from tessera.graph.ir import Graph, Node, Value
from tessera.graph.op import ENGINES, Aval, GraphOp, by_engines, infer
from tessera.graph.placed_leaves import Picker, PlacedLeaves, as_placed_leaves, origins, picker
from tessera.graph.steady_step import SteadyRun
from tessera.graph.trace import at_line
from tessera.graph.traced_signature import executor
from tessera.numerics import NumericType, as_type, stored_bytes
from tessera.numerics.random_state import next_step
from tessera.runtime.arrays import HOST
from tessera.tensor import Tensor
from tessera.tile.launch.resident import on_gpu

from ...lazy_dataclass import dataclass
from ..collectives.exchange_ops import COPIED, SUMS, adds_only_in_windows
from ..device_mesh import Mesh
from ..errors import MeshError
from ..layout import Layout
from ..partition import extents
from ..placement import computes_on_gpus, gpu_of
from ..ranks.call_numbers import CallSequence, Samples, sequence_of
from ..ranks.envelope import MessageLabel
from ..ranks.group import Group, make_group
from ..ranks.ledger import call
from ..ranks.transport import Transport
from ..tensor import NOTHING, DistTensor, held_ranks
from ..world import is_here, mesh_rank, patience, simulate, transport
from . import partitioned_steps
from .add_behind_sums import add_behind_sums
from .collective_order import (
    REDUCTIONS,
    issue_early,
    keep_gathered,
    prefetch,
    reduce_early,
    send_together,
)
from .compare_programs import (
    agree_on_program,
    first_number,
    need_alike_alone,
    operand_name,
    operands_of,
    random_state_of,
    sampled_number,
)
from .control_flow import ready
from .cut_products import cut_products
from .defer_readers import defer_readers
from .few_blocks import FEW, send_by_few
from .layout_change_ops import group_along
from .localize import brings_parameter, gathers_beside, localize
from .observed_runs import is_watched, run_observed
from .partitioned_steps import CollectivePlan, PlannedCollective, describe, merge_waiting, planned
from .place_in_whole import PlaceInWhole
from .plain_operands import WRITTEN, LeftOperands, left_on, samples_of, was_written
from .propagate import Propagated, propagate
from .rounded_sums import round_before_gather
from .update_early import update_early


class ShardedProgram:
    """A graph on a mesh: what every rank runs, and the collectives among it.

    layouts: of each input and then of each capture, None for a plain tensor, which every rank has
    whole. donated: inputs whose memory results may take. Raises MeshError for tensors of different
    meshes.
    """

    def __init__(self, graph: Graph, layouts: Sequence[Layout | None],
                 donated: Sequence[int] = (), names: Sequence[str] = ()):
        self.names = tuple(names)  # of the inputs, where they are leaves of arguments
        self.source, self.mesh = graph, _one_mesh(graph, layouts)
        self.layouts, self.donated = tuple(layouts[:len(graph.inputs)]), tuple(donated)
        self.random = "random" in graph.effects
        self.determinism = config.determinism  # as it is compiled, and as the others must
        self._local: dict[int, Any] = {}
        self._copies: dict[int, tuple[HostCopy, Tensor]] = {}  # of captured tensors, by number
        # A run, by rank, of those that have compared it with the others and send through NCCL: what
        # tells of runs that sent nothing, and what it is in each sequence.
        self._numbered: dict[int, tuple[LeftOperands, list[tuple[CallSequence, int]]]] = {}
        self._compared: dict[int, int] = {}  # by rank that has compared its operands, the epoch
        self._windows: dict[int, bool] = {}  # by rank, whether others reach what it sends
        self._widened = False  # there are none: terms that they would take narrow are sent wide

    @functools.cached_property
    def made(self) -> Propagated:
        graph = ready(self.source, self.mesh)
        values = [*graph.inputs, *(v for v, _ in graph.captures)]
        held = [*self.layouts, *(t.layout for _, t in graph.captures)]
        layouts = {v: at for v, at in zip(values, held, strict=True) if at is not None}
        found = propagate(graph, layouts, self.mesh)
        steps = issue_early(defer_readers(found.steps))
        if self.mesh.names_gpus:  # what is sent runs beside kernels there
            steps = reduce_early(add_behind_sums(steps, found.outputs))
            steps = merge_waiting(steps, partitioned_steps.GPU_BUCKET_BYTES, REDUCTIONS)
            steps = keep_gathered(update_early(steps))
            steps = cut_products(prefetch(steps, found.inputs), self.mesh)
            steps = send_by_few(round_before_gather(steps, found.outputs, self.mesh), self.mesh)
        else:
            steps = send_together(steps, found.inputs)
        return replace(found, steps=tuple(steps))

    @functools.cached_property
    def _planned(self) -> CollectivePlan:
        return planned(self.made.steps)

    @property
    def plan(self) -> CollectivePlan:
        """The collectives, in order; on a mesh of GPUs with the way that they go."""
        by = self._by
        inside = IN_WINDOWS if any(self._windows.values()) else ()
        return CollectivePlan(self._as_sent(replace(c, by="windows" if c.op in inside else by))
                              for c in self._planned) if by else self._planned

    def _as_sent(self, c: PlannedCollective) -> PlannedCollective:
        """With the type and the bytes of narrow terms that are sent wide."""
        narrow = c.by == "windows" and not (self._widened or c.inside)
        if not c.wide or c.by == "host" or narrow:
            return c
        bits = [as_type(t).dtype.bits for t in (c.wide, c.dtype)]
        return replace(c, bytes=c.bytes * bits[0] // bits[1], sent=c.wide)

    @property
    def _by(self) -> str:
        """"nccl" or "host"; "" before its ranks have found out, and of a mesh of hosts."""
        if not computes_on_gpus(self.mesh) or not is_here(self.mesh):
            return ""
        from ..ranks.communicator import uses_nccl  # it stands on NCCL, which few need

        found = uses_nccl(make_group(self.mesh, None))
        return "" if found is None else "nccl" if found else "host"

    @functools.cached_property
    def _results(self) -> ResultKinds:
        avals = [v.aval for v in self.source.outputs]
        return ResultKinds([*map(extents, avals)], [a.type for a in avals], [*self.made.results])

    @functools.cached_property
    def _on_gpu_results(self) -> ResultKinds:
        """With origins, where parts lie in the memory of this rank's GPU."""
        plan = self.on_gpu.program.plan
        there = all(plan.buffer(n).kind != "host" for n in plan.results)
        return self._results.with_origins() if there else self._results

    @functools.cached_property
    def hash(self) -> str:
        """What every rank must have the same."""
        said = f"{self.mesh} {self.names} {self.source.hash} {self} {self.determinism}"
        return hashlib.sha256(said.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        made = self.made
        return f"on {self.mesh}\n{describe(made.graph, made.steps, made.inputs, made.outputs)}"

    def local(self, rank: int) -> Any:
        """What a rank runs, on the host or on its GPU, compiled at its first call."""
        if rank not in self._local:
            index = gpu_of(self.mesh)
            target = "cpu" if index is None else f"cuda:{index}"
            by_nccl = index is not None and self._by != "host"
            graph = localize(self.made, rank, by_nccl and not self._hopes_for_windows(), by_nccl,
                             by_nccl and self._hopes_for_engines())
            graph.kept.update(argument_names=self.names,
                              place_in_whole=PlaceInWhole(self.made, rank).told)
            self._local[rank] = executor(graph, target, donated=self.donated)
        return self._local[rank]

    @property
    def on_gpu(self) -> Any:
        """What this rank runs on its GPU; None where it has run nothing there."""
        here = computes_on_gpus(self.mesh) and is_here(self.mesh)
        return self._local.get(mesh_rank(self.mesh)) if here else None

    # --- running -----------------------------------------------------------------------------
    def run(self, leaves: Sequence[Tensor], parts: Sequence[Tensor] | None = None) -> list[Any]:
        """The results of the graph as distributed tensors. parts: of all leaves, as they lie on a
        GPU, where somebody has looked."""
        given = [*leaves, *self._captured]
        if self.random and gpu_of(self.mesh) is None:
            next_step()
        ranks = held_ranks(self.mesh)
        if transport().size == 1 and self.mesh.world_size > 1:
            need_alike_alone(self.source.name, given, self.names)
            found = dict(enumerate(simulate(
                lambda: self._run(mesh_rank(self.mesh), given), self.mesh)))
        else:
            with patience(first=not self._local):
                self._agree(given, changed := was_written(given))
                if not self._planned or self._numbered:
                    if changed:
                        left_on(transport(), self.mesh).count(WRITTEN)
                    plain = samples_of([given[i] for i in self._plain])
                    for r in ranks:
                        self._leave_alike(r, given, changed)
                        self._count(r, plain)
                if len(ranks) == 1 and gpu_of(self.mesh) is not None:
                    return self._on_gpu(ranks[0], given, self._placed(ranks[0], leaves, parts))
                found = {rank: self._run(rank, given) for rank in ranks}
        return self._results.tensors([{r: found[r][i] for r in ranks}
                                      for i in range(len(self.source.outputs))])

    @functools.cached_property
    def _captured(self) -> list[Tensor]:
        return [t for _, t in self.made.graph.captures]

    def _placed(self, rank: int, leaves: Sequence[Tensor], parts: Sequence[Tensor] | None
                ) -> Sequence[Tensor]:
        """What a rank is given on its GPU: parts of the leaves, and what is captured. A captured
        tensor on the host is copied there once, and again when it was written."""
        captured = _parts_of(self._captured, rank)
        for i, x in enumerate(captured):
            if x.place != HOST:
                continue
            if i not in self._copies or self._copies[i][0].may_differ(x):
                index = gpu_of(self.mesh)
                assert index is not None
                self._copies[i] = HostCopy.of(x), on_gpu(x, index)
            captured[i] = self._copies[i][1]
        if type(parts) is PlacedLeaves:
            if len(parts) == len(leaves) and type(as_placed_leaves(captured)) is PlacedLeaves:
                return parts.add(captured)
            parts.take()
        return [*_parts_of(leaves, rank), *captured]

    def _on_gpu(self, rank: int, given: Sequence[Tensor], parts: Sequence[Tensor]
                ) -> list[DistTensor]:
        """The results where one rank's parts are here, on a GPU. What donated tensors alone have,
        their parts and what holds these, are those of results: a step has hundreds."""
        pick, donated = self._spread, self._spread(given)
        held, mine = [x._held for x in donated], pick(parts)
        # `held` has them, and each a tensor; `mine` and `parts` have them, and each what holds it.
        ours = bool(mine) and alone(held, 1) and alone(mine, 2)
        made = self._launch(rank, parts, ours)
        if not ours:
            return self._on_gpu_results.tensors([{rank: y} for y in made])
        for x in donated:
            x._held = NOTHING
        numbers = {id(p): k for k, p in enumerate(mine)}
        return self._on_gpu_results.tensors([
            held[numbers[id(y)]] if id(y) in numbers else {rank: y} for y in made])

    def steady(self, results: Sequence[Any]) -> SteadyRun | None:
        """See DeviceExecutable.steady; of one rank's parts, on a GPU."""
        local, here = self.on_gpu, transport()
        if local is None or (self.random and not local.program.lowered.draws.random):
            return None
        held = [x._held for x in results]
        parts = [one for x in held for one in x.values()]
        if not (alone(held, 1) and alone(parts, 1)):
            return None
        found: SteadyRun | None = local.steady(parts)
        kinds, avals = self._on_gpu_results, [v.aval for v in self.source.inputs]
        if found is None or any(i is not None and (
                extents(avals[i]), avals[i].type, self.layouts[i]) != (
                kinds.shapes[j], kinds.types[j], kinds.layouts[j])
                for j, i in enumerate(found.moved)):
            return None
        rest = kinds.of([j for j, i in enumerate(found.moved) if i is None])
        others = sorted({*range(len(self.layouts))} - {*found.moved})
        plain = [k for k, i in enumerate(others) if self.layouts[i] is None]
        return SteadyRun(found.moved, functools.partial(
            self._again, here, mesh_rank(self.mesh), found.run, rest, plain))

    def _again(self, here: Transport, rank: int,
               run: Callable[[Sequence[Tensor]], list[Any] | None], kinds: ResultKinds,
               plain: Sequence[int], leaves: Sequence[Tensor]) -> list[DistTensor] | None:
        """A call as SteadyRun.run, of a rank `here`. kinds: of its results; plain: operands of
        which each rank has its own."""
        if transport() is not here or self._compares(rank):
            return None
        given = samples_of([leaves[i] for i in plain]) if plain else ()
        made = run(self._placed(rank, leaves, None) if self._captured else _parts_of(leaves, rank))
        if made is None:
            return None
        self._count(rank, given)
        return kinds.tensors([{rank: y} for y in made])

    @functools.cached_property
    def _plain(self) -> list[int]:
        """Of the inputs, those of which each rank has its own."""
        return [i for i, at in enumerate(self.layouts) if at is None]

    def _count(self, rank: int, plain: Samples) -> None:
        """A call of a rank is made, and was given these."""
        if not self._planned:
            if transport().size > 1:
                left_on(transport(), self.mesh).count(self._call, self._named)
            if plain and transport().size > 1:
                left_on(transport(), self.mesh).add(self._source_hash, self._operands, plain,
                                                    self.mesh.axes)
            return
        left, numbered = self._numbered.get(rank, NOT_NUMBERED)
        if numbered:
            given = plain, left.take()
            for sequence, number in numbered:
                sequence.add(number, given)

    def _leave_alike(self, rank: int, given: Sequence[Tensor], changed: bool) -> None:
        """What all hold alike, of first calls that send nothing and behind writes: for the next."""
        if self._planned or rank in self._compared and not changed or transport().size == 1:
            return
        self._compared[rank] = 0
        alike = [i for i, t in enumerate(given) if t.layout is not None
                 and len(t.layout.repeated) == len(self.mesh.axes)]
        if alike:
            parts = _parts_of(given, rank)
            names = [operand_name(i, given[i], given[i].layout, self.names) for i in alike]
            left_on(transport(), self.mesh).add(
                f"{self._source_hash} first", [*map(self._told_elsewhere, names)],
                samples_of([parts[i] for i in alike]), self.mesh.axes)

    @functools.cached_property
    def _named(self) -> str:
        """Its name; "" where a rank lacks nothing of its inputs."""
        parted = any(at and len(at.repeated) < len(at.mesh.axes) for at in self.layouts)
        return self.source.name if parted else ""

    @functools.cached_property
    def _source_hash(self) -> str:
        return self.source.hash[:16]

    @functools.cached_property
    def _call(self) -> int:
        return int(self._source_hash[:12], 16)

    @functools.cached_property
    def _operands(self) -> list[str]:
        """The plain operands, for people, where another program tells of them."""
        return [*map(self._told_elsewhere, self._plain_names.values())]

    def _told_elsewhere(self, name: str) -> str:
        where = self.source.nodes[0].where if self.names and self.source.nodes else None
        return f"{name} of {self.source.name}" + (f" at {where}" if where else "")

    @functools.cached_property
    def _spread(self) -> Picker:
        """Of the inputs, those that are donated and distributed."""
        return picker([i for i in self.donated if self.layouts[i] is not None])

    def _run(self, rank: int, given: Sequence[Tensor]) -> list[Tensor]:
        parts = _parts_of(given, rank)
        if gpu_of(self.mesh) is not None:
            return self._launch(rank, parts)
        local = self.local(rank)
        there = next((t for t in parts if t.place != HOST), None)
        if there is not None:
            raise ArgumentError(
                f"{self.source.name} computes on hosts, where the parts of {self.mesh} are, and an "
                f"operand {there.type}{show_shape(there.shape)} lies on cuda:{there.place}",
                where=user_line(), hint="x.cpu() moves it to the host")
        arrays = [t.array for t in parts]
        found = run_observed(local.graph, arrays) if is_watched() else local.compiled.run(arrays)
        return [Tensor(a, v.aval.type) for a, v in zip(found, self.source.outputs, strict=True)]

    def _launch(self, rank: int, parts: Sequence[Tensor], ours: bool = False) -> list[Tensor]:
        local = self.local(rank)
        if rank not in self._windows:
            self._windows[rank] = self._open_windows(rank, local)
            if self._sends_much() and not self._windows[rank] and self._hoped:
                self._widened = True
                local = self._local_again(rank, local)
                self._windows[rank] = self._open_windows(rank, local)
        if self.random and not local.program.lowered.draws.random:
            next_step()  # a program that draws does so itself
        made: list[Tensor] = local.tensors(parts, ours=ours)
        return made

    def _sends_much(self) -> bool:
        return self._by == "nccl" and max(
            (c.bytes for c in self._planned), default=0) >= LEAST_WINDOW_BYTES

    @functools.cached_property
    def _hoped(self) -> bool:
        """Whether a program compiled for windows is another: it sends narrow terms, or copies what
        it gathers, or gathers by copy engines."""
        return any(c.wide for c in self._planned) or any(
            brings_parameter(s) or gathers_beside(s) for s in self.made.steps)

    def _hopes_for_windows(self) -> bool:
        """Whether a program is compiled for windows, as far as this rank can say."""
        if self._widened or not self._sends_much():
            return False
        from ..ranks.windows import windows_here  # it stands on NCCL, which few need

        return windows_here()

    def _hopes_for_engines(self) -> bool:
        """Whether it is compiled for copy engines, too."""
        from ..ranks.windows import engines_here  # it stands on NCCL, which few need

        return self._hopes_for_windows() and engines_here()

    def _open_windows(self, rank: int, local: Any) -> bool:
        """Let other ranks reach the temporaries of what a rank runs, where all send much and from
        the same places. All ranks of the mesh do so, before the first run."""
        if not self._sends_much():
            return False
        from ..ranks.window_sums import NarrowSum  # they stand on NCCL, which few need
        from ..ranks.windows import window_memory

        places, nodes, whole = local.sent_places
        if any(by_engines(n.attrs) and n not in whole for n in nodes):
            places = ""  # what is gathered is a result
        index, here = gpu_of(self.mesh), transport()
        assert index is not None

        def group_of(node: Node) -> Group:
            return Group(here, node.attrs["members"], node.attrs["axis"])

        sums = [NarrowSum(group_of(n), "all_reduce" if n.op is SUMS else "reduce_scatter",
                          _bytes_of(n), n.attrs.get("blocks", 0), n in whole)
                for n in nodes if adds_only_in_windows(n)]
        groups = {(n.attrs["members"], n.attrs.get("blocks", 0)): group_of(n) for n in nodes
                  if n.attrs.get("blocks", 0) in (0, FEW, ENGINES)}
        groups.update({(one.group.ranks, one.blocks): one.group for one in sums})
        with at_line(user_line()):
            local.block = window_memory(
                group_along(self.mesh, rank, self.mesh.axes), index,
                local.program.plan.temporary_bytes, places,
                [(group, blocks) for (_, blocks), group in groups.items()],
                None if any(one.kind == "all_reduce" and not one.inside for one in sums) else sums)
        return local.block is not None and bool(local.block.windows)

    def _local_again(self, rank: int, local: Any) -> Any:
        """What a rank runs where narrow terms are sent wide."""
        sent = local.sent_places[1]
        if not any(adds_only_in_windows(n) or by_engines(n.attrs) for n in sent) and all(
                n.op is not COPIED for n in local.graph.nodes):
            return local
        del self._local[rank]
        return self.local(rank)

    def _agree(self, given: Sequence[Tensor], changed: bool) -> None:
        """All ranks of the mesh run the same program; without collectives it does not matter. What
        goes through NCCL is compared once: the hash is that of the whole sequence.

        Before its first run the first rank compiles while others wait, who then find its loops
        in the disk cache. changed: this rank wrote where others hold the same."""
        if not is_here(self.mesh) or not self._compares(me := mesh_rank(self.mesh)):
            return
        if not self._local and me == 0 and not is_watched():
            self.local(0).compiled  # noqa: B018  made by being asked for
        group, left = group_along(self.mesh, me, self.mesh.axes), left_on(transport(), self.mesh)
        again = None if self._compared.get(me) == left.epoch else sampled_number
        with at_line(user_line()):
            mine = call(group, self.source.name, (), None, {})
            agree_on_program(
                group, mine, self.mesh, self.hash, self._listing, lambda: [*operands_of(
                    self.mesh, _parts_of(given, me), [t.layout for t in given], self.names),
                    *(random_state_of(self.mesh) if self.random else ())],
                again if me in self._compared and not changed and config.comm_check == "once"
                else first_number,
                {n: given[i] for i, n in self._plain_names.items()}, left)
        self._compared[me] = left.epoch
        if self._by == "nccl":
            label = replace(mine, attrs=(("program", self.hash),)).label(group)
            self._numbered[me] = left, self._numbers(label)

    def _listing(self) -> str:
        """All that the hash is of: the graph with its constants, without its heading; the steps."""
        _, _, nodes = str(self.source).partition("\n")
        names = "".join(f"operand {i} is {n}\n" for i, n in enumerate(self.names))
        return f"{names}{nodes}\n{self}\ndeterminism {self.determinism}"

    def _compares(self, me: int) -> bool:
        """Whether a call of this rank compares the program with that of the others."""
        if not self._planned or (me in self._numbered and config.comm_check == "once"):
            return False
        return transport().size > 1

    def _numbers(self, label: MessageLabel) -> list[tuple[CallSequence, int]]:
        """The sequences of the groups that its collectives belong to, and what it is in them."""
        found = [sequence_of(make_group(self.mesh, axes))
                 for axes in dict.fromkeys(c.axes for c in self._planned) if axes]
        return [(s, s.number_of(label, [*self._plain_names.values()])) for s in found]

    @functools.cached_property
    def _plain_names(self) -> dict[int, str]:
        return {i: operand_name(i, self.source.inputs[i].aval, None, self.names)
                for i in self._plain}


def _bytes_of(node: Node) -> int:
    return sum(stored_bytes(extents(v.aval), v.aval.dtype) for v in node.inputs)


NOT_NUMBERED: tuple[Any, list[tuple[CallSequence, int]]] = None, []
IN_WINDOWS = frozenset({"all_reduce", "reduce_scatter", "all_gather"})
LEAST_WINDOW_BYTES = 8 << 20  # that a rank gets in one message: opening takes milliseconds


@dataclass(frozen=True)
class ResultKinds:
    """What is known of the results of a program before it has run."""

    shapes: Sequence[tuple[int, ...]]
    types: Sequence[NumericType]
    layouts: Sequence[Layout]
    origins: Sequence[Any] = ()  # none without

    def with_origins(self) -> ResultKinds:
        return replace(self, origins=origins(len(self.shapes)))

    def tensors(self, held: Sequence[dict[int, Tensor]]) -> list[DistTensor]:
        """The results of which these are the parts."""
        return DistTensor.of_many(held, self.shapes, self.types, self.layouts, self.origins)

    def of(self, numbers: Sequence[int]) -> ResultKinds:
        """Of some of the results."""
        return ResultKinds([self.shapes[j] for j in numbers], [self.types[j] for j in numbers],
                           [self.layouts[j] for j in numbers],
                           [self.origins[j] for j in numbers] if self.origins else ())


def _parts_of(given: Sequence[Tensor], rank: int) -> list[Tensor]:
    """A rank's parts of distributed tensors, and the others."""
    return [t.read_parts[rank] if type(t) is DistTensor else t for t in given]


def _one_mesh(graph: Graph, layouts: Sequence[Layout | None]) -> Mesh:
    """The mesh of all operands. Raises MeshError that shows each of them when there are two."""
    meshes = list(dict.fromkeys(at.mesh for at in layouts if at is not None))
    if len(meshes) == 1:
        return meshes[0]
    values = [*graph.inputs, *(v for v, _ in graph.captures)]
    rows = [f"  operand {i}: {v.aval} in {at}"
            for i, (v, at) in enumerate(zip(values, layouts, strict=True)) if at is not None]
    raise MeshError("\n".join([f"{graph.name}: tensors of different meshes meet", *rows]),
                    where=user_line(), code="E_MESH_CONFLICT",
                    hint="move one: ts.dist.distribute(x, spec, mesh=mesh) lays it out on the "
                    "other's mesh, x.numpy() is an array that every rank has whole")


# --- one op, now ---------------------------------------------------------------------------------
_PROGRAMS: dict[Any, ShardedProgram] = {}
_MOST = 512


def run_op(op: GraphOp, args: Sequence[Tensor], attrs: dict[str, Any]) -> Any:
    """op(*args) on distributed tensors, outside of any trace."""
    layouts = tuple(a.layout for a in args)
    avals = tuple(Aval(a.shape, a.type) for a in args)
    key = _key(op, avals, layouts, attrs)
    found = _PROGRAMS.get(key) if key is not None else None
    if found is None:
        inputs, outputs = (tuple(map(Value, a)) for a in (avals, infer(op, avals, attrs)))
        node = Node(op, inputs, attrs, outputs, user_line())
        found = ShardedProgram(Graph(op.name, inputs, (), (node,), outputs), layouts)
        if key is not None:
            if len(_PROGRAMS) >= _MOST:
                _PROGRAMS.clear()
            _PROGRAMS[key] = found
    try:
        made = tuple(found.run(args))
    except TesseraError as err:
        if err.where == found.source.nodes[0].where:  # that of the call that made the program
            err.where = user_line()
        raise
    return made if op.multi else made[0]


def _key(op: GraphOp, avals: tuple, layouts: tuple, attrs: dict[str, Any]) -> Any:
    key = (op.name, avals, layouts, tuple(sorted((k, repr(v)) for k, v in attrs.items())),
           config.determinism, config.get("numerics") != "off" and user_line())  # of reports
    return None if op.graph_attrs else key


class _Distributed:
    """What the graph layer calls."""

    program = ShardedProgram
    run_op = staticmethod(run_op)


hooks.distributed.fill(_Distributed())
__all__ = ["ShardedProgram", "run_op"]
