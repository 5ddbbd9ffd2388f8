"""Tools for finding what went wrong: sentinels, traces, profiles, prints.

    with ts.debug.numerics("raise"): ...       the first NaN or infinity, with op, line and operands
    ts.debug.flags()                           what was counted in flag mode
    ts.debug.replay(error)                     the op or kernel of a report, run again
    ts.debug.record(f, path, *args)            a call as a file; replay(path) makes it again
    ts.debug.print("x = {}", x)                values inside compiled functions
    with ts.debug.trace() as program: ...      every op that ran, with shapes
    with ts.debug.profile() as p: ...          p.launches.table(), p.html(path), p.chrome_trace()
    with ts.debug.range("attention"): ...      a name for a part of the program
    ts.debug.race_check(kernel, a, b)          and bank_conflicts, coalescing, register_pressure,
                                               roofline, lowering: what a kernel does, and the fix
    ts.debug.arch_report()                     which kernels use wgmma, TMA, clusters, ...
    ts.debug.show_sharding(spec, shape, mesh)  which rank holds which part of a tensor
    ts.debug.enable()                          all checks, as with TESSERA_DEBUG=1
"""

from __future__ import annotations

from . import verify as verify
from .arch_report import ArchReport as ArchReport
from .arch_report import arch_report as arch_report
from .findings import BadValue as BadValue
from .findings import Flags as Flags
from .function_lowering import FunctionLowering as FunctionLowering
from .inspect import inspect_ir as inspect_ir
from .kernel_lowering import Lowering as Lowering
from .kernel_lowering import lowering as lowering
from .kernels import BankReport as BankReport
from .kernels import RaceReport as RaceReport
from .kernels import SectorReport as SectorReport
from .kernels import bank_conflicts as bank_conflicts
from .kernels import coalescing as coalescing
from .kernels import race_check as race_check
from .launch_profile import LaunchTable as LaunchTable
from .memory_timeline import MemoryTimeline as MemoryTimeline
from .memory_timeline import memory_timeline as memory_timeline
from .printing import print as print
from .profiling import Profile as Profile
from .profiling import named_range as range
from .profiling import profile as profile
from .record import Record as Record
from .record import program_trace as trace
from .recording import RecordedRun as RecordedRun
from .recording import record as record
from .replaying import Replay as Replay
from .replaying import replay as replay
from .resources import Pressure as Pressure
from .resources import register_pressure as register_pressure
from .rooflines import Roofline as Roofline
from .rooflines import roofline as roofline
from .sentinel import flags as flags
from .sentinel import numerics as numerics
from .sharding import Picture as Picture
from .sharding import show_sharding as show_sharding
from .switches import bounds as bounds
from .switches import enable as enable

__all__ = [
    "ArchReport", "BadValue", "BankReport", "Flags", "FunctionLowering", "LaunchTable",
    "Lowering", "MemoryTimeline", "Picture", "Pressure", "Profile", "RaceReport", "Record",
    "RecordedRun", "Replay", "Roofline", "SectorReport", "arch_report", "bank_conflicts",
    "bounds", "coalescing", "enable", "flags", "inspect_ir", "lowering", "memory_timeline",
    "numerics", "print", "profile", "race_check", "range", "record", "register_pressure",
    "replay", "roofline", "show_sharding", "trace", "verify",
]
