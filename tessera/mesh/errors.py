"""Errors of running on several ranks. Wrong layouts are ArgumentError, AxisError or ShapeError."""

from __future__ import annotations

from tessera.errors import TesseraError


class MeshError(TesseraError, RuntimeError):
    """Ranks that cannot go on together: a wrong number of them, or a transport that is missing."""

    default_code = "E_MESH"


class DisagreementError(MeshError):
    """Ranks whose next collectives are not the same one."""

    default_code = "E_MESH_ORDER"


class PolicyMismatch(DisagreementError):
    """Ranks that make a distributed tensor of different types, shapes or layouts, or that hold
    different values of what they are to hold alike."""

    default_code = "E_MESH_POLICY"


class RankAloneWarning(UserWarning):
    """Some ranks have computed with a tensor of which others hold parts, and these have not."""


class StalledError(MeshError):
    """A rank that did not come to a collective: it hangs, has returned, or waits elsewhere."""

    default_code = "E_MESH_STALLED"


class StoppedError(MeshError):
    """Raised on a rank because another one failed."""

    default_code = "E_MESH_STOPPED"
