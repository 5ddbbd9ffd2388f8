"""The standard library: pre-tuned kernels, used as they are or with a schedule of yours.

    from tessera.stdlib import flash_attention_2
    y = flash_attention_2(q, k, v, causal=True)
    mine = flash_attention_2.with_schedule(ts.Schedule(block=(64, 64), warps=4))
"""

from __future__ import annotations

from .kernels import (
    ROUTINES,
    Routine,
    efficient_layernorm,
    flash_attention_2,
    fused_adam,
    gemm,
    rotary_embedding,
    stable_softmax,
)

__all__ = ["ROUTINES", "Routine", "efficient_layernorm", "flash_attention_2", "fused_adam", "gemm",
           "rotary_embedding", "stable_softmax"]
