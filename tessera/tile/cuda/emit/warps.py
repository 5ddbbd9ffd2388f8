"""Exchange between the lanes of a warp, and reductions over a group.

A group whose size is no multiple of 32 has a last, smaller warp: its missing lanes take no part in
a `.sync` instruction (they have exited, PTX ISA 9.7.9), and what is read from them is replaced.
"""

from __future__ import annotations

from tessera.tile.cuda.emit.emitter import Emitter, intrinsic
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.ir.ir import Const, Op
from tessera.tile.ops.ids import WARP

SHUFFLES = {"shuffle": "idx", "shuffle_down": "down", "shuffle_up": "up", "shuffle_xor": "bfly"}


def full_warps(e: Emitter) -> bool:
    return e.lanes % WARP == 0


def warp_size(e: Emitter) -> str:
    """Lanes of this thread's warp."""
    if full_warps(e):
        return f"i32({WARP})"
    if e.lanes < WARP:
        return f"i32({e.lanes})"
    whole = e.lanes // WARP * WARP
    size = e.use("where", "use(fragments.where)")
    return e.once("warp_size", f"{size}({e.thread} < {whole}, i32({WARP}), i32({e.lanes - whole}))")


def lane(e: Emitter) -> str:
    return e.once("lane", f"i32({e.thread} & {WARP - 1})")


def tag_of(e: Emitter, x: object) -> str:
    dtype = e.dtype(x)  # type: ignore[arg-type]
    return ("u" if dtype.kind == "uint" else "") + kind_of(dtype)


# --- shuffles -------------------------------------------------------------------------------------
def _shuffle(name: str, mode: str) -> None:
    def emit(e: Emitter, op: Op) -> None:
        (made,), (x, other) = op.outs, op.args
        kind, number = kind_of(e.dtype(x)), e.name(other)
        number = number if kind_of(e.dtype(other)) == "i32" else f"i32({number})"
        near = isinstance(other, Const) and 0 <= other.value < WARP
        if full_warps(e) and near:
            call = e.use(name, intrinsic("warps.shuffle", mode, kind))
            e.define(made, f"{call}({e.name(x)}, {number})")
            return
        call = e.use(name, intrinsic("warps.shuffle_any", mode, kind))
        e.define(made, f"{call}({e.name(x)}, {number}, {lane(e)}, {warp_size(e)})")

    emits(name)(emit)


for _name, _mode in SHUFFLES.items():
    _shuffle(_name, _mode)


# --- reductions and scans -------------------------------------------------------------------------
def warp_reduced(e: Emitter, text: str, name: str, tag: str) -> str:
    """The reduction of a number over the warp, in every lane."""
    if full_warps(e):
        return f"{e.use(name, intrinsic('warps.reduce', name, tag))}({text})"
    call = e.use(name, intrinsic("warps.reduce_small_warp", name, tag))
    return f"{call}({text}, {lane(e)}, {warp_size(e)})"


def _warp(word: str, name: str) -> None:
    @emits(f"warp_{word}")
    def emit(e: Emitter, op: Op) -> None:
        (x,) = op.args
        e.define(op.outs[0], warp_reduced(e, e.name(x), name, tag_of(e, x)))


def _group(word: str, name: str) -> None:
    @emits(f"group_{word}")
    def emit(e: Emitter, op: Op) -> None:
        (x,) = op.args
        e.define(op.outs[0], group_reduced(e, e.name(x), name, tag_of(e, x)))


for _word in ("sum", "max", "min"):
    _warp(_word, f"reduce_{_word}")
    _group(_word, f"reduce_{_word}")


def group_reduced(e: Emitter, text: str, name: str, tag: str) -> str:
    """The reduction over all lanes of the group: each warp leaves its own, and all combine them."""
    part = warp_reduced(e, text, name, tag)
    if e.lanes <= WARP:
        return part
    warps, size = -(-e.lanes // WARP), 8 if tag.endswith("64") else 4
    at, mine = e.scratch(size * warps), e.fresh("part")
    e.line(f"{mine} = {part}")
    if e.loops:
        e.sync()
    put = e.use("put_part", intrinsic("warps.put", tag))
    e.line(f"{put}(i32({at} + {size} * ({e.thread} >> 5)), {mine}, i32({lane(e)} == 0))")
    e.sync()
    return f"{e.use('all_parts', intrinsic('warps.get', name, tag, warps))}({at})"


@emits("warp_scan")
def _scan(e: Emitter, op: Op) -> None:
    (x,) = op.args
    call = e.use("warp_scan", intrinsic("warps.scan", e.dtype(x).name))
    e.define(op.outs[0], f"{call}({e.name(x)}, {lane(e)})")


# --- votes ----------------------------------------------------------------------------------------
for _vote in ("vote_any", "vote_all", "ballot"):
    @emits(_vote)
    def _emit(e: Emitter, op: Op) -> None:
        record = "vote_ballot" if op.name == "ballot" else op.name
        e.define(op.outs[0], f"{e.use(op.name, f'use({record!r})')}({e.name(op.args[0])})")
