"""What all transforms share: a derived function, its arguments by name, its trace."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from ..call_errors import binding_problem, call_error, show_call
from ..errors import ArgumentError
from ..graph.escapes import Arguments
from ..graph.ir import Graph
from ..graph.jit import JitFunction
from ..graph.op import Aval
from ..graph.signature import callable_name
from ..graph.trace import aval_of, current_builder, place_among, trace
from ..tensor import Tensor
from .subgraphs import Packed, Result

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
VAR_POSITIONAL = inspect.Parameter.VAR_POSITIONAL
VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD


class Transform:
    """A function derived from another. Composes with jit and with other transforms.

    Inside a trace `rule` runs there; outside it is compiled once per signature, as by `ts.jit`.
    """

    keeps_form = True  # an argument that is named is not what it is by position: see jit

    def __init__(self, fn: Callable, rule: Callable, name: str):
        self.fn, self.rule = fn, rule
        self.__name__ = self.__qualname__ = f"{name}({callable_name(fn)})"
        self.__doc__, self.__module__ = fn.__doc__, fn.__module__
        self.__signature__ = signature_of(fn)
        self._forms: dict[tuple, JitFunction] = {}
        self._last: JitFunction | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current_builder() is not None:
            return self.rule(*args, **kwargs)
        self._last = self.form(args, kwargs)
        return self._last(*args, **kwargs)

    def form(self, args: tuple, kwargs: dict) -> JitFunction:
        """The compiled rule for calls with so many positional and these keyword arguments.

        Defaults are left to fn: a transform acts on the arguments that a call gives.
        """
        key = (len(args), *kwargs)
        if key not in self._forms:
            signature = given_signature(self.__signature__, args, kwargs, self.__name__)
            static = static_names(self.fn) & set(signature.parameters)
            body = _spread_call(self.rule, len(args), signature)
            self._forms[key] = JitFunction(body, static=tuple(static), name=self.__name__)
        return self._forms[key]

    @property
    def compiled(self) -> JitFunction:
        """The form of the last call; before one, that with every argument by position."""
        if self._last is None:
            count = sum(p.kind in POSITIONAL for p in self.__signature__.parameters.values())
            self._last = self.form((None,) * count, {})
        return self._last

    def graph(self, *args: Any, **kwargs: Any) -> Graph:
        """The Graph IR for these arguments; of the last call when there are none."""
        return self._form_or_last(args, kwargs).graph(*args, **kwargs)

    def infer(self, *args: Any, **kwargs: Any) -> Any:
        """Result types without running; see jit."""
        return self._form_or_last(args, kwargs).infer(*args, **kwargs)

    def inspect_ir(self, level: str = "graph", *args: Any, **kwargs: Any) -> str:
        """The text of one level for these arguments; of the last call when there are none."""
        given = {k: v for k, v in kwargs.items() if k != "backward"}
        return self._form_or_last(args, given).inspect_ir(level, *args, **kwargs)

    def _form_or_last(self, args: tuple, kwargs: dict) -> JitFunction:
        return self.form(args, kwargs) if args or kwargs else self.compiled

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "fn":
            raise AttributeError(name)
        return getattr(self.compiled, name)

    def __repr__(self) -> str:
        return f"<{self.__name__}>"


def static_names(fn: Callable) -> frozenset[str]:
    """Parameters that jit was told to keep as constants, of the function or what it wraps."""
    found: Any = fn
    while found is not None and not isinstance(found, JitFunction):
        found = found.fn if isinstance(found, Transform) else getattr(found, "__wrapped__", None)
    return frozenset() if found is None else found.static


def signature_of(fn: Callable) -> inspect.Signature:
    """The signature of fn; `*args` when Python does not know it."""
    if isinstance(fn, JitFunction) and fn.signature is not None:
        return fn.signature
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return inspect.Signature([inspect.Parameter("args", VAR_POSITIONAL)])


def given_signature(signature: inspect.Signature, args: tuple, kwargs: dict, name: str
                    ) -> inspect.Signature:
    """The parameters that a call gives, without defaults: positional ones, then the named."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as err:
        raise call_error(name, signature, kwargs, err) from err
    known = signature.parameters
    names = [n for n, p in known.items() if p.kind in POSITIONAL][: len(args)]
    extra = next((n for n, p in known.items() if p.kind is VAR_POSITIONAL), "args")
    names += [f"{extra}_{i}" for i in range(len(args) - len(names))]
    made = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in names]
    free = [k for k in kwargs if k in known and known[k].kind in POSITIONAL]
    made += [inspect.Parameter(k, inspect.Parameter.POSITIONAL_OR_KEYWORD) for k in free]
    made += [inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY) for k in kwargs if k not in free]
    return inspect.Signature(made)


