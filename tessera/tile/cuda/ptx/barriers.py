"""Barriers of a block, a warp and a cluster; fences; registers, loops and dependent launches."""

from __future__ import annotations

from ..instruction import Instruction, family, one_of

Instruction("sync_threads", "", "bar.sync 0;", isa="9.7.13 bar", effect="converge")
Instruction("bar_sync", "id:i32, threads:i32", "bar.sync $id, $threads;", isa="9.7.13 bar",
            effect="converge")
Instruction("bar_arrive", "id:i32, threads:i32", "bar.arrive $id, $threads;", isa="9.7.13 bar",
            effect="converge")
# A barrier of each warpgroup from `first` on: whoever waits at its own was let by the one before.
# Numbers are made where they are used, or they would take registers of a loop.
Instruction("turn_take", "group:i32, first:i32, threads:i32",
            ".reg .b32 own;\nadd.s32 own, $group, $first;\nbar.sync own, $threads;",
            isa="9.7.13 bar", effect="converge")
Instruction("turn_pass", "group:i32, last:i32, first:i32, threads:i32",
            ".reg .b32 next;\n.reg .pred more;\nsetp.lt.s32 more, $group, $last;\n"
            "add.s32 next, $group, 1;\nselp.b32 next, next, 0, more;\n"
            "add.s32 next, next, $first;\nbar.arrive next, $threads;",
            isa="9.7.13 bar", effect="converge")
for _op in ("and", "or"):
    Instruction(f"sync_threads_{_op}", "d:pred <- p:pred", f"bar.red.{_op}.pred $d, 0, $p;",
                isa="9.7.13 bar.red", effect="converge")
Instruction("sync_threads_count", "d:i32 <- p:pred", "bar.red.popc.u32 $d, 0, $p;",
            isa="9.7.13 bar.red", effect="converge")
Instruction("sync_warp", "mask:i32", "bar.warp.sync $mask;", isa="9.7.13 bar.warp.sync",
            effect="converge")

# Arriving with release (the default) is MEMBAR.ALL.GPU in machine code; relaxed is enough at start
# (after fence_mbarrier_init) and before exit.
Instruction("cluster_arrive", "", "barrier.cluster.arrive.release.aligned;",
            isa="9.7.13 barrier.cluster", effect="converge", cc="90")
Instruction("cluster_arrive_relaxed", "", "barrier.cluster.arrive.relaxed.aligned;",
            isa="9.7.13 barrier.cluster", effect="converge", cc="90")
Instruction("cluster_wait", "", "barrier.cluster.wait.acquire.aligned;",
            isa="9.7.13 barrier.cluster", effect="converge", cc="90")


@family(*({"scope": s} for s in ("cta", "gpu", "sys", "cluster")),
        {"scope": "gpu", "order": "sc"})
def fence(scope: str, order: str = "acq_rel") -> Instruction:
    """Order this lane's accesses before and after, as seen from `scope`."""
    one_of("scope", scope, ("cta", "cluster", "gpu", "sys"))
    one_of("order", order, ("acq_rel", "sc"))
    return Instruction(f"fence_{order}_{scope}", "", f"fence.{order}.{scope};",
                       isa="9.7.13 membar/fence", cc="90" if scope == "cluster" else "75")


# Ordinary accesses before, copies and tensor cores (the asynchronous proxy) after. "_shared" is
# enough when only shared memory was written, and cheaper.
Instruction("fence_async", "", "fence.proxy.async;", isa="9.7.13 membar/fence", cc="90")
Instruction("fence_async_shared", "", "fence.proxy.async.shared::cta;", isa="9.7.13 membar/fence",
            cc="90")
Instruction("fence_async_global", "", "fence.proxy.async.global;", isa="9.7.13 membar/fence",
            cc="90")
Instruction("fence_mbarrier_init", "", "fence.mbarrier_init.release.cluster;",
            isa="9.7.13 membar/fence", cc="90")
# Before the first use of a descriptor that a kernel wrote to global memory at `at` (128 bytes).
Instruction("fence_tensormap_acquire", "at:i64",
            "fence.proxy.tensormap::generic.acquire.gpu [$at], 128;",
            isa="9.7.13 membar/fence", cc="90")


@family({"registers": 40, "how": "dec"}, {"registers": 232, "how": "inc"})
def set_registers(registers: int, how: str) -> Instruction:
    """This warpgroup's registers a thread from now on; "dec" gives back, "inc" waits for free ones.

    Only in a kernel with launch bounds, once, in one branch per warpgroup (else C7508).
    """
    one_of("how", how, ("inc", "dec"))
    one_of("registers", registers, range(24, 257, 8))
    return Instruction(f"set_registers_{how}_{registers}", "",
                       f"setmaxnreg.{how}.sync.aligned.u32 {registers};", isa="9.7.19 setmaxnreg",
                       effect="converge", cc="90a")


# The first statement of a loop: neither NVVM, which may not copy it, nor ptxas unrolls the loop.
Instruction("nounroll", "", '.pragma "nounroll";', isa="12.1 nounroll", single=True)

# Programmatic dependent launch: `wait` before the first read of the previous kernel's results.
Instruction("dependents_wait", "", "griddepcontrol.wait;", isa="9.7.13 griddepcontrol", cc="90")
Instruction("dependents_launch", "", "griddepcontrol.launch_dependents;",
            isa="9.7.13 griddepcontrol", cc="90")
Instruction("nanosleep", "ns:i32", "nanosleep.u32 $ns;", isa="9.7.19 nanosleep", effect="volatile")
Instruction("trap", "", "trap;", isa="9.7.19 trap")
Instruction("leave", "", "exit;", isa="9.7.12 exit")
