"""What kernels report, as the exceptions of the interpreter: same class, code, line and words."""

from __future__ import annotations

from tessera.errors import TesseraError
from tessera.runtime.flags import ERRORS, Failure, ReportSite
from tessera.tile.ir.errors import BoundsError, failed_assert


def _assertion(name: str, site: ReportSite, failure: Failure) -> TesseraError:
    return failed_assert(failure.who, site.text(failure.values), site.where)


def _bounds(name: str, site: ReportSite, failure: Failure) -> TesseraError:
    """The first value is the index."""
    hint = ("guard it, for example: if i < n:" if failure.values[0] >= 0 else
            "an index counts from 0; negative ones do not count from the end in kernels")
    return BoundsError(f"{site.text(failure.values)} ({failure.who})", where=site.where, hint=hint)


ERRORS["assert"] = _assertion
ERRORS["bounds"] = _bounds
