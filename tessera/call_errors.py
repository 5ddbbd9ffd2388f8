"""Calls whose arguments do not fit a function: one text for all that users call.

    except TypeError as err:
        raise call_error(name, signature, kwargs, err) from err

`refuse_wrong_calls` gives the plain functions of a public module that error.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from .argument_kinds import wrong_argument
from .errors import ArgumentError, TesseraError
from .foreign import keyword_instead

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class")
# What a call with a wrong argument fails with, where nothing has looked at the argument before.
FAILURES = (TypeError, ValueError, AttributeError, LookupError)


def show_call(name: str, signature: inspect.Signature | None) -> str:
    """`softmax(x, axis=-1)`: how a function is called, without annotations."""
    if signature is None:
        return f"{name}(...)"
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return name + str(inspect.Signature(bare))


def binding_problem(signature: inspect.Signature, args: tuple, kwargs: dict[str, Any]
                    ) -> TypeError | None:
    """Why arguments do not fit; None when they do."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as err:
        return err
    return None


def unknown_keyword(signature: inspect.Signature, kwargs: dict[str, Any]) -> str | None:
    """The first keyword that the function does not have."""
    parameters = signature.parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    return next((word for word in kwargs if word not in parameters), None)


def call_error(name: str, signature: inspect.Signature, kwargs: dict[str, Any],
               problem: TypeError, call: str | None = None) -> ArgumentError:
    """The error of a call that `signature.bind` refused: it names the nearest keyword, and all
    there are. A keyword that does not exist comes before an argument that is missing, which was
    most likely meant by it. call: how the function is called, where its signature does not say."""
    word, hint = unknown_keyword(signature, kwargs), call or show_call(name, signature)
    if word is None:
        return ArgumentError(f"{name}: {problem}", hint=hint)
    ours = keyword_instead(word, list(signature.parameters))
    return ArgumentError(f"{name}: got an unexpected keyword argument {word!r}",
                         hint=f"{ours}= instead of {word}=; {hint}" if ours else hint)


def call_refusal(name: str, fn: Callable, signature: inspect.Signature, args: tuple,
                 kwargs: dict[str, Any], call: str | None = None) -> ArgumentError | None:
    """The error of a call that failed for its arguments: they cannot be bound, or one is not what
    is annotated. None of a call that failed for something else."""
    if (problem := binding_problem(signature, args, kwargs)) is not None:
        return call_error(name, signature, kwargs, problem, call)
    wrong = wrong_argument(fn, signature, args, kwargs)
    if wrong is None:
        return None
    return ArgumentError(f"{name}: {wrong}", hint=call or show_call(name, signature))


def refuse_wrong_calls(module: ModuleType, prefix: str) -> None:
    """Of each function that a module offers, in the module and where it was declared: arguments
    that do not fit are an error of the user's line. dir(module) lists what it offers."""
    listed = getattr(module, "__all__", None)
    if listed and "__dir__" not in vars(module):
        module.__dir__ = lambda: sorted(listed)  # type: ignore[method-assign]
    for name, fn in list(vars(module).items()):
        offered = name in listed if listed else name[0] != "_"
        if offered and isinstance(fn, FunctionType) and not hasattr(fn, MARK) and \
                fn.__module__.startswith(f"{__package__}."):
            setattr(module, name, _refusing(f"{prefix}.{name}", fn))


def _refusing(name: str, fn: FunctionType) -> Callable:
    if fn not in _made:
        _made[fn] = refusing(name, fn)
        declared = sys.modules[fn.__module__]  # pickle finds a function there
        if getattr(declared, fn.__name__, None) is fn:
            setattr(declared, fn.__name__, _made[fn])
    return _made[fn]


def refusing(name: str, fn: Function) -> Function:
    """The function, whose arguments, where they do not fit, are an error that says `name`: those
    of a call that cannot be, and those that are not what is annotated, when it failed of them."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except TesseraError:
            raise
        except FAILURES as err:
            refusal = call_refusal(name, fn, inspect.signature(fn), args, kwargs)
            if refusal is None:
                raise
            raise refusal from err

    return refuses(call)  # type: ignore[return-value]


def refuse_wrong_init(cls: type[Class], how: str | None = None) -> type[Class]:
    """Decorator of a class: arguments that do not fit it are an error of the user's line. how: it
    is called, where its signature does not say."""
    made, signature = cls.__init__, inspect.signature(cls)

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            made(self, *args, **kwargs)
        except TesseraError:
            raise
        except FAILURES as err:
            refusal = call_refusal(cls.__name__, made, signature, args, kwargs, how)
            if refusal is None:
                raise
            raise refusal from err

    cls.__init__ = init  # type: ignore[method-assign]
    return cls


def refuses(fn: Function) -> Function:
    """Marks a function that gives the error itself."""
    setattr(fn, MARK, True)
    return fn


MARK = "__refuses_wrong_calls__"
_made: dict[Callable, Callable] = {}  # one that two modules offer stays one
