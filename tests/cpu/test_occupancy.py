"""Occupancy: values of cuda_occupancy.h, limits of the programming guide, and what laws demand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import ArgumentError, UnsupportedTargetError
from tessera.runtime.generations import GENERATIONS
from tessera.runtime.occupancy import occupancy
from tessera.runtime.target import Target, parse_target


# (target, threads, registers, shared bytes) -> groups, by cudaOccMaxActiveBlocksPerMultiprocessor
# of CUDA 13.0's cuda_occupancy.h, with the limits of the programming guide as device properties.
@pytest.mark.parametrize("target, threads, registers, shared, groups, limit", [
    ("sm_90a", 128, 32, 0, 16, "warps"),
    ("sm_90a", 128, 168, 0, 3, "registers"),
    ("sm_90a", 384, 168, 200 * 1024, 1, "registers"),
    ("sm_90a", 128, 40, 48 * 1024, 4, "shared memory"),
    ("sm_90a", 32, 16, 0, 32, "groups"),
    ("sm_80", 256, 255, 0, 1, "registers"),
    ("sm_80", 288, 255, 0, 0, "registers"),
    ("sm_89", 64, 200, 16888, 4, "registers"),
    ("sm_89", 64, 168, 16888, 5, "shared memory"),
    ("sm_86", 96, 33, 0, 16, "groups"),
    ("sm_75", 1024, 64, 0, 1, "warps"),
    ("sm_75", 33, 64, 64 * 1024, 1, "shared memory"),
    ("sm_120", 128, 40, 100 * 1024, 0, "shared memory"),
])
def test_known_values(target, threads, registers, shared, groups, limit):
    got = occupancy(target, threads=threads, registers=registers, shared_bytes=shared)
    assert (got.groups, got.limit) == (groups, limit)
    assert got.warps == groups * -(-threads // 32) and got.fraction == got.warps / got.of


def test_the_text():
    text = str(occupancy("sm_90a", threads=128, registers=168))
    assert text == "3 groups, 12 of 64 warps (19%), limited by registers"
    assert str(occupancy("sm_80", threads=256, registers=255)).startswith("1 group, 8 of 64")


def test_every_target_has_limits():
    assert {parse_target(t).generation.registers for t in GENERATIONS} == {65536}
    with pytest.raises(UnsupportedTargetError, match="no target 'sm_1'"):
        occupancy("sm_1", threads=32, registers=32)
    with pytest.raises(UnsupportedTargetError, match="limits of sm_121 are not known"):
        occupancy(Target(12, 1), threads=32, registers=32)


@pytest.mark.parametrize("threads, registers", [(0, 32), (1025, 32), (128, 256), (128, -1)])
def test_what_no_group_has(threads, registers):
    with pytest.raises(ArgumentError, match="1 to 1024 threads"):
        occupancy("sm_80", threads=threads, registers=registers)


@given(st.sampled_from(sorted(GENERATIONS)), st.integers(1, 32), st.integers(1, 255),
       st.integers(0, 227 * 1024))
def test_more_of_anything_never_lets_more_groups_in(target, warps, registers, shared):
    got = occupancy(target, threads=32 * warps, registers=registers, shared_bytes=shared)
    top = GENERATIONS[target]
    assert got.warps <= top.warps and got.groups <= top.groups
    assert got.groups * registers * 32 * warps <= top.registers
    assert got.groups * shared <= top.shared_bytes
    for more in (dict(registers=min(255, registers + 8)), dict(shared_bytes=shared + 1024)):
        args = dict(threads=32 * warps, registers=registers, shared_bytes=shared) | more
        assert occupancy(target, **args).groups <= got.groups
