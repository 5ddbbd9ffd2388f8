"""Pipelines: a model in stages, each on ranks of its own, through which microbatches stream.

    pipe = ts.pipeline([embed, block, head], microbatches=8)
    y = pipe(params, x)
    step = pipe.value_and_grad(loss_fn)
    loss, grads = step(params, x, targets)

A stage is a function stage(params, x) -> y. Stage s runs on the ranks at place s of the mesh axis
"pp" (s modulo its size), with that part of the mesh as the current one. Without such a mesh, and in
a program that runs alone, all stages run here, in the order of the same schedule.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import field
from typing import Any

import numpy as np

from tessera.dims import show_shape
from tessera.errors import ArgumentError, GradError, ShapeError, TraceError
from tessera.graph import tree
from tessera.graph.iterations import iterating
from tessera.graph.jit import JitFunction
from tessera.graph.signature import Static, callable_name, hashable, is_data
from tessera.graph.trace import current_builder
from tessera.numerics import as_type, fold_in
from tessera.numerics import random_state as rng
from tessera.runtime.buffer import DEFAULT
from tessera.runtime.copies import StreamEvent
from tessera.runtime.device import device
from tessera.tensor import Tensor, as_tensor

from ...lazy_dataclass import dataclass
from ..collectives.functions import all_gather, all_reduce, broadcast
from ..collectives.replicated import Same
from ..device_mesh import Mesh
from ..ranks.group import make_group
from ..ranks.ledger import agree, call
from ..tensor import moved_to_mesh
from ..world import patience, transport
from .batches import (
    added,
    batch_rows,
    join_batches,
    like_params,
    own_copy,
    rows_of,
    split_batch,
    sums_of_gradients,
)
from .forward_backward import Halves, Residuals
from .schedules import Backward, Forward, PipelineSchedule, PipelineStep, schedule
from .stage_messages import Shelf, StageLink, Wire, onto
from .stage_ranks import PipelineRanks, find_place
from .stage_trees import StageTrees, mark_stages
from .tied_parameters import find_untied, parse_ties, sum_tied
from .timeline import Timeline

Moment = float | StreamEvent  # seconds of this computer, or what a GPU has come to then


@dataclass(frozen=True)
class Event:
    """One step as it ran: when its computation began and ended."""

    step: PipelineStep
    begin: Moment
    end: Moment


def _now(index: int | None) -> Moment:
    """On the host; or when the GPU gets here."""
    return time.perf_counter() if index is None else StreamEvent(device(index), DEFAULT, timed=True)


def _seconds(moments: Sequence[Moment], index: int | None) -> list[float]:
    """Of this computer's clock."""
    now = _now(index)
    if isinstance(now, float):
        return [m for m in moments if isinstance(m, float)]
    now.seconds_since(now)  # it is there
    seconds = time.perf_counter()
    return [seconds - now.seconds_since(m) for m in moments if isinstance(m, StreamEvent)]


