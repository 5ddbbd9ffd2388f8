"""Modes of a function: what its target may do with it, or must not. The interpreter knows none."""

from __future__ import annotations

FAST_MATH = "fast_math"  # divisions, roots and functions of f32 may be approximations
ORDERED = "ordered"  # sums of floats by atomics, whose order nobody knows, are errors
# It is the library's gradient of attention, whose source is emit/attention_backward.py.
FUSED_BACKWARD = "attention_backward"

__all__ = ["FAST_MATH", "FUSED_BACKWARD", "ORDERED"]
