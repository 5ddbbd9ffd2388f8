"""Plain loads and stores, 1 to 16 bytes a thread, with cache hints and guards.

Addresses: a global one is 64 bits, a shared one 32 bits in the shared window (of this block, or
with space "shared::cluster" of the block that `mapa` named).
"""

from __future__ import annotations

from ..instruction import Instruction, family, one_of

# Type of one element -> (register kind, registers); 1- and 2-byte ones widen to 32 bits.
ELEMENTS: dict[str, str] = {"u8": "i32", "s8": "i32", "u16": "i32", "s16": "i32", "b32": "i32",
                            "b64": "i64", "f32": "f32", "f64": "f64"}
BITS = {"u8": 8, "s8": 8, "u16": 16, "s16": 16, "b32": 32, "b64": 64, "f32": 32, "f64": 64}
SPACES = ("global", "shared", "shared::cluster")
# ca cache everywhere, cg in L2 only, cs likely used once, lu last use, cv do not trust any cache
LOAD_CACHES = ("", "ca", "cg", "cs", "lu", "cv", "nc", "nc.L1::no_allocate", "L1::no_allocate",
               "volatile", "relaxed.gpu", "acquire.gpu", "acquire.sys", "acquire.cluster")
STORE_CACHES = ("", "wb", "cg", "cs", "wt", "volatile", "L1::no_allocate", "relaxed.gpu",
                "relaxed.sys", "release.gpu", "release.sys", "release.cluster")
# createpolicy.fractional results for `hint`, precomputed: fraction 1.0 (as CUTLASS TMA::CacheHint)
POLICIES = {"evict_normal": 0x1000000000000000, "evict_first": 0x12F0000000000000,
            "evict_last": 0x14F0000000000000}


def _check(space: str, element: str, vector: int) -> None:
    one_of("space", space, SPACES)
    one_of("element", element, ELEMENTS)
    one_of("vector", vector, (1, 2, 4))
    one_of("bits of one access", BITS[element] * vector, (8, 16, 32, 64, 128))


def _name(*parts: object) -> str:
    words = "_".join(str(p) for p in parts if p != "")
    return words.replace("::", "_").replace(".", "_")


def _opcode(verb: str, space: str, cache: str, element: str, vector: int) -> str:
    """ld.relaxed.gpu.global.v4.b32, ld.global.nc.L1::no_allocate.b32, st.shared::cluster.b32"""
    first = cache.startswith(("volatile", "relaxed", "acquire", "release"))
    parts = [verb, *([cache] if first else []), space, *([cache] if cache and not first else [])]
    return ".".join([*parts, *([f"v{vector}"] if vector > 1 else []), element])


def _cc(space: str, cache: str) -> str:
    return "90" if "cluster" in space + cache else "75"


@family(
    *({"space": s, "element": e, "vector": v} for s in ("global", "shared")
      for e, v in (("b32", 1), ("b32", 2), ("b32", 4), ("b64", 2), ("u8", 1), ("s16", 1),
                   ("f32", 4), ("f64", 1))),
    *({"space": "global", "element": "b32", "vector": 4, "cache": c} for c in LOAD_CACHES[1:9]),
    *({"space": "global", "element": "b32", "cache": c} for c in LOAD_CACHES[9:]),
    {"space": "global", "element": "b32", "vector": 4, "guarded": True},
    {"space": "global", "element": "u16", "guarded": True, "offset": 6},
    *({"space": "global", "element": e, "vector": v, "guarded": True}
      for e, v in (("f32", 4), ("b64", 2), ("f64", 2), ("u8", 1), ("f32", 1))),
    {"space": "shared", "element": "b32", "vector": 4, "offset": 512},
    {"space": "shared::cluster", "element": "b32"},
)
def ld(space: str, element: str, vector: int = 1, *, cache: str = "", guarded: bool = False,
       offset: int = 0) -> Instruction:
    """Load from address + offset bytes. guarded: a second argument; where it is 0, reads 0."""
    _check(space, element, vector)
    one_of("cache", cache, LOAD_CACHES)
    kind, address = ELEMENTS[element], "i64" if space == "global" else "i32"
    results = f"d:{kind}" + (f"*{vector}" if vector > 1 else "")
    opcode = _opcode("ld", space, cache, element, vector)
    load = f"{opcode} $d, [$at{f' + {offset}' * bool(offset)}];"
    args = f"at:{address}"
    if guarded:
        places = [f"$d.{i}" for i in range(vector)] if vector > 1 else ["$d"]
        zeros = "\n".join(f"mov.b{max(BITS[element], 32)} {p}, 0;" for p in places)
        load, args = f"{zeros}\n@$p {load}", args + ", p:pred"
    return Instruction(_name("ld", space, cache, element, f"x{vector}" * (vector > 1),
                             "if" * guarded, offset or ""),
                       f"{results} <- {args}", load, isa="9.7.9 ld", cc=_cc(space, cache))


