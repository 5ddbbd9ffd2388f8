"""All models that are declared."""

from __future__ import annotations

from ..errors import ArgumentError, did_you_mean
from .models import byte_level, gpt2, llama
from .models.record import MODELS, StepModel

FAMILIES = (gpt2.GPT2, llama.LLAMA, byte_level.BYTES)


def model_named(name: str) -> StepModel:
    """Raises ArgumentError for a name that no model has."""
    if name not in MODELS:
        raise ArgumentError(f"there is no model {name!r}", hint=did_you_mean(name, sorted(MODELS)))
    return MODELS[name]


__all__ = ["FAMILIES", "MODELS", "model_named"]