def _spread_call(rule: Callable, n_positional: int, signature: inspect.Signature) -> Callable:
    """The rule as a function of such a signature."""
    named = list(signature.parameters)[n_positional:]

    def body(*args: Any, **kwargs: Any) -> Any:
        rest = args[n_positional:]
        return rule(*args[:n_positional], **dict(zip(named, rest, strict=False)), **kwargs)

    body.__signature__ = signature  # type: ignore[attr-defined]
    return body


def need_function(fn: Any, what: str, given: Sequence[str] | None = None) -> None:
    """given: what it is called with, by position, where that is known. Raises ArgumentError."""
    if not callable(fn):
        raise ArgumentError(f"{what} needs a function, got {type(fn).__name__}",
                            hint=f"{what}(f)(x), not {what}(f(x))")
    if given is None:
        return
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # of a callable written in C
        return
    if (problem := binding_problem(signature, tuple(given), {})) is not None:
        name = callable_name(fn)
        raise ArgumentError(f"{what} calls {name}({', '.join(given)}): {problem}",
                            hint=f"it is declared {show_call(name, signature)}") from problem


# --- arguments by name ------------------------------------------------------------------------
def bind_slots(signature: inspect.Signature, args: tuple, kwargs: dict, fn: str) -> dict[str, Any]:
    """Arguments by name, defaults filled in; those of `*xs` are xs[0], xs[1], ..."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as err:
        raise call_error(fn, signature, kwargs, err) from err
    bound.apply_defaults()
    slots: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is VAR_POSITIONAL:
            slots.update((f"{name}[{i}]", v) for i, v in enumerate(value))
        elif kind is VAR_KEYWORD:
            slots.update(value)
        else:
            slots[name] = value
    return slots


def call_slots(signature: inspect.Signature, slots: dict[str, Any]) -> tuple[list, dict]:
    """The positional and keyword arguments that bind_slots took apart."""
    rest, args, kwargs = dict(slots), [], {}
    for name, param in signature.parameters.items():
        if param.kind is VAR_POSITIONAL:
            own = [k for k in rest if k.startswith(f"{name}[")]
            args += [rest.pop(k) for k in own]
        elif param.kind is inspect.Parameter.KEYWORD_ONLY:
            kwargs[name] = rest.pop(name)
        elif param.kind is not VAR_KEYWORD:
            args.append(rest.pop(name))
    return args, {**kwargs, **rest}


# --- tracing ----------------------------------------------------------------------------------
def trace_flat(call: Callable, packed: Packed, name: str, avals: Sequence[Aval] | None = None,
               repeats: bool = False) -> tuple[Graph, Result]:
    """The graph of call(value) over the tensors of a packed value, and how its result is built.
    repeats: see trace"""
    box: list[Result] = []

    def flat(*tracers: Tensor) -> list[Tensor]:
        value = packed.build(tracers)
        given = Arguments({"": value})
        made = call(value)
        given.tell_of_changes(made, name)
        box.append(Result(made))
        return box[0].tensors

    graph = trace(flat, avals or [aval_of(x) for x in packed.tensors], name, repeats=repeats,
                  place=place_among(packed.tensors))
    return graph, box[0]
