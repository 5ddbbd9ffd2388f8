"""Compilation targets: those that a generation is declared for (generations.py)."""

from __future__ import annotations

import re

from ..errors import UnsupportedTargetError
from ..lazy_dataclass import dataclass
from .generations import GENERATIONS, Generation


@dataclass(frozen=True, order=True)
class Target:
    """A compute capability; `suffix` "a" allows instructions of this architecture alone."""

    major: int
    minor: int
    suffix: str = ""

    def __str__(self) -> str:
        return f"sm_{self.major}{self.minor}{self.suffix}"

    @property
    def cc(self) -> tuple[int, int]:
        return self.major, self.minor

    @property
    def generation(self) -> Generation:
        """What its chips have. Raises UnsupportedTargetError where none is declared."""
        if str(self) not in GENERATIONS:
            raise UnsupportedTargetError(f"the limits of {self} are not known",
                                         hint=f"known: {', '.join(GENERATIONS)}")
        return GENERATIONS[str(self)]

    def runs(self, needed: Target) -> bool:
        """Whether an instruction that needs `needed` exists here.

        An architecture-specific one ("90a") exists on exactly that architecture, any other on all
        later ones (PTX ISA 9.0, section 11.1.2, .target).
        """
        if needed.suffix:
            return self == needed
        return self.cc >= needed.cc

    def loads_on(self, cc: tuple[int, int]) -> bool:
        """Whether a device of compute capability `cc` takes machine code of this target.

        Unlike PTX, machine code does not carry over to a later generation: only to the same or a
        higher minor version, and not between a Jetson and a card (CUDA programming guide, binary
        compatibility).
        """
        if self.suffix or self.cc in _JETSON or cc in _JETSON:
            return self.cc == cc
        return self.major == cc[0] and self.minor <= cc[1]


_JETSON = ((8, 7),)
OLDEST = Target(7, 5)
DEFAULT_TARGET = "sm_90a"  # of what is compiled to be looked at where there is no GPU


def parse_target(text: str | Target) -> Target:
    """Target of "sm_90a", "90a", "sm_80". Raises UnsupportedTargetError naming what exists."""
    if isinstance(text, Target):
        return text
    found = re.fullmatch(r"(?:sm_|compute_)?(\d+)(\d)([af]?)", text)
    target = Target(int(found[1]), int(found[2]), found[3]) if found else None
    if target is None or str(target) not in GENERATIONS:
        raise UnsupportedTargetError(
            f"there is no target {text!r}", hint=f"targets: {', '.join(GENERATIONS)}"
        )
    return target


def target_of_device(cc: tuple[int, int]) -> Target:
    """The richest target that a device of compute capability `cc` runs.

    Raises UnsupportedTargetError below 7.5.
    """
    if cc < OLDEST.cc:
        raise UnsupportedTargetError(
            f"the device has compute capability {cc[0]}.{cc[1]}",
            hint="kernels are compiled for 7.5 (Turing) and newer; use the interpreter",
        )
    specific = Target(*cc, "a")
    return specific if str(specific) in GENERATIONS else Target(*cc)


def target_for(cc: tuple[int, int], needs: Target = OLDEST) -> Target:
    """What to compile code for that shall run on a device of compute capability `cc`.

    The device's own target; the architecture-specific one only where the code `needs` it.
    Raises UnsupportedTargetError when the device lacks what is needed.
    """
    made = Target(*cc, needs.suffix)
    if not made.runs(needs) or cc < OLDEST.cc:
        raise UnsupportedTargetError(
            f"the code needs {needs}, the device has compute capability {cc[0]}.{cc[1]}",
            hint="run it under the interpreter (device='cpu'), or on a GPU that has it")
    return made
