"""`ts.jit`: trace a function once per signature, cache the compiled graph, run it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import numpy as np

from .. import config, hooks
from ..call_errors import call_error
from ..errors import ArgumentError, EffectError, did_you_mean
from ..foreign import OPTIONS
from ..open_trace import trace_state, values_read
from ..runtime.arrays import HOST
from ..tensor import Tensor
from ..tile.launch.resident import adopted
from . import tree
from .annotate import fit_arguments, fit_returned, placements, tensor_annotations
from .call_forms import CallForm, CallForms, given_leaves
from .decorator import Decorator
from .devices import need_target, place_arguments, place_of_call, target_of
from .donation import check_donated, forget_origins, use_up
from .escapes import Arguments
from .inspected_function import InspectedFunction
from .ir import Graph, node_effects
from .kept_traces import Signatures
from .operand import describe
from .placed_leaves import FEW
from .prepared_call import KEPT, PreparedCall, leaf_key
from .regions.call import RegionCall, check_updates, close_regions, open_regions
from .regions.types import RegionType, region_annotations
from .short_keys import ShortKeys
from .signature import (
    Static,
    callable_name,
    find_signature,
    hashable,
    is_data,
    keeps_form,
    leaf_names,
    leaf_slots,
    leaf_tensors,
    mark_tracers,
    split_result,
    stand_in,
)
from .trace import Tracer, aval_of, current_builder, evaluate, trace
from .traced_signature import TracedSignature
from .weak_numbers import standing_for

KEYWORD = inspect.Parameter.KEYWORD_ONLY


class JitFunction(InspectedFunction):
    """A Python function that runs as a graph. Make one with `@ts.jit`.

    f.graph(*args), f.inspect_ir("graph"), f.infer(*types), f.effects, f.specializations, f.fn
    `allowed`: the effects that ts.pure and ts.effects permit, None for any.
    """

    def __init__(self, fn: Callable, *, static: str | int | Sequence[str | int] = (),
                 name: str | None = None, target: str | None = None,
                 allowed: frozenset[str] | None = None, cast: bool = False,
                 capture_graph: bool | None = None, donate: str | int | Sequence[str | int] = ()):
        if not callable(fn):
            raise ArgumentError(f"jit needs a function, got {type(fn).__name__}", hint="@ts.jit")
        functools.update_wrapper(self, fn, updated=())
        self.fn, self.name = fn, name or callable_name(fn)
        self.target = target if target is None else need_target(target)
        self.allowed, self.cast, self.capture_graph = allowed, cast, capture_graph
        self.signature = find_signature(fn)
        self.keeps_form = keeps_form(fn)
        self._forms = CallForms(self.signature, self.keeps_form)
        self.argument_names: Sequence[str] = ()  # of leaves, where the function's own tell nothing
        self.static = self._parameters("static", static)
        self.donate = self._parameters("donated", donate)
        self._cache = Signatures(self.name)
        self._groups: dict[tuple, tuple] = {}  # by surroundings: see hooks.together
        self._last: TracedSignature | None = None
        self._ready: list[PreparedCall] = []
        self._keys = ShortKeys()
        self._annotations: dict[str, Any] | None = None
        self._regions: dict[str, RegionType] | None = None

    # --- calling ------------------------------------------------------------------------------
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        form = self._forms.of(args, kwargs)
        if form is not None and trace_state.builder is None:
            given = form.values(args, kwargs)
            fast = None if self.donate else self._fast_call(form, given)
            if fast is not None:
                return fast
            for ready in () if self._groups else self._ready:
                if ready.given != form.given or not ready.is_here():
                    continue
                if self.donate and ready.steady.steps and not self._outdated(ready.traced):
                    out = ready.steady.call(given, self.name)
                    if out is not None:
                        self._last = ready.traced
                        self._cache.used(ready.traced)
                        return out
                leaves = ready.leaves(given)
                if leaves is None or self._outdated(ready.traced):
                    continue
                tensors = ready.tensors(leaves)
                if tensors is not None:
                    self._cache.used(ready.traced)
                    out = self._run(ready.traced, tensors)
                    ready.steady.keep(leaves, tensors, out)
                    return out
        return self._bound_call(args, kwargs, form)

    def _bound_call(self, args: tuple, kwargs: dict[str, Any], form: CallForm | None) -> Any:
        """A call that is like none of the last: found by its signature, or traced."""
        bound, call = self.bind(args, kwargs), None
        bound = (place_arguments(bound[0], self.placements, self.name), *bound[1:])
        if self.regions:
            call = RegionCall(self.name, self.regions, bound[0])
            bound = call.lend(bound[0]), *bound[1:]
        leaves, statics, key = self._split(*bound)
        known = self._cached(key)
        traced = self._new(leaves, statics, key) if known is None else known
        if form is not None and call is None and (known is None or trace_state.builder is None):
            given, mine = form.values(args, kwargs), given_leaves(form, leaf_names(key[0]), statics)
            if mine is not None and not mine[1]:
                self._remember(form, given, leaves, traced)
            if mine is not None and known is not None:
                self._prepare(form, given, mine, key[3], traced)
        self._last = traced
        if any(isinstance(x, Tracer) for x in leaves) or current_builder() is not None:
            if trace_state.read is not None:  # what it has read, the function around it has, too
                trace_state.read += traced.read
            return traced.result(evaluate(traced.graph, leaves), call)
        return self._run(traced, leaves, call)

    def _run(self, traced: TracedSignature, leaves: Sequence[Tensor],
             call: RegionCall | None = None) -> Any:
        self._last = traced
        if not traced.donated:
            return traced.run(leaves, call)
        parts = check_donated(leaves, traced.donated, traced.leaf_names, self.name)
        try:
            out = traced.run(leaves, call, parts)
        except BaseException:
            forget_origins(traced.pick_donated(leaves))
            raise
        use_up(traced.pick_donated(leaves), self.name, leaves)
        return out

    def _prepare(self, form: CallForm, given: tuple, mine: tuple[list[str], dict[int, Static]],
                 here: tuple, traced: TracedSignature) -> None:
        """Calls like this one are recognised without taking them apart leaf by leaf."""
        if traced.target == "cpu" and traced.layouts is None or self._forms.every is None or (
                self._groups or self.placements):
            return
        flat, structure = tree.flatten(given)
        like = traced, form.given, [*map(type, flat)]
        if any((r.traced, r.given, r.pattern.kinds) == like for r in self._ready):
            return
        made = PreparedCall.of(form, structure, flat, *mine, here, traced)
        if made is not None:
            self._ready = [made, *self._ready[:KEPT - 1]]

    def _fast_call(self, form: CallForm, given: tuple) -> Any:
        """The hot path: plain tensors of a known signature."""
        if self._groups or self.placements:
            return None
        key, leaves = self._keys.of(given)
        traced = None if key is None else self._cache.fast.get((form.given, key))
        if traced is None or self._outdated(traced):
            return None
        self._last = traced
        self._cache.used(traced)
        return traced.run(leaves)

    def _remember(self, form: CallForm, given: tuple, leaves: list, traced: TracedSignature
                  ) -> None:
        """leaves: the tensors of the arguments."""
        if self._groups:
            return
        few = traced.target == "cpu" or len(leaves) < FEW  # else all are asked at once
        key, flat = self._keys.of(given, few and traced.layouts is None and not traced.donated)
        if key is not None and len(flat) == len(leaves) and all(map(is_, flat, leaves)):
            self._cache.remember((form.given, key), [a.type for a in flat], traced)

    # --- signatures ---------------------------------------------------------------------------
    def _parameters(self, what: str, chosen: str | int | Sequence[str | int]) -> frozenset[str]:
        """The names of parameters that are given by name or place, one or several."""
        params = list(self.signature.parameters) if self.signature else []
        names = set()
        for s in (chosen,) if isinstance(chosen, str | int) else chosen:
            if isinstance(s, int) and -len(params) <= s < len(params):
                names.add(params[s])
            elif isinstance(s, str) and (s in params or not params):
                names.add(s)
            else:
                raise ArgumentError(f"{what} argument {s!r} is not a parameter of {self.name}",
                                    hint=did_you_mean(str(s), params))
        return frozenset(names)

    def bind(self, args: tuple, kwargs: dict) -> tuple[dict[str, Any], set[str], frozenset[str]]:
        """Arguments by parameter name, which of them this call leaves at their default: those are
        constants of the trace; and which it names, where that matters. Raises ArgumentError."""
        if self.signature is None:
            return {f"arg{i}": a for i, a in enumerate(args)} | kwargs, set(), frozenset()
        if (named := self._forms.by_position(args, kwargs)) is not None:
            return named, set(), frozenset()
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as err:
            raise call_error(self.name, self.signature, kwargs, err) from err
        if self.keeps_form:
            return dict(bound.arguments), set(), frozenset(kwargs)
        defaulted = self.signature.parameters.keys() - bound.arguments
        bound.apply_defaults()
        return dict(bound.arguments), defaulted, frozenset()

    def _is_static(self, name: str, value: Any) -> bool:
        if name in self.static:
            return True
        if isinstance(value, str | bool | np.bool_ | type(None)) or not is_data(value):
            return True
        param = self.signature.parameters.get(name) if self.signature else None
        return param is not None and param.kind is KEYWORD and not isinstance(
            value, Tensor | np.ndarray
        )

    def _split(self, bound: dict[str, Any], defaulted: set[str], named: frozenset[str]
               ) -> tuple[list[Tensor], dict, Any]:
        """Of bound arguments: tensor leaves, static values by leaf number, and the cache key."""
        leaves: list[Tensor] = []
        statics: dict[int, Static] = {}
        key: list[Any] = []
        flat, treedef = tree.flatten(bound)
        for i, (name, leaf) in enumerate(zip(leaf_names(treedef), flat, strict=True)):
            fixed = name in defaulted and not isinstance(leaf, Tensor | np.ndarray)
            if fixed or self._is_static(name, leaf):
                statics[i] = Static(leaf)
                key.append(hashable(statics[i], self.name, name))
                continue
            for t in leaf_tensors(adopted(leaf, name)):
                leaves.append(t)
                key.append(leaf_key(t))
            key.append(leaf.is_param if isinstance(leaf, Tensor) else None)
        here = self._surroundings(leaves)
        where = self._where(leaves, treedef, statics)
        return leaves, statics, (treedef, tuple(key), tuple(statics), here, where, named)

    def _where(self, leaves: list[Tensor], treedef: tree.TreeDef, statics: dict) -> str:
        """Where a call with these leaves runs: "cpu", "cuda:0"."""
        if self.target in (None, "cpu") and config.device in ("auto", "cpu") and not any(
                x.place != HOST for x in leaves) or current_builder() is not None:
            return "cpu"
        names = [n for i, n in enumerate(tree.paths(treedef)) if i not in statics]
        plain = [(n, x) for n, x in _named(names, leaves) if x.layout is None]
        return target_of(self.name, plain, self.target)  # others lie where their mesh says

    def _surroundings(self, leaves: list[Tensor]) -> tuple:
        here = tuple(look() for look in hooks.surroundings)
        known = self._groups.get(here)
        return (*here, hooks.together.get().extents(known, leaves, self.name)) if known else here

    def _cached(self, key: Any) -> TracedSignature | None:
        traced = self._cache.get(key)
        if traced is None or self._outdated(traced):
            return self._cache.back(key)
        return traced

    def _outdated(self, traced: TracedSignature) -> bool:
        """Whether a name by which a trace read something holds something else now: then it is
        forgotten, or put aside."""
        moved = None if traced.captured is None else traced.captured.rebound()
        if moved is None:
            return False
        self._cache.drop(traced, *moved)
        self._ready = [r for r in self._ready if r.traced is not traced]
        return True

    def _new(self, leaves: list[Tensor], statics: dict, key: Any) -> TracedSignature:
        """A new trace, under the key by which it is found again."""
        traced = self._trace(leaves, statics, key)
        here = key[3][:len(hooks.surroundings)]
        known = self._groups.get(here, ())
        more = tuple(g for g in hooks.together.get().groups(traced.graph) if g not in known)
        if more:
            self._groups[here] = known + more
            key = (*key[:3], self._surroundings(leaves), *key[4:])
        self._cache.keep(key, traced)
        return traced

    def _trace(self, leaves: list[Tensor], statics: dict, key: Any) -> TracedSignature:
        treedef = key[0]
        box: dict[str, Any] = {}

        def flat_fn(*tracers: Tensor) -> list[Tensor]:
            mark_tracers(tracers, leaves)
            it = map(standing_for, leaves, tracers)
            values: list[Any] = []
            for i, scale in enumerate(leaf_slots(treedef, statics, leaves)):
                if i in statics:
                    values.append(statics[i].value)
                    continue
                t = next(it)
                if scale is not None:
                    t.scale = next(it)
                values.append(t)
            bound = tree.unflatten(treedef, values)
            box["arguments"] = dict(bound)
            sizes = fit_arguments(bound, self.annotations, self.name, self.cast)
            regions = open_regions(self.regions, bound, sizes, self.name, self.cast)
            given = Arguments(bound)
            out = self._call(bound, key[5])
            given.tell_of_changes(out, self.name)
            out = fit_returned(out, self.annotations.get("return"), sizes, self.name)
            flat, box["tree"] = tree.flatten(out)
            tensors, box["rebuild"] = split_result(flat)
            box["updates"], held = close_regions(regions, tensors)
            return tensors + held

        mesh = next((x.layout.mesh for x in leaves if x.layout is not None), None)
        with values_read() as read:
            graph = trace(flat_fn, [aval_of(x) for x in leaves], self.name, mesh=mesh,
                          place=place_of_call(key[4], leaves))
        check_effects(graph, self.allowed)
        check_updates(self.name, box["updates"], self.allowed)
        for tell in hooks.compiled:
            tell(self)
        held = [*(x.layout for x in leaves), *(t.layout for _, t in graph.captures)]
        layouts = tuple(held) if any(x is not None for x in held) else None
        names = [n for i, n in enumerate(tree.paths(treedef)) if i not in statics]
        target = self._with_captures(graph, key[4], named := _named(names, leaves))
        donated = [i for i, (n, x) in enumerate(named)
                   if n.partition(".")[0] in self.donate and x.ndim]
        return TracedSignature(graph, box["tree"], box["rebuild"], target, box["arguments"],
                               box["updates"], layouts, self.capture_graph, donated,
                               [i for i, x in enumerate(leaves)
                                if x.offloaded and not x.dtype.packed],
                               self.argument_names or [n for n, _ in named],
                               [self.fn, *(x.value for x in statics.values())], read)

    def _with_captures(self, graph: Graph, where: str, named: list[tuple[str, Tensor]]) -> str:
        """Where a trace runs: its captured tensors on GPUs have a say too. Those on the host are
        copied where it runs."""
        there = [(f"the captured {describe(t)}", t) for _, t in graph.captures if t.place != HOST]
        return target_of(self.name, [*named, *there], self.target) if there else where

    def _call(self, bound: dict[str, Any], named: frozenset[str]) -> Any:
        if self.signature is None:
            return self.fn(*bound.values())
        rest = {n: v for n, v in bound.items() if n not in named}
        ba = inspect.BoundArguments(self.signature, rest)
        return self.fn(*ba.args, **ba.kwargs, **{n: v for n, v in bound.items() if n in named})

    # --- annotations --------------------------------------------------------------------------
    @property
    def annotations(self) -> dict[str, Any]:
        if self._annotations is None:
            self._annotations = tensor_annotations(self.fn)
        return self._annotations

    @functools.cached_property
    def placements(self) -> dict[str, str]:
        """The devices that annotations place arguments on, by name."""
        return placements(self.annotations)

    @property
    def regions(self) -> dict[str, RegionType]:
        """The parameters with a privilege, `Region[read]` and the like."""
        if self._regions is None:
            self._regions = region_annotations(self.fn)
        return self._regions

    # --- looking inside -----------------------------------------------------------------------
    def traced(self, *args: Any, **kwargs: Any) -> TracedSignature:
        """The traced signature of these arguments (tensors, arrays or tensor types)."""
        leaves, statics, key = self._split(*self.bind(
            tuple(stand_in(a) for a in args), {k: stand_in(v) for k, v in kwargs.items()}
        ))
        self._last = self._cached(key) or self._new(leaves, statics, key)
        return self._last

    def __getattr__(self, name: str) -> Any:
        """What the wrapped function carries: `.grad` of jit(autodiff(f))."""
        if name.startswith("_") or name == "fn":
            raise AttributeError(name)
        try:
            return getattr(self.fn, name)
        except AttributeError:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}") from None

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


def _named(names: Sequence[str], leaves: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """Each leaf with its name, which the scale behind a scaled tensor shares."""
    found: list[tuple[str, Tensor]] = []
    it = iter(names)
    for x in leaves:
        behind = bool(found) and found[-1][1].scale is x
        found.append((found[-1][0] + ".scale" if behind else next(it), x))
    return found


def check_effects(graph: Graph, allowed: frozenset[str] | None) -> None:
    """Raise EffectError at the first node with an effect that is not allowed. None allows all."""
    if allowed is None or graph.effects <= allowed:
        return
    for node in graph.nodes:
        extra = sorted(node_effects(node) - allowed)
        if extra:
            raise EffectError(
                f"{graph.name} has the effect {', '.join(extra)}: {node.op.name}",
                where=node.where,
                hint="allowed: " + (", ".join(sorted(allowed)) or "none (ts.pure)")
                + "; ts.effects(...) names those that may occur",
            )


@Decorator
def jit(fn: Callable | None = None, **options: Any) -> Any:
    """Compile a function of tensors: traced once per signature of shapes and types, then cached.

    static=("name", 2): parameters that are constants of the trace; keyword-only Python values,
    strings and bools are static anyway. Tuples, lists, dicts and registered classes pass through.
    target: by default where the arguments lie, all on the host or all on one GPU; "cpu", "cuda" or
    "cuda:1" say it, and then arguments on the host are copied to the GPU at each call.
    cast=True: arguments of another numeric type than their annotation's are cast, where it is a
    DTypeError otherwise. capture_graph: on a GPU, calls of a signature after its
    first are one launch, of a CUDA graph, where that can be; f.capture says whether they are.
    True: also without the setting cuda_graphs and where the program copies between host and GPU,
    and an error where it cannot be; False: never.
    donate=("params", 1): arguments that a call uses up. On a GPU a result takes their memory where
    it is read no more; on the host it is freed. Reading one afterwards is an ArgumentError.
    Raises ArgumentError where arguments lie in several places, UnsupportedTargetError at an op that
    the target does not have, TraceError where the function needs a value that is only traced.
    """
    known = ("static", "name", "target", "cast", "capture_graph", "donate")
    for option in options.keys() - set(known):
        raise ArgumentError(f"jit has no option {option!r}",
                            hint=OPTIONS.get(option) or did_you_mean(option, known))
    if fn is None:
        if options.get("target") is not None:
            need_target(options["target"])
        return Decorator(functools.partial(JitFunction, **options), "jit(...)")
    return JitFunction(fn, **options)
