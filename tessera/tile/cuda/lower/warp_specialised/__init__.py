"""The warp-specialised form of a kernel: one producer warpgroup brings tiles by TMA into
rings of shared memory, consumer warpgroups multiply them by wgmma and do the rest."""

from __future__ import annotations

from tessera.tile.cuda.lower.warp_specialised.lower import lower_warp_specialised
from tessera.tile.cuda.lower.warp_specialised.program import (
    PipelineKnobs,
    Refusal,
    WarpSpecialisedProgram,
)

__all__ = ["PipelineKnobs", "WarpSpecialisedProgram", "Refusal", "lower_warp_specialised"]
