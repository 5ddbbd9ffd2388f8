"""Region privileges: what a compiled function may do with an argument's memory.

`def f(A: Region[read], Y: Region[write], G: Region[reduce_sum])` under `ts.jit`: A is only read, Y
is overwritten, G is accumulated into. Inside the trace an argument is a `Held`: a tensor that
stands for what the region holds now. A store makes a new value of the graph, so derivatives,
fusion and sharding see ordinary ops; what a region holds at the end is a further output, which the
call copies into the caller's array. The privileges and their names are those of Legion
(Bauer et al. 2012, doi:10.1109/SC.2012.71).
"""

from __future__ import annotations

from .types import Privilege, Region, RegionType, read, reduce_max, reduce_min, reduce_sum, write

__all__ = ["Privilege", "Region", "RegionType", "read", "reduce_max", "reduce_min", "reduce_sum",
           "write"]
