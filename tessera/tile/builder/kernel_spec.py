"""What one specialisation of a kernel is traced for."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from tessera.lazy_dataclass import dataclass
from tessera.tensor import TensorType
from tessera.tile.ir.schedule import Schedule
from tessera.tile.ir.types import Type


@dataclass(frozen=True)
class KernelSpec:
    """What one specialisation of a kernel is made for. params: tensors and scalars in order."""

    params: tuple[tuple[str, Type], ...]
    constants: tuple[tuple[str, Any], ...]
    result: TensorType | Any  # a tuple of them for several
    schedule: Schedule
    lanes: int | None = None
    given_grid: bool = False
    fixed_dims: tuple[tuple[str, int], ...] = ()
    wide_dims: frozenset[str] = field(default=frozenset())
    numbered: bool = False  # it asks for the number of its group
    records: tuple[tuple[str, tuple[str, ...]], ...] = ()  # parameters with several arrays
    modes: tuple[str, ...] = ()  # see Function.modes
    spelled: tuple[str, ...] = field(init=False, repr=False)  # constants: 1, 1.0 and True differ

    @property
    def results(self) -> tuple[Any, ...]:
        """What the annotation says of each result, () without one."""
        if self.result is None or self.result is type(None):
            return ()
        return self.result if isinstance(self.result, tuple) else (self.result,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "spelled", tuple(repr(v) for _, v in self.constants))


class Kernel_:
    """Base of Kernel (kernel.py), so that kernels may call kernels."""

    fn: Any


class DimInt(int):
    """A named extent that is a constant of this specialisation."""
