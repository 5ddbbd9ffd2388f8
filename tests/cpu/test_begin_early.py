"""Kernels that begin while the one in front of them ends."""

from __future__ import annotations

import pytest

import tessera as ts
from kernels.build import build

SOURCE = """
@kernel
def k(X: Tensor["N", f32], Y: Tensor["N", f32]):
    n = tile.group_id(0) * 128
{later}    Y[n:n+128] = {value}
"""
WAIT = "    tile.grid_dependency_wait()\n"


def body_of(target: str, later: str = "", value: str = "tile.load(X[n:n+128])") -> list[str]:
    kernel = build(SOURCE.format(later=later, value=value))["k"]
    x = ts.zeros(256)
    kernel[2](x, ts.zeros(256))
    text = kernel.inspect_ir("target", target=target)
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return lines[next(i for i, s in enumerate(lines) if s.startswith("def k(")) + 1:]


def test_a_kernel_waits_in_front_of_all_it_does():
    """Of what is read before its first statement, too, such as the key by which it draws."""
    for value in ("tile.load(X[n:n+128])", "tile.cast(tile.random_bits(n), f32)"):
        lines = body_of("sm_90a", value=value)
        assert lines[0] == "dependency_wait()" and lines.count("launch_dependents()") == 1


@pytest.mark.parametrize("target", ["sm_80", "sm_89"])
def test_older_chips_launch_one_behind_the_other(target):
    assert not [s for s in body_of(target) if "depend" in s]


def test_a_kernel_that_says_where_it_waits_is_left_as_it_is():
    lines = body_of("sm_90a", later=WAIT)
    assert lines[0] != "dependency_wait()" and lines.count("dependency_wait()") == 1
    assert "launch_dependents()" not in lines
