"""Tools for finding what went wrong: sentinels, traces, profiles, prints.

    with ts.debug.numerics("raise"): ...       the first NaN or infinity, with op, line and operands
    ts.debug.flags()                           what was counted in flag mode
    ts.debug.print("x = {}", x)                values inside compiled functions
    with ts.debug.trace() as program: ...      every op that ran, with shapes
    with ts.debug.profile() as p: ...          p.chrome_trace(), p.flamegraph(), p.memory_timeline()
    with ts.debug.range("attention"): ...      a name for a part of the program
"""

from __future__ import annotations

from . import verify as verify
from .findings import BadValue as BadValue
from .findings import Flags as Flags
from .inspect import inspect_ir as inspect_ir
from .printing import print as print
from .profiling import MemoryTimeline as MemoryTimeline
from .profiling import Profile as Profile
from .profiling import memory_timeline as memory_timeline
from .profiling import named_range as range
from .profiling import profile as profile
from .record import Record as Record
from .record import program_trace as trace
from .sentinel import flags as flags
from .sentinel import numerics as numerics

__all__ = [
    "BadValue", "Flags", "MemoryTimeline", "Profile", "Record", "flags", "inspect_ir",
    "memory_timeline", "numerics", "print", "profile", "range", "trace", "verify",
]
