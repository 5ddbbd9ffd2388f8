"""Which arguments grad differentiates, and which leaves of them.

Arguments: those that are asked for, else those that hold `ts.param`s, else argument 0. Leaves: of
an argument that holds params these, of others all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import field
from typing import Any
from weakref import WeakKeyDictionary

from ..dims import show_shape
from ..errors import ArgumentError, GradError, did_you_mean, warn_user
from ..graph import tree
from ..graph.param_places import refuse_second_place
from ..lazy_dataclass import dataclass
from ..tensor import Tensor
from .reverse import is_differentiable
from .subgraphs import Packed


@dataclass
class Marks:
    """What was a `ts.param` in an earlier call of a function: arguments that held some in the
    latest call that had any, and leaves of arguments."""

    arguments: set[str] = field(default_factory=set)
    leaves: set[str] = field(default_factory=set)


_MARKS: WeakKeyDictionary[Callable, Marks] = WeakKeyDictionary()


def marks_of(fn: Callable) -> Marks:
    try:
        return _MARKS.setdefault(fn, Marks())
    except TypeError:  # neither hashable nor weakly referenced: remembered by this transform alone
        return Marks()


def choose_arguments(slots: dict[str, Any], signature: inspect.Signature, argnums: Any, wrt: Any,
                     fn: str, marked: Marks, defaulted: Collection[str] = ()
                     ) -> tuple[list[str], bool]:
    """(names of the arguments to differentiate, whether a gradient comes bare): in the order asked
    for, a sequence giving a tuple; else in that of the signature. `marked` is brought up to date.
    defaulted: those that the call does not give, which positions from the end do not count.
    """
    names = list(slots)
    if argnums is not None and wrt is not None:
        raise ArgumentError("give argnums or wrt, not both")
    several = isinstance(argnums if wrt is None else wrt, tuple | list | set)
    if argnums is not None:
        asked = _by_position(argnums, slots, signature, defaulted, fn)
    elif wrt is not None:
        asked = _named(wrt, names, signature, fn)
    else:
        picked = {n for n in names if _holds(slots[n], lambda x: x.is_param)}
        if picked:
            marked.arguments = picked
        picked = picked or _distributed(slots) or _first_argument(names, fn, marked.arguments)
        asked = [n for n in names if n in picked]
    if not asked:
        raise GradError(f"{fn} has no argument to differentiate")
    if len(set(asked)) < len(asked):
        raise ArgumentError(f"an argument of {fn} is asked for twice: {', '.join(asked)}")
    return asked, len(asked) == 1 and not several


def _distributed(slots: dict[str, Any]) -> set[str]:
    """The arguments that lie on a mesh, where argument 0 does not: weights beside plain batches.
    Where it does the program is that of one process, and so is what is differentiated."""
    found = [n for n, value in slots.items() if _holds(value, _is_distributed)]
    return set() if found[:1] == [*slots][:1] else set(found)


def _first_argument(names: list[str], fn: str, marked: set[str]) -> set[str]:
    """Argument 0, where nothing else tells. Raises GradError when params have been lost."""
    lost = [n for n in names if n in marked]
    if lost and lost != names[:1]:
        raise GradError(
            f"grad of {fn}: no argument is a ts.param any more, {' and '.join(lost)} "
            f"{'were' if len(lost) > 1 else 'was'} in an earlier call",
            hint="arithmetic gives plain tensors: w = ts.param(w - lr * dw), or ts.optim; or say "
                 f"which with wrt={tuple(lost) if len(lost) > 1 else lost[0]!r}",
        )
    return set(names[:1])


def _by_position(argnums: Any, slots: dict[str, Any], signature: inspect.Signature,
                 defaulted: Collection[str], fn: str) -> list[str]:
    names = [n for n in slots if n.split("[")[0] in signature.parameters and signature.parameters[
        n.split("[")[0]].kind is not inspect.Parameter.KEYWORD_ONLY]
    given = [n for n in names if n not in defaulted]
    asked = []
    for p in argnums if isinstance(argnums, tuple | list) else (argnums,):
        whole = isinstance(p, int) and not isinstance(p, bool)
        found = given if whole and p < 0 else names
        if not whole or not -len(found) <= p < len(found):
            others = [n for n in slots if n not in names]
            raise ArgumentError(f"argnums {p!r}: {fn} has {len(found)} positional arguments",
                                hint=f"others by name: wrt={others[0]!r}" if others else None)
        asked.append(found[p])
    return asked


def _named(wrt: Any, names: list[str], signature: inspect.Signature, fn: str) -> list[str]:
    asked = list(wrt) if isinstance(wrt, tuple | list | set) else [wrt]
    several = {n for n, p in signature.parameters.items() if p.kind is p.VAR_POSITIONAL}
    for n in asked:
        if n not in names and n not in several:
            raise ArgumentError(f"wrt {n!r} is not an argument of {fn}",
                                hint=did_you_mean(str(n), names))
    if isinstance(wrt, set):
        asked = sorted(asked, key=[*several, *names].index)
    return [n for a in asked for n in names if n == a or a in several and n.split("[")[0] == a]


def _holds(value: Any, test: Callable[[Tensor], bool]) -> bool:
    return any(isinstance(x, Tensor) and test(x) for x in tree.flatten(value)[0])


def _is_distributed(x: Tensor) -> bool:
    return x.layout is not None


# --- leaves ---------------------------------------------------------------------------------------
def moving_tensors(packed: Packed, fn: str, marked: Marks, by_default: bool) -> list[bool]:
    """Per tensor of the chosen arguments, whether it is differentiated. Raises GradError for one
    that is to be and cannot be; warns of one that was a param in an earlier call, beside others
    that still are."""
    names = packed.names()
    marks = {n for n, x in zip(names, packed.tensors, strict=True) if x.is_param}
    holders = {_argument_of(n) for n in marks}
    held = [x is not None for x in held_integers(packed)]
    moves = [not stays and (n in marks or _argument_of(n) not in holders)
             for n, stays in zip(names, held, strict=True)]
    lost = [n for n, x, on in zip(names, packed.tensors, moves, strict=True)
            if not on and n in marked.leaves and is_differentiable(x)]
    if lost:
        warn_user(f"grad of {fn}: {', '.join(lost)} is no ts.param any more, and has no gradient; "
                  "arithmetic gives plain tensors: mark what it gives, ts.param(w - lr * g), or "
                  "train by ts.optim")
    marked.leaves = marked.leaves - set(lost) | marks
    chosen = [(n, x) for n, x, on in zip(names, packed.tensors, moves, strict=True) if on]
    refuse_second_place(chosen, f"grad of {fn}")
    _check_differentiable(packed, chosen, fn, by_default)
    return moves


def _argument_of(name: str) -> str:
    return name.partition(".")[0]


def _check_differentiable(packed: Packed, chosen: list[tuple[str, Tensor]], fn: str,
                          by_default: bool) -> None:
    how = "choose the arguments with argnums= or wrt="
    if by_default and not any(x.is_param for _, x in chosen):
        lies = " or, where that is plain, what lies on a mesh" * any(
            _is_distributed(x) for _, x in chosen)
        how = f"no argument is a ts.param, so it is argument 0{lies}: mark the parameters, or {how}"
    if not chosen:
        names = ", ".join(packed.treedef.data)
        raise GradError(f"grad of {fn} with respect to {names}: it holds no tensor",
                        hint=how)
    for name, x in chosen:
        if x.scale is not None:
            raise GradError(f"grad of {fn} with respect to {name}, a scaled tensor {x.type}",
                            hint="differentiate ts.dequantize(x), or keep an f32 master")
        if not is_differentiable(x):
            raise GradError(
                f"grad of {fn} with respect to {name}: a {x.type}{show_shape(x.shape)} "
                "has no derivative",
                hint=how + (", or pass a floating type" if "." not in name else
                            "; beside leaves that are ts.params it is a constant"))


def held_integers(packed: Packed) -> list[Tensor | None]:
    """Per tensor, itself where a gradient has it as it is: integers that a registered class holds
    beside what is differentiated, as a sparse matrix its indices."""
    moves = [is_differentiable(x) for x in packed.tensors]
    held = tree.held_by_class(packed.treedef)
    return [x if any(moves) and held[i] and not on else None
            for i, x, on in zip(packed.places, packed.tensors, moves, strict=True)]