class Pipeline:
    """A model in stages. Make one with `ts.pipeline`."""

    def __init__(self, stages: Sequence[Callable], microbatches: int, kind: str, axis: str,
                 mesh: Mesh | None, tied: Sequence[Sequence[str]]):
        self.stages, self.microbatches, self.kind = tuple(stages), microbatches, kind
        self.axis, self.mesh = axis, mesh
        self.tied = parse_ties(tied, len(self.stages))
        self._functions = [JitFunction(stage) for stage in self.stages]
        self.compiled = CompiledHalves()
        self.draws: dict[Any, bool] = {}  # whether a call takes a random step, by kind of schedule,
        # mesh and rank: the ranks of a simulation may share a pipeline
        self._events: dict[int, tuple[PipelineSchedule, list[Event]]] = {}

    # --- using it -----------------------------------------------------------------------------
    def __call__(self, params: Sequence[Any], x: Any) -> Any:
        """The last stage's results on x, on the ranks of the last stage; None on all others.

        params: one tree per stage; None for stages of other ranks   x: tensors, or a tree of them,
        whose first dimension is the batch, the same on every rank
        """
        with patience(first=not any(f.specializations for f in self._functions)):
            outputs = self._outputs(_Run(self, params, x, (), "forward"))
        return join_batches(outputs) if outputs else None

    def _outputs(self, run: _Run) -> list[Any]:
        """What the last stage gives for each microbatch."""
        outputs: list[Any] = []
        for step in run.steps:
            x, _ = run.take(step)
            value = run.timed(step, self._functions[step.stage], run.params[step.stage], x)
            if step.stage == len(self.stages) - 1:
                outputs.append(value)
            else:
                run.link.put(Forward(step.microbatch, step.stage + 1), value)
        run.close()
        return outputs

    def value_and_grad(self, loss_fn: Callable) -> PipelineTraining:
        """A function (params, x, *targets, loss_scale=1.0) -> (loss, grads).

        loss_fn(y, *targets) -> a float scalar, the mean over the rows of a microbatch. The loss is
        the mean over all rows, on every rank; grads has one tree per stage, None for stages of
        other ranks, and is a list that `ts.optim.clip_by_global_norm`, `ts.optim.global_norm` and
        `ts.DynamicLossScale` take as the whole model's: every rank asks them. loss_scale: what the
        gradients, not the loss, are times. Make the function once and call it in each step: stages
        are compiled at the first call.
        """
        return PipelineTraining(self, loss_fn)

    def show(self, kind: str | None = None) -> Timeline:
        """The planned timeline as a picture: `print(pipe.show())`; a notebook shows it in colour.

        kind: "forward" for that of an evaluation."""
        return self.plan(kind or self.kind).timeline

    def trace(self) -> Timeline:
        """What ran when in the latest call, on all stages. Every rank must ask for it.

        Times are those of the computer's clock, on GPUs of when they came to a step and were done
        with it: compare ranks of one computer only. Raises ArgumentError before the first call.
        """
        place, me = self.place(), transport().rank
        if me not in self._events:
            raise ArgumentError("the pipeline has not run yet", hint="call it first")
        plan, events = self._events[me]
        times = iter(_seconds([m for e in events for m in (e.begin, e.end)], place.gpu))
        rows = np.array([[e.step.microbatch, e.step.stage, isinstance(e.step, Backward),
                          next(times), next(times)] for e in events], np.float64)
        if place.me is not None:
            rows = all_gather(Tensor(rows, as_type("f64")), self.axis, dim=0,
                              mesh=place.mesh).numpy()
        return plan.picture([((Backward if b else Forward)(int(i), int(s)), begin, end)
                             for i, s, b, begin, end in rows.tolist()], unit_s=1.0)

    def __repr__(self) -> str:
        return (f"<pipeline of {', '.join(map(callable_name, self.stages))}: {self.kind}, "
                f"{self.microbatches} microbatches>")

    # --- where it runs ------------------------------------------------------------------------
    def place(self) -> PipelineRanks:
        """Where a call runs now."""
        return find_place(self.axis, self.mesh, len(self.stages))

    def plan(self, kind: str) -> PipelineSchedule:
        """The schedule of a call now: kind is "1f1b", "gpipe", or "forward" for an evaluation."""
        return schedule(kind, len(self.stages), self.microbatches, self.place().ranks)


class CompiledHalves:
    """The compiled halves of functions, by rank, stage, part of the mesh and kinds of arguments: a
    graph with collectives knows its rank, and the ranks of a simulation may share a pipeline."""

    def __init__(self) -> None:
        self._found: dict[Any, Halves] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def get(self, fn: Callable, stage: int, part: Mesh | None, args: tuple, same: Sequence[Same],
            read: Sequence[Callable] = ()) -> Halves:
        flat, structure = tree.flatten(args)
        kinds = tuple(map(_kind_of, tree.paths(structure), flat))
        key = (transport().rank, stage, part, structure, kinds, tuple(same))
        if key not in self._found or self._found[key].outdated():
            self._found[key] = Halves(fn, args[0], args[1], args[2:], same, read)
        return self._found[key]


def _kind_of(path: str, leaf: Any) -> Any:
    """What a trace knows of an argument: strings and other objects are constants of it."""
    if not is_data(leaf) or isinstance(leaf, bool):
        return hashable(Static(leaf), "a stage", path)
    t = as_tensor(leaf)
    return t.shape, t.type, t.layout, t.is_param


