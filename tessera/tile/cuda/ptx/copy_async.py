"""cp.async: global to shared copies without registers, sm_80 and newer."""

from __future__ import annotations

from ..instruction import Instruction, family, one_of


@family({"size_bytes": 16}, {"size_bytes": 8}, {"size_bytes": 4},
        {"size_bytes": 16, "cache": "ca"}, {"size_bytes": 16, "fill": True},
        {"size_bytes": 4, "fill": True}, {"size_bytes": 16, "fill": True, "guarded": True},
        {"size_bytes": 8, "guarded": True})
def cp_async(size_bytes: int, cache: str = "", *, fill: bool = False,
             guarded: bool = False) -> Instruction:
    """Copy (shared address, global address), both aligned to `size_bytes`.

    fill: a third argument, the bytes to read; the rest of the destination is zeroed, and with 0
    nothing is read. guarded: a last argument; where it is 0, nothing happens. 16 bytes bypass L1
    unless cache is "ca".
    """
    one_of("size_bytes", size_bytes, (4, 8, 16))
    cache = cache or ("cg" if size_bytes == 16 else "ca")
    one_of("cache", cache, ("ca", "cg") if size_bytes == 16 else ("ca",))
    return Instruction(
        f"cp_async_{cache}_{size_bytes}{'_fill' * fill}{'_if' * guarded}",
        "to:i32, at:i64" + ", bytes:i32" * fill + ", p:pred" * guarded,
        f"{'@$p ' * guarded}cp.async.{cache}.shared.global [$to], [$at], {size_bytes}"
        f"{', $bytes' * fill};",
        isa="9.7.9 cp.async", cc="80")


Instruction("cp_async_commit", "", "cp.async.commit_group;", isa="9.7.9 cp.async.commit_group",
            cc="80")
Instruction("cp_async_wait_all", "", "cp.async.wait_all;", isa="9.7.9 cp.async.wait_all", cc="80")
# The barrier counts this lane's arrival when its copies so far have landed.
Instruction("cp_async_arrive", "barrier:i32",
            "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$barrier];",
            isa="9.7.13 cp.async.mbarrier.arrive", cc="80")


@family({"pending": 0}, {"pending": 1}, {"pending": 3})
def cp_async_wait(pending: int) -> Instruction:
    """Wait until at most `pending` committed groups of this lane are in flight."""
    return Instruction(f"cp_async_wait_{pending}", "", f"cp.async.wait_group {pending};",
                       isa="9.7.9 cp.async.wait_group", cc="80")