@family(
    *({"space": s, "element": e, "vector": v} for s in ("global", "shared")
      for e, v in (("b32", 1), ("b32", 2), ("b32", 4), ("b64", 2), ("u8", 1), ("u16", 1),
                   ("f32", 4), ("f64", 1))),
    *({"space": "global", "element": "b32", "cache": c} for c in STORE_CACHES[1:]),
    {"space": "global", "element": "b32", "vector": 4, "guarded": True, "offset": 16},
    {"space": "shared::cluster", "element": "b32"},
)
def st(space: str, element: str, vector: int = 1, *, cache: str = "", guarded: bool = False,
       offset: int = 0) -> Instruction:
    """Store to address + offset bytes. guarded: a last argument; where it is 0, nothing happens."""
    _check(space, element, vector)
    one_of("cache", cache, STORE_CACHES)
    kind, address = ELEMENTS[element], "i64" if space == "global" else "i32"
    operands = f"at:{address}, x:{kind}" + (f"*{vector}" if vector > 1 else "")
    opcode = _opcode("st", space, cache, element, vector)
    text = f"{'@$p ' * guarded}{opcode} [$at{f' + {offset}' * bool(offset)}], $x;"
    return Instruction(_name("st", space, cache, element, f"x{vector}" * (vector > 1),
                             "if" * guarded, offset or ""),
                       operands + ", p:pred" * guarded, text, isa="9.7.9 st",
                       cc=_cc(space, cache))


@family({"element": "b32", "vector": 4}, {"element": "b32"})
def ld_hint(element: str, vector: int = 1) -> Instruction:
    """Global load with an L2 eviction policy: (address, policy of POLICIES or createpolicy)."""
    _check("global", element, vector)
    tuple_ = f"*{vector}" if vector > 1 else ""
    return Instruction(
        _name("ld_hint", element, f"x{vector}" * (vector > 1)),
        f"d:{ELEMENTS[element]}{tuple_} <- at:i64, policy:i64",
        f"{_opcode('ld', 'global', 'L2::cache_hint', element, vector)} $d, [$at], $policy;",
        isa="9.7.9 ld", cc="80")


@family({"element": "b32", "vector": 4}, {"element": "b32"})
def st_hint(element: str, vector: int = 1) -> Instruction:
    """Global store with an L2 eviction policy: (address, value, policy)."""
    _check("global", element, vector)
    tuple_ = f"*{vector}" if vector > 1 else ""
    return Instruction(
        _name("st_hint", element, f"x{vector}" * (vector > 1)),
        f"at:i64, x:{ELEMENTS[element]}{tuple_}, policy:i64",
        f"{_opcode('st', 'global', 'L2::cache_hint', element, vector)} [$at], $x, $policy;",
        isa="9.7.9 st", cc="80")


@family(*({"priority": p} for p in ("evict_first", "evict_last", "evict_normal")))
def create_policy(priority: str) -> Instruction:
    """An L2 policy for the whole of what it is used with."""
    one_of("priority", priority, POLICIES)
    return Instruction(f"create_policy_{priority}", "d:i64 <- ",
                       f"createpolicy.fractional.L2::{priority}.b64 $d, 1.0;",
                       isa="9.7.9 createpolicy", effect="pure", cc="80")


Instruction("discard_L2", "at:i64", "discard.global.L2 [$at], 128;", isa="9.7.9 discard", cc="80")
Instruction("prefetch_L2", "at:i64", "prefetch.global.L2 [$at];", isa="9.7.9 prefetch")
Instruction("mapa", "d:i32 <- at:i32, rank:i32", "mapa.shared::cluster.u32 $d, $at, $rank;",
            isa="9.7.9 mapa", effect="pure", cc="90")
Instruction("st_async_b32", "at:i32, x:i32, barrier:i32",
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [$at], $x, [$barrier];",
            isa="9.7.9 st.async", cc="90")
Instruction("st_async_b32x4", "at:i32, x:i32*4, barrier:i32",
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [$at], $x, [$barrier];",
            isa="9.7.9 st.async", cc="90")
# A word of global memory that other groups write, and what they wrote before it.
Instruction("wait_for_word", "at:i64, x:i32",
            ".reg .pred other;\n.reg .b32 found;\nagain:\n"
            "ld.acquire.gpu.global.b32 found, [$at];\nsetp.ne.b32 other, found, $x;\n"
            "@other bra again;", isa="9.7.9 ld", cc="75")
