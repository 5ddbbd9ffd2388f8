"""Kernels at every level, with the compiler for GPUs and without a GPU."""

from __future__ import annotations

import re

import numpy as np
import pytest

import tessera as ts
from kernels import seeds
from ptx_harness import require_compiler
from tessera.__main__ import main
from tessera.runtime.ptxas import assemble, find_tool
from tessera.tile.ir.ir import Op, walk

require_compiler()
TARGETS = pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a"])


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def vectors():
    return np.zeros(1024, np.float32), np.zeros(1024, np.float32)


@pytest.mark.row("DBG-09")
@TARGETS
def test_registers_and_spills_are_those_of_the_assembler(target, vectors):
    p = ts.debug.register_pressure(seeds.saxpy, *vectors, 2.0, target=target)
    ptx = ts.debug.lowering(seeds.saxpy, target=target).sections["ptx"].text
    r = assemble(ptx, p.target).resources
    assert (p.registers, p.spill_store_bytes, p.spill_load_bytes) == (
        r.registers, r.spill_store_bytes, r.spill_load_bytes)
    assert str(p.target) == target and 0 < p.registers < 40 and not p.spills and not p
    assert p.lanes == 128 and p.occupancy.fraction == 1.0 and p.occupancy.limit == "warps"
    assert f"registers  {r.registers} of 255 a lane" in str(p)


@pytest.mark.row("IR-04")
@TARGETS
def test_the_target_level_is_ptx(target, vectors):
    seeds.saxpy.lower(*vectors, 2.0)
    text = ts.debug.lowering(seeds.saxpy, target=target).sections["ptx"].text
    assert re.match(r"\.version \d\.\d\n", text) and f".target {target}\n" in text
    assert ".entry saxpy(" in text and "fma.rn.f32" in text


@TARGETS
def test_every_level_knows_the_users_line(target, vectors, request, monkeypatch):
    monkeypatch.chdir(request.config.rootpath)
    low = ts.debug.lowering(seeds.saxpy, *vectors, 2.0, target=target)
    assert all(s.text or s.level == "sass" for s in low.sections.values())
    became = low.of(f"tests/kernels/seeds.py:{seeds.saxpy.source.first + 7}")
    assert became["source"] == ("y[i] = alpha * x[i] + y[i]",)
    assert any("fma.rn.f32" in x for x in became["ptx"])
    assert any("= mul(" in x for x in became["tile"])
    assert any("= mul(" in x for x in became["target"])
    if find_tool("nvdisasm"):
        assert any("FFMA" in x for x in became["sass"])
        assert not any("//## File" in x for x in low.sections["sass"].lines)


def test_values_keep_their_names_from_tile_ir_to_the_target(vectors):
    function = seeds.saxpy.lower(*vectors, 2.0)
    source = ts.debug.lowering(seeds.saxpy, target="sm_80").sections["target"].text
    names = [d.value.name for n in walk(function.body) if isinstance(n, Op) for d in n.outs]
    assert len(names) >= 6
    assert all(re.search(rf"^ +{n} = ", source, re.M) for n in names)


def test_the_page_of_a_real_kernel(tmp_path, capsys, request, monkeypatch):
    monkeypatch.chdir(request.config.rootpath)
    file = tmp_path / "page.html"
    code = main(["inspect", "tests/kernels/seeds.py::saxpy", "--size", "n=4096", "--target",
                 "sm_80", "--html", str(file)])
    out, text = capsys.readouterr().out, file.read_text()
    assert code == 0 and "for sm_80, 128 lanes" in out and "on A100: bound by memory" in out
    (line,) = [x for x in text.splitlines() if "fma.rn.f32" in x]
    (source,) = [x for x in text.splitlines() if "    y[i] = alpha * x[i] + y[i]</span>" in x
                 and "href=" in x]
    number = re.search(r'class="(u\d+)"', line)[1]
    assert f'<span class="{number}">' in source and f"body:has(.{number}:hover)" in text


def test_checked_builds_test_each_access(vectors):
    from tessera.tile.cuda.compile import compile_function

    function = seeds.saxpy.lower(*vectors, 2.0)
    plain, checked = (compile_function(function, 128, target="sm_80", checked=c)
                      for c in (False, True))
    assert {p.kind for p in checked.parameters} - {p.kind for p in plain.parameters} >= {"report"}


# --- the cache of machine code ------------------------------------------------------------------
def texts(kernel, *args) -> dict[str, str]:
    found = ts.debug.lowering(kernel, *args, target="sm_80").sections
    return {level: found[level].text for level in ("target", "ptx")}


def test_what_was_compiled_once_is_read_from_one_place(vectors, tmp_path, monkeypatch):
    """Levels, figures and programs of another kernel object need neither NVVM nor ptxas again."""
    from tessera.graph.cuda.levels import text_of
    from tessera.tile.cuda import build as building

    first, again = (ts.kernel(seeds.saxpy.fn) for _ in range(2))
    graph = ts.jit(lambda x: ts.exp(x) + 1).graph(ts.Tensor[4096, ts.f32])
    wanted = texts(first, *vectors, 2.0), text_of("ptx", graph, "sm_80")
    taken = ts.debug.register_pressure(first, *vectors, 2.0, target="sm_80")
    assert ".entry" in wanted[0]["ptx"] and ".entry" in wanted[1]

    def refuse(*args, **options):
        raise AssertionError("compiled again")

    monkeypatch.setattr(building.CompileJob, "run", refuse)
    assert (texts(again, *vectors, 2.0), text_of("ptx", graph, "sm_80")) == wanted
    assert ts.debug.register_pressure(again, *vectors, 2.0, target="sm_80") == taken
    with pytest.raises(AssertionError, match="compiled again"):
        texts(again.with_schedule(ts.Schedule(warps=1)), *vectors, 2.0)
    kept = [f for f in tmp_path.rglob("*") if f.is_file() and b"\x7fELF" in f.read_bytes()]
    assert len(kept) == 2 and {f.parent for f in kept} == {kept[0].parent}
