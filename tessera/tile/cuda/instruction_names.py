"""PTX instructions by name. Apart from their record, which the families of ptx/ are made of."""

from __future__ import annotations

from ...errors import ArgumentError, did_you_mean
from .instruction import INSTRUCTIONS, Instruction, samples


def find_instruction(name: str) -> Instruction:
    """The record of a name: a plain one, a sample of a family, or another made before.

    The first name that is not there yet imports all files and makes the samples, so that what is
    found does not depend on what ran before.
    """
    if name not in INSTRUCTIONS:
        from . import ptx  # noqa: F401  registers all

        for made in samples():
            INSTRUCTIONS.setdefault(made.name, made)
    if name not in INSTRUCTIONS:
        raise ArgumentError(f"there is no PTX instruction {name!r}",
                            hint=did_you_mean(name, sorted(INSTRUCTIONS)))
    return INSTRUCTIONS[name]


__all__ = ["find_instruction"]
