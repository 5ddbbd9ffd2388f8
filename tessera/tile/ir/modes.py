"""Modes of a function: what its target may do with it, or must not. The interpreter knows none."""

from __future__ import annotations

FAST_MATH = "fast_math"  # divisions, roots and functions of f32 may be approximations
ORDERED = "ordered"  # sums of floats by atomics, whose order nobody knows, are errors

__all__ = ["FAST_MATH", "ORDERED"]
