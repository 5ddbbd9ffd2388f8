"""Derivatives and batching as transforms from graphs to graphs."""

from __future__ import annotations

from ..graph.ops.stop_gradient import stop_gradient as stop_gradient
from .api import Differentiable as Differentiable
from .api import autodiff as autodiff
from .api import grad as grad
from .api import jvp as jvp
from .api import value_and_grad as value_and_grad
from .api import vjp as vjp
from .checkpoint import checkpoint as checkpoint
from .checkpoint import remat as remat
from .checkpoint import remat_policies as remat_policies
from .control import cond as cond
from .custom_jvp import custom_jvp as custom_jvp
from .custom_vjp import custom_vjp as custom_vjp
from .gradcheck import gradcheck as gradcheck
from .graph_kernels import TransformedKernels as TransformedKernels
from .jacobian import hessian as hessian
from .jacobian import hvp as hvp
from .jacobian import jacfwd as jacfwd
from .jacobian import jacrev as jacrev
from .loops import associative_scan as associative_scan
from .loops import map_ as map
from .loops import reduce as reduce
from .loops import scan as scan
from .register_op import RegisteredOp as RegisteredOp
from .register_op import register_op as register_op
from .vmap import vmap as vmap
from .while_loop import fori_loop as fori_loop
from .while_loop import while_loop as while_loop

__all__ = [
    "Differentiable", "associative_scan", "autodiff", "checkpoint", "cond", "custom_jvp",
    "custom_vjp", "fori_loop", "grad", "gradcheck", "hessian", "hvp", "jacfwd", "jacrev", "jvp",
    "map", "reduce", "register_op", "remat",
    "remat_policies", "scan", "stop_gradient", "value_and_grad", "vjp",
    "vmap", "while_loop",
]
