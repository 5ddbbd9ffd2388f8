"""Modes of a function: what its target may do with it, or must not. The interpreter knows none."""

from __future__ import annotations

FAST_MATH = "fast_math"  # divisions, roots and functions of f32 may be approximations
ORDERED = "ordered"  # sums of floats by atomics, whose order nobody knows, are errors
IN_TURN = "in_turn"  # it is the library's gradient of attention, emit/in_turn.py has its source

__all__ = ["FAST_MATH", "IN_TURN", "ORDERED"]
