"""Switches of debug builds: each holds until it is changed, or for a `with` block."""

from __future__ import annotations

from ..config import Switch


def bounds(on: bool = True) -> Switch:
    """Kernels are built and run with checks: `ts.debug.bounds()`, or `with ts.debug.bounds():`.

    On a GPU each element access is tested, and the first one outside of its tensor is an error
    that names kernel, line and index. The interpreter, which always tests that, also looks for
    races, missing barriers and reads of memory that nobody wrote. The setting is TESSERA_DEBUG.
    """
    return Switch(debug=on)


def enable(on: bool = True) -> Switch:
    """All checks at once: those of `ts.debug.bounds()`, and NaN and infinity as errors.

    The same as TESSERA_DEBUG=1 for a whole program. enable(False) turns all of them off.
    """
    return Switch(debug=on, numerics="raise" if on else "off")


__all__ = ["Switch", "bounds", "enable"]
