"""Kernels and routines of the library under jit, grad and the other transforms."""

from __future__ import annotations

from .. import hooks
from .custom_kernel import call, jvp_rule, vjp_rule
from .custom_routine import call_routine


class TransformedKernels:
    """What a call becomes while a function is traced; see hooks.GraphKernels."""

    call, routine = staticmethod(call), staticmethod(call_routine)
    vjp_rule, jvp_rule = staticmethod(vjp_rule), staticmethod(jvp_rule)


hooks.graph_kernels.fill(TransformedKernels())

__all__ = ["TransformedKernels"]
