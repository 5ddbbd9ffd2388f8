"""Graph functions on GPUs: Graph IR -> Schedule IR -> tile kernels -> machine code.

    prepare.py            simplified, attention and matmuls found, large ops opened
    host_keys.py          keys of random numbers: what the host computes at each call
    target.py             which ops have a kernel, and of which kind
    lower.py              their Schedule IR
    generate_kernels.py   the text of each group's kernel
    run.py                running them
    launch_plan.py        what each launch computes and moves, in which form, and why
    levels.py             the text of every level, with op ids

Imported when a level below the graph is asked for, or a function runs on a GPU.
"""

from __future__ import annotations

from ..schedule.ir import GraphSchedule, GroupOperand, GroupStep, PlannedBuffer, ScheduledGroup
from .launch_plan import LaunchPlan, PlannedLaunch
from .levels import LEVELS, launches_of, program_of, text_of
from .program.run import CudaProgram

__all__ = ["LEVELS", "CudaProgram", "GraphSchedule", "GroupOperand", "GroupStep", "LaunchPlan",
           "PlannedBuffer", "PlannedLaunch", "ScheduledGroup", "launches_of", "program_of",
           "text_of"]
