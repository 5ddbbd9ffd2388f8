"""Tile IR -> the warp-specialised program: the passes in order."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from tessera.runtime.generations import Generation
from tessera.tile.cuda.lower.dependent_launch import NEXT, WAIT
from tessera.tile.cuda.lower.warp_specialised import ops  # noqa: F401  registers them
from tessera.tile.cuda.lower.warp_specialised.check import check_slots
from tessera.tile.cuda.lower.warp_specialised.clusters import drains, share_loads
from tessera.tile.cuda.lower.warp_specialised.defaults import complete, nonempty, rows_of
from tessera.tile.cuda.lower.warp_specialised.defer_row_sums import defer_sums
from tessera.tile.cuda.lower.warp_specialised.divide import divide_iterations
from tessera.tile.cuda.lower.warp_specialised.guards import guard_masks, guard_rescales
from tessera.tile.cuda.lower.warp_specialised.layouts import place_tiles
from tessera.tile.cuda.lower.warp_specialised.masks import unify_masks
from tessera.tile.cuda.lower.warp_specialised.operands import place_operands
from tessera.tile.cuda.lower.warp_specialised.own_iterations import own_loops, whole_loops
from tessera.tile.cuda.lower.warp_specialised.persist import (
    choose_order,
    loop_over_tiles,
    rank_of,
    runs_of,
)
from tessera.tile.cuda.lower.warp_specialised.pins import place_pins
from tessera.tile.cuda.lower.warp_specialised.program import (
    PANEL_BYTES,
    PANEL_ROWS,
    PipelineKnobs,
    Refusal,
    Refused,
    WarpSpecialisedProgram,
    panel_bytes,
    panels_offset,
)
from tessera.tile.cuda.lower.warp_specialised.qualify import check_memory, qualify
from tessera.tile.cuda.lower.warp_specialised.registers import hold_operands
from tessera.tile.cuda.lower.warp_specialised.releases import place_releases
from tessera.tile.cuda.lower.warp_specialised.results import widen_stores
from tessera.tile.cuda.lower.warp_specialised.rewrite import Maker, Nodes, ops_in, out
from tessera.tile.cuda.lower.warp_specialised.rings import form_rings
from tessera.tile.cuda.lower.warp_specialised.roles import (
    ahead_of,
    consumer_of,
    dealer_of,
    producer_of,
)
from tessera.tile.cuda.lower.warp_specialised.rotate import overlap
from tessera.tile.cuda.lower.warp_specialised.shorten_names import base_name, shorten_names
from tessera.tile.cuda.lower.warp_specialised.sink import sink_loads
from tessera.tile.cuda.lower.warp_specialised.skip import skip_iterations, skip_rows
from tessera.tile.cuda.lower.warp_specialised.split import split_loops
from tessera.tile.cuda.lower.warp_specialised.turns import place_turns
from tessera.tile.cuda.lower.warp_specialised.waits import place_waits
from tessera.tile.ir.ir import Function, If, Node, Op
from tessera.tile.ir.op_record import OPS
from tessera.tile.passes import merge, simplify, verify
from tessera.tile.passes.integer_facts import Knowledge
from tessera.tile.passes.single_iterations import inline_single_iterations


def lower_warp_specialised(function: Function, schedule: Any, facts: Any, generation: Generation,
                           reserved: int = 0) -> WarpSpecialisedProgram | Refusal:
    """The program, or why there is none.

    schedule: stages, warps, and extra parameters named as the fields of PipelineKnobs; the form
    brings its own threads. facts: divisible extents and aligned tensors. reserved: bytes of shared
    memory that rings may not use.
    """
    try:
        knobs = pipeline_of(schedule, dict(function.constants))
        if knobs == PipelineKnobs() and ops_in(function.body, "store_scatter", "store_element"):
            with suppress(Refused):  # such results leave by threads: beside them another multiplies
                return _lower(function, replace(knobs, resident=2, beside=2), facts, generation,
                              reserved)
        return _lower(function, knobs, facts, generation, reserved)
    except Refused as why:
        return why.refusal


def pipeline_of(schedule: Any, constants: Mapping[str, Any] = MappingProxyType({})
                ) -> PipelineKnobs:
    """What the user's schedule fixes. Extra parameters are spelled in capitals: PIN=8. A kernel's
    own parameter of such a name is one, too.

    Stages and warps that the compiler proposed were for the other form.
    """
    own = PipelineKnobs().override({n.lower(): x for n, x in constants.items() if n.isupper()})
    chosen: dict[str, Any] = {}
    if schedule is not None:
        if schedule.unit_ == "mma":
            raise Refused("its schedule asks for mma")
        chosen = {name.lower(): value for name, value in schedule.extra}
        chosen |= {} if schedule.cluster_ is None else {"cluster": schedule.cluster_}
    if schedule is not None and schedule.source != "auto":
        if schedule.stages_ is not None:
            chosen["stages"] = schedule.stages_
        if schedule.warps_ is not None and schedule.warps_ >= 4:
            chosen["warpgroups"] = schedule.warps_ // 4
    made = own.override(chosen)
    return replace(made, resident=max(made.resident, made.beside))


def _lower(function: Function, pipeline: PipelineKnobs, facts: Any, generation: Generation,
           reserved: int) -> WarpSpecialisedProgram:
    form = generation.warpgroup_matmul
    if form is None:
        raise Refused(f"{generation.target} has no wgmma")
    function, pipeline = _begun_early(function, pipeline)
    qualify(function)
    function = simplify(merge(unify_masks(inline_single_iterations(function))))
    maker = Maker(function)
    known = _knowledge(function, facts)
    whole_bytes = generation.room_of(pipeline.resident)
    function = simplify(place_operands(function, maker, known, facts.aligned, form, pipeline,
                                       whole_bytes - reserved))
    check_memory(function, getattr(facts, "shared", False))
    function, pipeline = divide_iterations(function, pipeline, maker)
    pipeline = complete(pipeline, function, maker, generation)
    rings = form_rings(function.body, maker, pipeline, whole_bytes - reserved,
                       2 * panel_bytes(pipeline.warpgroups or 1))
    order = choose_order(function, pipeline, form.defaults)
    pipeline, order, rings = share_loads(function, pipeline, order, rings)
    producer = producer_of(replace(function, body=whole_loops(function.body)), rings, maker)
    consumer = _consumer(function, rings, maker, pipeline, known, form.rows)
    runs = runs_of(function, pipeline)
    consumer, producer = (loop_over_tiles(function, nodes, order, maker, pipeline, is_producer,
                                          form.defaults, runs)
                          for nodes, is_producer in ((consumer, False), (producer, True)))
    if pipeline.turns and (pipeline.warpgroups or 0) > 1:
        consumer = place_turns(consumer, maker)
    dealer = dealer_of(producer, rings, maker)
    ahead = ahead_of(producer, rings, maker, pipeline.ahead)
    producer = (*producer, *drains(rings, maker))
    producer, _ = maker.copy(producer, {})
    fills = (*_by_some("is_first", producer, maker), *_by_some("is_dealer", dealer, maker))
    whole = replace(function, body=(*_by_some("is_ahead", ahead, maker),
                                    *_roles(fills, consumer, pipeline, maker)))
    whole = verify(shorten_names(simplify(whole)))
    assert pipeline.warpgroups is not None
    whole = place_tiles(whole, pipeline.warpgroups, getattr(facts, "shared", False), generation)
    room = whole_bytes - reserved - panels_offset(rings, pipeline)
    whole, buffers = widen_stores(whole, pipeline.warpgroups, _knowledge(whole, facts), facts,
                                  room // panel_bytes(pipeline.warpgroups),
                                  1 if runs is None else 2)
    return WarpSpecialisedProgram(whole, rings, pipeline, rank_of(function), rows_of(function),
                                  form, _notes(rings, pipeline, buffers), buffers,
                                  order.order[order.outer])


def _begun_early(function: Function, pipeline: PipelineKnobs) -> tuple[Function, PipelineKnobs]:
    """A kernel's own wait for the one in front of it, in front of all that touches memory, is that
    of the form: all threads wait as they begin, and the next kernel may begin then."""
    names = [n.name if isinstance(n, Op) else "" for n in function.body]
    before = function.body[:names.index(WAIT)] if WAIT in names else function.body
    if WAIT not in names or any(not isinstance(n, Op) or OPS[n.name].effect != "pure"
                                for n in before):
        return function, pipeline
    body = tuple(n for n, name in zip(function.body, names, strict=True)
                 if name not in (WAIT, NEXT))
    return replace(function, body=body), replace(pipeline, dependent=True)


def _knowledge(function: Function, facts: Any) -> Knowledge:
    return Knowledge(function, facts.divisible, getattr(facts, "eights", frozenset()))


def _consumer(function: Function, rings: Any, maker: Maker, pipeline: PipelineKnobs,
              known: Knowledge, rows: int) -> Nodes:
    nodes = whole = consumer_of(function, rings, maker)
    nodes = own_loops(nodes, maker, rows * (pipeline.warpgroups or 0))
    if pipeline.a_in_registers:
        nodes = hold_operands(nodes, maker)
    nodes = guard_masks(sink_loads(nodes), maker)
    if pipeline.guard_rescale:
        nodes = guard_rescales(nodes, maker)
    if pipeline.overlap:
        nodes = overlap(nodes, maker, nonempty(function, known), int(pipeline.overlap))
    if pipeline.split:
        nodes = split_loops(nodes, maker)
    nodes = place_waits(nodes, maker, pipeline.in_flight or 0, pipeline.resident == 1)
    nodes = place_releases(nodes, maker)
    if pipeline.skip:
        nodes = skip_iterations(nodes, maker)
    check_slots(nodes)
    nodes = defer_sums(nodes, maker, rows_of(function))
    if pipeline.pin:
        nodes = place_pins(nodes, maker, pipeline.pin)
    if pipeline.skip:
        nodes = skip_rows(nodes, whole, function, maker)
    return nodes


def _by_some(which: str, nodes: Nodes, maker: Maker) -> Nodes:
    """What those threads of the producer do of which an op of this name says so."""
    if not nodes:
        return ()
    some = maker.op(which, (), which.removeprefix("is_"))
    return (some, If(out(some), nodes, (), (), (), ()))


def _roles(producer: Nodes, consumer: Nodes, pipeline: PipelineKnobs, maker: Maker) -> Nodes:
    """One function of both: a branch of warpgroups."""
    role = maker.op("is_producer", (), "producer")
    fewer: list[Node] = []
    more: list[Node] = []
    if pipeline.registers is not None:
        few, many = pipeline.registers
        fewer = [maker.op("set_registers", (), registers=few, how="dec")]
        more = [maker.op("set_registers", (), registers=many, how="inc")]
    return (role, If(out(role), (*fewer, *producer), (*more, *consumer), (), (), ()))


def _notes(rings: Any, pipeline: PipelineKnobs, buffers: int) -> tuple[str, ...]:
    held = [f"ring {r.name}: {r.slots} x {r.slot_bytes} bytes of "
            f"{', '.join(dict.fromkeys(base_name(x.name) for x in r.loads))}" for r in rings]
    if buffers:
        held.append(f"results leave by TMA: {buffers} x {PANEL_ROWS * PANEL_BYTES} bytes a warp")
    knobs = ", ".join(f"{k}={v}" for k, v in vars(pipeline).items() if v is not None)
    return ("matmuls by wgmma, loads by TMA, warpgroups specialised", *held, knobs)