class PipelineTraining:
    """What `pipe.value_and_grad(loss_fn)` returns."""

    def __init__(self, pipe: Pipeline, loss_fn: Callable):
        if not callable(loss_fn):
            raise ArgumentError(f"value_and_grad needs a loss function, got {loss_fn!r}",
                                hint="pipe.value_and_grad(loss_fn)(params, x, targets)")
        self.pipe, self.compiled, self.sums = pipe, CompiledHalves(), sums_of_gradients()
        self.loss_fn = loss_fn
        self.last = len(pipe.stages) - 1
        self._seeds: dict[tuple[float, bool, int | None], Tensor] = {}

        def with_loss(params: Any, x: Any, *targets: Any) -> Tensor:
            y = pipe.stages[-1](params, x)
            return _need_loss(loss_fn(y, *targets), callable_name(loss_fn))

        with_loss.__name__ = callable_name(pipe.stages[-1])
        self._with_loss = with_loss

    def __call__(self, params: Sequence[Any], x: Any, *targets: Any,
                 loss_scale: float | Tensor = 1.0) -> tuple[Tensor, StageTrees]:
        scale = float(loss_scale)
        with patience(first=not (self.compiled or self.pipe.compiled)):
            return self._step(_Run(self.pipe, params, x, targets, self.pipe.kind), params, scale)

    def _step(self, run: _Run, params: Sequence[Any], scale: float) -> tuple[Tensor, StageTrees]:
        find_untied(params, self.pipe.tied)
        made = _StepState(scale)
        for step in run.steps:
            if isinstance(step, Forward):
                self._forward(run, made, step)
            else:
                self._backward(run, made, step)
        run.close()
        grads = StageTrees([like_params(made.grads.get(s), run.params[s])
                            for s in range(self.last + 1)], run.place, self.pipe.tied)
        sum_tied(self.pipe.tied, grads, run.params, run.place, self.sums)
        mark_stages(grads)
        return self._loss(run, made), grads

    def _forward(self, run: _Run, made: _StepState, step: PipelineStep) -> None:
        i, s = step.microbatch, step.stage
        last = s == self.last
        x, same = run.take(step)
        args = (run.params[s], x, *(run.targets[i] if last else ()))
        with run.on(s) as part:
            stage = self.pipe.stages[s]
            halves = self.compiled.get(self._with_loss, s, part, args, same, (stage, self.loss_fn)
                                       ) if last else \
                self.pipe.compiled.get(stage, s, part, args, same)
        value, kept = run.timed(step, halves.run, *args)
        made.kept[i, s] = halves, kept
        if last:
            made.losses.append((run.weight(i), value))
            return
        run.link.put(Forward(i, s + 1), value, halves.made_same)
        run.link.await_cotangents(Backward(i, s), value, halves.moves)

    def _backward(self, run: _Run, made: _StepState, step: PipelineStep) -> None:
        i, s = step.microbatch, step.stage
        halves, kept = made.kept.pop((i, s))
        if s == self.last:
            wide = made.losses[-1][1].dtype.name == "f64"
            seed = made.scale * run.weight(i) / halves.copies
            cotangents = [self._seed(seed, wide, run.place)]
        else:
            cotangents, _ = run.link.take(step)
        dp, dx = run.timed(step, halves.pull, kept, cotangents)
        if s:
            run.link.put(Backward(i, s - 1), tree.flatten(dx)[0])
        made.grads[s] = added(made.grads[s], dp, self.sums, halves.largest) \
            if s in made.grads else own_copy(dp)

    def _seed(self, value: float, wide: bool, place: PipelineRanks) -> Tensor:
        """The cotangent of a loss. On a GPU it is copied there once: a copy waits for the kernels.
        """
        key = value, wide, place.gpu
        if key not in self._seeds:
            self._seeds[key] = moved_to_mesh(_scalar(value, wide), place.mesh)
        return self._seeds[key]

    def _loss(self, run: _Run, made: _StepState) -> Tensor:
        """The loss on every rank: that of the last stage's."""
        place = run.place
        loss = sum(weight * float(value.item()) for weight, value in made.losses)
        wide = any(value.dtype.name == "f64" for _, value in made.losses)
        if place.me is not None:
            mine = Tensor(np.array([loss, wide], np.float64), as_type("f64"))
            root = (len(self.pipe.stages) - 1) % place.ranks
            loss, wide = broadcast(mine, place.axis, root=root, mesh=place.mesh).tolist()
        return _scalar(loss, wide)


