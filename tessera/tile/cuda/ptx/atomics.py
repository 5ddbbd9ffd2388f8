"""Atomic read-modify-write on global and shared memory, by scope and order."""

from __future__ import annotations

from ..instruction import Instruction, family, one_of

# Type -> register kind, operations, oldest target. Packed and vector forms only add.
TYPES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "u32": ("i32", ("add", "min", "max"), "75"), "s32": ("i32", ("add", "min", "max"), "75"),
    "u64": ("i64", ("add", "min", "max"), "75"), "s64": ("i64", ("min", "max"), "75"),
    "b32": ("i32", ("exch", "and", "or", "xor", "cas"), "75"),
    "b64": ("i64", ("exch", "and", "or", "xor", "cas"), "75"), "b16": ("i16", ("cas",), "75"),
    "f32": ("f32", ("add",), "75"), "f64": ("f64", ("add",), "75"),
    "f16x2": ("i32", ("add",), "75"), "bf16x2": ("i32", ("add",), "90"),
}
# Sums of half precision types do not flush subnormals, and say so.
_NOFTZ = {"f16x2": ".noftz", "bf16x2": ".noftz"}
SPACES = ("global", "shared")
SCOPES = ("cta", "cluster", "gpu", "sys")
ORDERS = ("relaxed", "acquire", "release", "acq_rel")


def _spelled(verb: str, op: str, type: str, space: str, scope: str, order: str) -> str:
    one_of("type", type, TYPES)
    one_of("op", op, TYPES[type][1])
    one_of("space", space, SPACES)
    one_of("scope", scope, SCOPES)
    one_of("order", order, ORDERS)
    return f"{verb}.{order}.{scope}.{space}.{op}{_NOFTZ.get(type, '')}.{type}"


def _cc(type: str, scope: str) -> str:
    return "90" if scope == "cluster" else TYPES[type][2]


_SAMPLES = tuple({"op": op, "type": t} for t, (_, ops, _) in TYPES.items() for op in ops)
_ADDS = ({"op": "add", "type": "u32", "scope": "sys", "order": "release"},
         {"op": "add", "type": "u32", "scope": "cluster", "order": "release"},
         {"op": "add", "type": "f32", "space": "shared", "scope": "cta"})


@family(*_SAMPLES, *_ADDS, {"op": "add", "type": "u32", "order": "acq_rel"},
        {"op": "cas", "type": "b32", "order": "acquire", "space": "shared"})
def atom(op: str, type: str, space: str = "global", *, scope: str = "gpu",
         order: str = "relaxed") -> Instruction:
    """(address, x) -> the value before; cas: (address, expected, new)."""
    opcode = _spelled("atom", op, type, space, scope, order)
    kind, address = TYPES[type][0], "i64" if space == "global" else "i32"
    values = f"expected:{kind}, x:{kind}" if op == "cas" else f"x:{kind}"
    text = "$expected, $x" if op == "cas" else "$x"
    return Instruction(f"atom_{op}_{type}_{space}_{scope}_{order}",
                       f"d:{kind} <- at:{address}, {values}", f"{opcode} $d, [$at], {text};",
                       isa="9.7.13 atom", cc=_cc(type, scope))


@family(*(s for s in _SAMPLES if s["op"] not in ("cas", "exch")), *_ADDS)
def red(op: str, type: str, space: str = "global", *, scope: str = "gpu",
        order: str = "relaxed") -> Instruction:
    """(address, x) without a result: cheaper, nothing comes back. Orders: relaxed, release."""
    one_of("order", order, ("relaxed", "release"))  # nothing comes back to acquire by
    opcode = _spelled("red", op, type, space, scope, order)
    kind, address = TYPES[type][0], "i64" if space == "global" else "i32"
    return Instruction(f"red_{op}_{type}_{space}_{scope}_{order}", f"at:{address}, x:{kind}",
                       f"{opcode} [$at], $x;", isa="9.7.13 red", cc=_cc(type, scope))


@family({"vector": 4}, {"vector": 2})
def red_add_vector(vector: int) -> Instruction:
    """`vector` f32 sums at a 16- (8-) byte aligned global address in one access."""
    one_of("vector", vector, (2, 4))
    return Instruction(f"red_add_f32x{vector}", f"at:i64, x:f32*{vector}",
                       f"red.relaxed.gpu.global.add.v{vector}.f32 [$at], $x;", isa="9.7.13 red",
                       cc="90")


@family({"op": "and"}, {"op": "or"})
def red_bits(op: str) -> Instruction:
    """(address, x, p) in global memory where p holds: for codes that share a word with others."""
    one_of("op", op, ("and", "or"))
    return Instruction(f"red_bits_{op}", "at:i64, x:i32, p:pred",
                       f"@$p red.relaxed.gpu.global.{op}.b32 [$at], $x;", isa="9.7.13 red")
