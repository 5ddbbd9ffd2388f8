"""The standard library's kernels, one file per family. `tessera.stdlib` is its public face."""

from __future__ import annotations

from .adam import fused_adam
from .attention import flash_attention_2
from .gemm import gemm
from .norms import efficient_layernorm
from .rotary import rotary_embedding
from .routine import ROUTINES, Routine
from .softmax import stable_softmax

__all__ = ["ROUTINES", "Routine", "efficient_layernorm", "flash_attention_2", "fused_adam", "gemm",
           "rotary_embedding", "stable_softmax"]
