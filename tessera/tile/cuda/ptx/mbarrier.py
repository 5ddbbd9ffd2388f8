"""mbarrier: barriers in shared memory that count arrivals and bytes of asynchronous copies.

A barrier is 8 bytes, aligned. Its phase flips when the expected arrivals and bytes are complete; a
waiter names the parity (0 first) of the phase it waits for the end of.
"""

from __future__ import annotations

from ..instruction import Instruction

_ISA = "9.7.13 mbarrier"
BARRIER_BYTES = 8
Instruction("mbarrier_init", "at:i32, count:i32", "mbarrier.init.shared::cta.b64 [$at], $count;",
            isa=f"{_ISA}.init", cc="80")
Instruction("mbarrier_invalidate", "at:i32", "mbarrier.inval.shared::cta.b64 [$at];",
            isa=f"{_ISA}.inval", cc="80")
Instruction("mbarrier_arrive", "at:i32", "mbarrier.arrive.shared::cta.b64 _, [$at];",
            isa=f"{_ISA}.arrive", cc="90")
Instruction("mbarrier_arrive_state", "state:i64 <- at:i32",
            "mbarrier.arrive.shared::cta.b64 $state, [$at];", isa=f"{_ISA}.arrive", cc="80")
Instruction("mbarrier_arrive_count", "at:i32, count:i32",
            "mbarrier.arrive.shared::cta.b64 _, [$at], $count;", isa=f"{_ISA}.arrive", cc="90")
Instruction("mbarrier_arrive_if", "at:i32, p:pred",
            "@$p mbarrier.arrive.shared::cta.b64 _, [$at];", isa=f"{_ISA}.arrive", cc="90")
# Of another block of the cluster. Without .release.cluster, which is a MEMBAR.ALL.GPU in
# machine code; wgmma and TMA order their own accesses.
Instruction("mbarrier_arrive_remote", "at:i32, rank:i32, p:pred",
            ".reg .b32 far;\nmapa.shared::cluster.u32 far, $at, $rank;\n"
            "@$p mbarrier.arrive.shared::cluster.b64 _, [far];", isa=f"{_ISA}.arrive", cc="90")
Instruction("mbarrier_expect", "at:i32, bytes:i32",
            "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$at], $bytes;",
            isa=f"{_ISA}.expect_tx", cc="90")
Instruction("mbarrier_arrive_expect", "at:i32, bytes:i32",
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$at], $bytes;",
            isa=f"{_ISA}.arrive", cc="90")
Instruction("mbarrier_try_wait", "done:pred <- at:i32, parity:i32",
            "mbarrier.try_wait.parity.shared::cta.b64 $done, [$at], $parity;",
            isa=f"{_ISA}.try_wait", cc="90")
Instruction("mbarrier_test_wait", "done:pred <- at:i32, parity:i32",
            "mbarrier.test_wait.parity.shared::cta.b64 $done, [$at], $parity;",
            isa=f"{_ISA}.test_wait", cc="80")


def _wait(attempt: str) -> str:
    """A loop inside one statement: LLVM sees no branch, so registers of wgmma stay in place."""
    return (f".reg .pred done;\nagain:\n{attempt} done, [$at], $parity;\n"
            "@done bra ready;\nbra again;\nready:")


Instruction("mbarrier_wait", "at:i32, parity:i32",
            _wait("mbarrier.try_wait.parity.shared::cta.b64"), isa=f"{_ISA}.try_wait", cc="90")
# With acquire at cluster scope: data of the barrier came from another block's ordinary stores.
Instruction("mbarrier_wait_cluster", "at:i32, parity:i32",
            _wait("mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64"),
            isa=f"{_ISA}.try_wait", cc="90")
Instruction("mbarrier_spin", "at:i32, parity:i32",
            _wait("mbarrier.test_wait.parity.shared::cta.b64"), isa=f"{_ISA}.test_wait", cc="80")
# A lane of several: of this block with bytes that are still to come, and of another block's barrier
# at the address that `mapa` named.
Instruction("mbarrier_arrive_expect_if", "at:i32, bytes:i32, p:pred",
            "@$p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$at], $bytes;",
            isa=f"{_ISA}.arrive", cc="90")
Instruction("mbarrier_arrive_far_if", "far:i32, p:pred",
            "@$p mbarrier.arrive.shared::cluster.b64 _, [$far];", isa=f"{_ISA}.arrive", cc="90")
