"""Programmatic dependent launch: a kernel that begins before the one in front of it has ended."""

from __future__ import annotations

from typing import Any

from tessera.tile.ir.op_record import declare


@declare(rule=lambda types, attrs: (), run=True, effect="sync", group=True)
def launch_dependents(m: Any, op: Any) -> None:
    """The next kernel of the stream may begin once all groups have come here or ended, as far as
    its `grid_dependency_wait`: it is there when this one ends. Of many groups the last alone say
    it, as many as may run at one time.

    Results do not depend on it. PTX ISA, griddepcontrol.launch_dependents; nothing before sm_90.
    """


@declare(rule=lambda types, attrs: (), run=True, effect="sync", group=True)
def grid_dependency_wait(m: Any, op: Any) -> None:
    """Waits until the kernels in front of this one have ended, and what they wrote is visible.

    Stands before everything that reads or writes tensors: a kernel that has it may be begun while
    the one before runs. Kernels of threads that say neither this nor `launch_dependents` have both
    where they begin. PTX ISA, griddepcontrol.wait; before sm_90 a kernel begins no earlier.
    """
