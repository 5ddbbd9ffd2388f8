"""Privileges, and the annotation `Region[privilege]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import ArgumentError, did_you_mean
from ...lazy_dataclass import dataclass
from ...tensor import TensorType
from ..annotate import annotations_of


@dataclass(frozen=True, repr=False)
class Privilege:
    """What may be done with a region. `combine`: the function that accumulates into it."""

    name: str
    combine: str | None = None

    def __post_init__(self) -> None:
        if self.name in PRIVILEGES:
            raise ArgumentError(f"a privilege named {self.name!r} is registered already")
        PRIVILEGES[self.name] = self

    @property
    def writes(self) -> bool:
        return self.name != "read"

    def __repr__(self) -> str:
        return self.name


PRIVILEGES: dict[str, Privilege] = {}
read = Privilege("read")
write = Privilege("write")
reduce_sum = Privilege("reduce_sum", "add")
reduce_max = Privilege("reduce_max", "maximum")
reduce_min = Privilege("reduce_min", "minimum")
HOW = {  # what may be written instead, by privilege
    "read": "declare it Region[write] to overwrite it, Region[reduce_sum] to add to it",
    "write": "write all of it first, or declare it Region[read]",
    "reduce_sum": "accumulate with {0}[:] += value; declare it Region[read] or Region[write] to "
                  "do more",
    "reduce_max": "accumulate with {0}[:] = ts.maximum({0}[:], value)",
    "reduce_min": "accumulate with {0}[:] = ts.minimum({0}[:], value)",
}


@dataclass(frozen=True, repr=False)
class RegionType:
    """The annotation `Region[privilege]` or `Region[privilege, Tensor[...]]`."""

    privilege: Privilege
    tensor: TensorType | None = None

    def __repr__(self) -> str:
        more = f", {self.tensor}" if self.tensor is not None else ""
        return f"Region[{self.privilege}{more}]"


class Region:
    """`Region[read]`, `Region[write]`, `Region[reduce_sum]`, `Region[reduce_max]`,
    `Region[reduce_min]`: how a parameter of a `ts.jit` function may be used.

    read        used like any tensor; storing into it raises
    write       what it held is not seen: Y[:] = value, or parts; reading what is not written raises
    reduce_sum  G[:] += value; summed in the accumulate type of G, rounded once to G's type
    reduce_max  G[:] = ts.maximum(G[:], value); reduce_min with ts.minimum
    The caller's tensor or NumPy array has the new elements when the call returns; a list or dict of
    them is a region each. `Region[read, Tensor["B", f32]]` states the tensor's type too; a
    privilege may be given by name. Misuse raises PrivilegeError, on the line where it stands; so
    does memory that a call gets twice, when it writes one of the two.
    """

    def __class_getitem__(cls, items: Any) -> RegionType:
        privilege, *rest = items if isinstance(items, tuple) else (items,)
        if isinstance(privilege, str) and privilege in PRIVILEGES:
            privilege = PRIVILEGES[privilege]
        if not isinstance(privilege, Privilege):
            near = did_you_mean(privilege, list(PRIVILEGES)) if isinstance(privilege, str) \
                else "privileges: " + ", ".join(PRIVILEGES)
            raise ArgumentError(f"Region[{privilege!r}]: there is no such privilege", hint=near)
        if len(rest) > 1 or (rest and not isinstance(rest[0], TensorType)):
            raise ArgumentError(f"Region takes a privilege and a tensor type, got {items!r}",
                                hint='Region[read, Tensor["B", "D", f32]]')
        return RegionType(privilege, *rest)


def region_annotations(fn: Callable) -> dict[str, RegionType]:
    """The parameters of fn that are regions. Raises ArgumentError for a bare `Region`."""
    found = {}
    for name, kind in annotations_of(fn).items():
        if kind is Region:
            raise ArgumentError(f"the annotation of {name} is Region, without a privilege",
                                hint="Region[read], Region[write] or Region[reduce_sum]")
        if isinstance(kind, RegionType):
            found[name] = kind
    return found
