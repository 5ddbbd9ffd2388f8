"""Packed weights that warpgroups unpack, on the machine that knows rings, slots and running
matmuls."""

from __future__ import annotations

import pytest

from cpu.test_packed_weights import arguments, numbers, product
from hopper_lowering import Known, distance, run
from tessera.runtime.generations import GENERATIONS
from tessera.tile.cuda.lower.multiply_codes import stack_codes
from tessera.tile.cuda.lower.warp_specialised import WarpSpecialisedProgram, lower_warp_specialised
from tessera.tile.cuda.lower.warp_specialised.rewrite import is_op
from tessera.tile.ir.ir import For, Op, walk

SM90A = GENERATIONS["sm_90a"]


def stacked(args, **how):
    function = product.lower(*args, **how)
    made = stack_codes(function, SM90A, Known().divisible)
    return None if made is function else made


@pytest.mark.parametrize("kind", ["fp8_e4m3", "bf16"])
@pytest.mark.parametrize("codes, M", [("fp4_e2m1", 16), ("fp6_e3m2", 64)])
def test_what_warpgroups_make_of_it_is_the_product(rng, codes, M, kind):
    """Sums of fp8, of which tensor cores keep few bits, are added outside of them."""
    args, how = arguments(rng, codes, M, 128, 1536, kind), {"BN": 64, "BM": M, "BK": 512}
    made = lower_warp_specialised(stacked(args, **how), None, Known(), SM90A)
    assert isinstance(made, WarpSpecialisedProgram), made
    loop = next(n for n in walk(made.function.body) if isinstance(n, For)
                and any(is_op(m, "async_matmul") for m in n.body))
    names = [n.name for n in loop.body if isinstance(n, Op) and n.name in (
        "unpack_codes", "async_matmul", "matmul_wait", "add")]
    each = ["unpack_codes", "async_matmul"]
    assert names == ([*each, *each, "matmul_wait", "add"] if kind == "fp8_e4m3"
                     else [*each, "matmul_wait"] * 2)
    run(product, made, (1, 2), *args, **how)
    assert distance(args[2], numbers(args[1]) @ numbers(args[0]).T) < 1e-5


@pytest.mark.parametrize("codes, kind, BK, taken", [
    ("fp4_e2m1", "fp8_e4m3", 256, True), ("fp4_e2m1", "fp8_e4m3", 128, False),
    ("int4", "fp8_e4m3", 512, False), ("fp4_e2m1", "fp8_e5m2", 512, False),
    ("int4", "bf16", 512, True)])
def test_what_becomes_the_first_operand_in_registers(rng, codes, kind, BK, taken):
    args = arguments(rng, codes, 16, 64, 1024, kind)
    assert (stacked(args, BN=64, BM=16, BK=BK) is not None) == taken
