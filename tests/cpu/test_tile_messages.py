"""Messages of kernels with braces in them: they are text, not places for values."""

from __future__ import annotations

import numpy as np
import pytest

import tile_gpu
from kernels.build import build
from tessera.runtime.flags import Site
from tessera.runtime.target import parse_target
from tessera.tile.cuda.compile import Facts, emit
from tessera.tile.errors import KernelAssertionError

MESSAGES = {  # an expression -> what is shown, where i is 3
    '"{"': "{", '"}"': "}", '"{}"': "{}", '"{0} {i}"': "{0} {i}", '"{{x}}"': "{{x}}",
    'f"{{{i}}} and }}"': "{3} and }", 'f"{i}{{"': "3{", '"%s {!r:>5}"': "%s {!r:>5}",
}


def sites(kernel, *args):
    """What a GPU would report for the values 3, 3, ..."""
    bound, function, _, lanes, _, _ = tile_gpu.prepare(kernel, args, {})
    _, emitted = emit(function, lanes, parse_target("sm_80"), Facts(), True)
    return [Site(*s).text([3] * len(s[3])) for s in emitted.sites if s[2] in ("print", "assert")]


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
    assert sites(k, x) == ["{ [3, 3] 3 } (int32)"]
