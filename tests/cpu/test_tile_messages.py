"""Messages of kernels with braces in them: they are text, not places for values."""

from __future__ import annotations

import numpy as np
import pytest

import emulator
import tile_gpu
from kernels.build import build
from tessera.runtime.flags import ReportSite
from tessera.runtime.target import parse_target
from tessera.tile.cuda.compile import ArgumentFacts, emit
from tessera.tile.ir.errors import KernelAssertionError

MESSAGES = {  # an expression -> what is shown, where i is 3
    '"{"': "{", '"}"': "}", '"{}"': "{}", '"{0} {i}"': "{0} {i}", '"{{x}}"': "{{x}}",
    'f"{{{i}}} and }}"': "{3} and }", 'f"{i}{{"': "3{", '"%s {!r:>5}"': "%s {!r:>5}",
}


def sites(kernel, *args):
    """What a GPU would report for the values 3, 3, ..."""
    bound, function, _, lanes, _, _ = tile_gpu.prepare(kernel, args, {})
    _, emitted = emit(function, lanes, parse_target("sm_80"), ArgumentFacts(), True)
    return [ReportSite(*s).text([3] * len(s[3])) for s in emitted.sites if s[2] in ("print",
                                                                                    "assert")]


@pytest.mark.parametrize("message, shown", MESSAGES.items())
def test_asserts(message, shown):
    k = build(f"""@kernel
def k(x: Tensor["n", i32]):
    i = x[0]
    assert i == 0, {message}
""")["k"]
    with pytest.raises(KernelAssertionError) as caught:
        k(np.full(1, 3, np.int32))
    assert caught.value.message.endswith(f": {shown}")
    assert sites(k, np.full(1, 3, np.int32)) == [shown]


@pytest.mark.parametrize("message, shown", MESSAGES.items())
def test_prints(message, shown, capsys):
    k = build(f"""@kernel
def k(x: Tensor["n", i32]):
    i = x[0]
    print({message}, i, ("{{", i, "}}"), ("a", "{{}}"), sep="}}")
""")["k"]
    whole = shown + "}3}({, 3, })}('a', '{}')"
    k(np.full(1, 3, np.int32))
    assert capsys.readouterr().out == whole + "\n"
    assert sites(k, np.full(1, 3, np.int32)) == [whole]


def test_a_print_of_a_tile_keeps_its_braces(capsys):
    k = build("""@kernel
def k(x: Tensor["n", 2, i32]):
    print("{", tile.load(x[0:1]), "}", x[0, 0])
""")["k"]
    x = np.full((1, 2), 3, np.int32)
    k(x)
    assert capsys.readouterr().out == "{ [[3 3]] } 3\n"
    assert sites(k, x) == ["{ (tile<1x2 x int32>) } 3", "{ [3, 3] 3 } (int32)"]


# --- tiles of one axis ------------------------------------------------------------------------
PRINTS = {
    "print(t)": "{t}", 'print("t", t)': "t {t}", 'print("t", t, t.shape)': "t {t} ({n},)",
    'print("t", t, tile.reduce_sum(t))': "t {t} {sum}", 'print(f"{t}|", 1)': "{t}| 1",
    'print("t", t, tile.load(x[0:2]))': "t {t} {first}",
}


def printing(line: str, n: int):
    return build(f"""@kernel
def k(x: Tensor["n", f32]):
    t = tile.load(x[0:{n}])
    {line}
""")["k"]


@pytest.mark.parametrize("line", PRINTS)
@pytest.mark.parametrize("n", [1, 4, 32, 40, 100])
def test_a_tile_of_one_axis_is_one_value(line, n, capsys):
    """Whatever the number of lanes: printed once, whole."""
    x = np.arange(max(n, 2), dtype=np.float32)
    printing(line, n)(x)
    t = x[:n]
    want = PRINTS[line].format(t=np.array2string(t), n=n, sum=t.sum(), first=x[:2])
    assert capsys.readouterr().out == want + "\n"


def test_a_tile_in_a_loop_and_by_lanes(capsys):
    k = build("""@kernel
def k(x: Tensor["n", f32]):
    for i in range(0, 8, 4):
        print(i, tile.load(x[i:i+4]))
    t = tile.load(x[0:4])
    if tile.local_id() < 2:
        print(tile.local_id(), t)
""")["k"]
    k[1, 32](np.arange(8, dtype=np.float32))
    assert capsys.readouterr().out.splitlines() == [
        "0 [0. 1. 2. 3.]", "4 [4. 5. 6. 7.]", "0 [0. 1. 2. 3.]", "1 [0. 1. 2. 3.]"]


@pytest.mark.parametrize("lanes", [32, 45, 128])
@pytest.mark.parametrize("n", [1, 4, 40, 100])
def test_emulated_lanes_print_each_element_once(n, lanes):
    k = printing('print("t", t, tile.reduce_sum(t))', n)
    x = np.arange(n, dtype=np.float32)
    got = emulator.printed(k, x, groups=1, lanes=lanes)
    elements = [f"t [{i}] {x[i]} (f32)" for i in range(n)]
    assert sorted(got) == sorted([f"t (tile<{n} x f32>) {x.sum()}", *elements])


def test_emulated_lanes_print_every_tile_of_a_line():
    x = np.arange(6, dtype=np.float32)
    got = emulator.printed(printing('print("t", t, tile.load(x[0:2]))', 6), x, groups=1,
                                lanes=32)
    first = [f"t [{i}] {x[i]} (tile<2 x f32>)" for i in range(6)]
    second = [f"t (tile<6 x f32>) [{i}] {x[i]}" for i in range(2)]
    assert sorted(got) == sorted(first + second)


@pytest.mark.parametrize("n", [4, 32, 40])
def test_an_assertion_on_a_tile_is_the_groups(n):
    k = build(f"""@kernel
def k(x: Tensor["n", f32]):
    t = tile.load(x[0:{n}])
    if tile.local_id() < 3:
        assert t >= 0.0, f"{{t}} at {{tile.group_id()}}"
""")["k"]
    x = np.arange(n, dtype=np.float32)
    k[1, 32](x)
    x[-1] = -1
    with pytest.raises(KernelAssertionError) as caught:
        k[1, 32](x)
    assert caught.value.message == f"assertion failed in group 0: {np.array2string(x)} at 0"