def _scalar(value: float, wide: bool) -> Tensor:
    numeric = as_type("f64" if wide else "f32")
    return Tensor(np.array(value, numeric.dtype.numpy), numeric)


def _need_loss(loss: Any, name: str) -> Tensor:
    if not isinstance(loss, Tensor) or loss.ndim or loss.dtype.kind != "float":
        got = f"{loss.type}{show_shape(loss.shape)}" if isinstance(loss, Tensor) else \
            type(loss).__name__
        raise GradError(f"{name} must return a float scalar, it returns {got}",
                        hint="the mean over the rows of a microbatch: ts.mean(...)")
    return loss


@dataclass
class _StepState:
    """What a training step has so far: residuals by (microbatch, stage), gradients by stage, and
    the loss of each microbatch with its weight. scale: of the gradients."""

    scale: float
    kept: dict[tuple[int, int], tuple[Halves, Residuals]] = field(default_factory=dict)
    grads: dict[int, Any] = field(default_factory=dict)
    losses: list[tuple[float, Tensor]] = field(default_factory=list)


class _Run:
    """One call of a pipeline on this rank: its steps, its microbatches and its link."""

    def __init__(self, pipe: Pipeline, params: Sequence[Any], x: Any, targets: tuple, kind: str):
        if current_builder() is not None:
            raise TraceError("a pipeline cannot be traced: it sends values between ranks as it "
                             "runs", hint="call it outside ts.jit; its stages are compiled")
        self.place = place = pipe.place()
        rows, count = rows_of(x, "x"), pipe.microbatches
        for t in targets:
            if rows_of(t, "targets") != rows:
                raise ShapeError(f"x has {rows} rows, the targets {rows_of(t, 'targets')}")
        self.rows = batch_rows([x, *targets], count, "the batch")
        plan = pipe.plan(kind)
        self.steps = list(plan.order if place.me is None else plan.steps[place.me])
        self.here = [place.me is None or s % place.ranks == place.me
                     for s in range(len(pipe.stages))]
        self.parts = place.parts
        self.params = self._params(pipe, params)
        self.x = split_batch(self.brought(x, self.parts[0]) if self.here[0] else None, count)
        last = self.brought(targets, self.part(len(pipe.stages) - 1)) if self.here[-1] else ()
        self.targets = split_batch(last, count)
        self.link = self._link(pipe, kind)
        self.kind, self.draws = kind, pipe.draws
        self.random, self.drew = rng.get_state(), False
        self.events: list[Event] = []
        pipe._events[transport().rank] = plan, self.events

    def _params(self, pipe: Pipeline, params: Sequence[Any]) -> list[Any]:
        if not isinstance(params, list | tuple) or len(params) != len(pipe.stages):
            got = f"{len(params)} entries" if isinstance(params, list | tuple) else type(params)
            raise ArgumentError(f"a pipeline of {len(pipe.stages)} stages takes one tree of "
                                f"parameters per stage, got {got}",
                                hint="[params of stage 0, params of stage 1, ...]; None for a "
                                "stage of other ranks")
        return [self.brought(tree_, self.part(s)) if self.here[s] else None
                for s, tree_ in enumerate(params)]

    def brought(self, value: Any, part: Mesh | None) -> Any:
        """A value where a stage uses it: on its part of the mesh, and on this rank's GPU."""
        return moved_to_mesh(onto(value, part), self.place.mesh)

    def part(self, stage: int) -> Mesh | None:
        return self.parts[stage % self.place.ranks]

    def _link(self, pipe: Pipeline, kind: str) -> StageLink:
        place = self.place
        if place.me is None:
            return Shelf(self.parts)
        assert place.mesh is not None
        group = make_group(place.mesh, (place.axis,))
        agree(group, call(group, "pipeline", (), None, {
            "stages": len(pipe.stages), "microbatches": pipe.microbatches, "schedule": kind,
            "rows": sum(self.rows)}))
        part = self.parts[place.me]
        assert part is not None
        peers = [place.world_rank(s) for s in range(len(pipe.stages))]
        if place.gpu is not None:
            from ..ranks.communicator import communicator
            from .stage_wires import NcclWire

            by = communicator(group, place.gpu)
            if by is not None:
                return NcclWire(self.rows, peers, part, by)
        return Wire(transport(), self.rows, peers, part, place.gpu)

    def take(self, step: PipelineStep) -> tuple[Any, Sequence[Same]]:
        """The input of a Forward step, and along which axes it is the same."""
        return self.link.take(step) if step.stage else (self.x[step.microbatch], ())

    @contextmanager
    def on(self, stage: int) -> Iterator[Mesh | None]:
        """Inside, the mesh is the part that has a stage."""
        part = self.part(stage)
        with nullcontext() if part is None else part:
            yield part

    def timed(self, step: PipelineStep, compute: Callable, *args: Any) -> Any:
        """Run a step on its part of the mesh, with the receives of the next two begun."""
        at = len(self.events) + 1
        for ahead in self.steps[at:at + 2]:
            if ahead.stage != (0 if isinstance(ahead, Forward) else len(self.here) - 1):
                self.link.expect(ahead)
        with self.on(step.stage), self.drawing(step), iterating("microbatches") as microbatch:
            microbatch(step.microbatch)
            begin = _now(self.place.gpu)
            out = compute(*args)
            self.events.append(Event(step, begin, _now(self.place.gpu)))
        return out

    @contextmanager
    def drawing(self, step: PipelineStep) -> Iterator[None]:
        """Inside, random numbers are those of this step, whichever ranks run the others and when:
        as many processes as there are draw the same masks."""
        key = np.array([0, 0], np.uint32)
        for part in (self.random.seed, self.random.step, step.microbatch, step.stage,
                     isinstance(step, Backward)):
            key = fold_in(key, part)
        own = rng.RandomState(int(key[0]) | int(key[1]) << 32)
        rng.set_state(own)
        try:
            yield
            self.drew = self.drew or rng.get_state() != own
        finally:
            rng.set_state(self.random)

    def weight(self, i: int) -> float:
        """The part of the batch that is microbatch i."""
        return self.rows[i] / sum(self.rows)

    def close(self) -> None:
        """Wait until everything is sent. A call whose stages draw takes one random step, on every
        rank; ranks tell each other so at their first call."""
        self.link.close()
        draws, place = self.drew, self.place
        if place.me is not None:
            key = self.kind, place.mesh, transport().rank
            if key not in self.draws:
                mine = Tensor(np.array([draws], np.int32), as_type("int32"))
                told = all_reduce(mine, place.axis, op="max", mesh=place.mesh)
                self.draws[key] = bool(told.tolist()[0])
            draws = self.draws[key]
        if draws:
            rng.next_step()


def pipeline(stages: Sequence[Callable], microbatches: int, *, schedule: str = "1f1b",
             axis: str = "pp", mesh: Mesh | None = None,
             tied: Sequence[Sequence[str]] = ()) -> Pipeline:
    """A model split into stages on the ranks of a mesh axis, with microbatches.

    stages: functions stage(params, x) -> y, as many as the axis has places or a multiple: rank r
    then has the stages r, r + ranks, ...   microbatches: into how many parts a batch is split,
    balanced where it does not divide   schedule: "1f1b" or "gpipe"   mesh: default the one whose
    `with` block is open   tied: groups of parameters that are one, by stage and name:
    [("0.embed", "3.embed")]; each gets the sum of their gradients
    Raises ArgumentError for what cannot be. Stages may use the other axes of the mesh.
    """
    if isinstance(stages, Callable) or not stages or not all(map(callable, stages)):  # type: ignore[arg-type]
        raise ArgumentError(f"a pipeline needs a list of functions, got {stages!r}",
                            hint="stage(params, x) -> y")
    made = Pipeline(stages, microbatches, schedule, axis, mesh, tied)
    made.plan(schedule)
    return made
