"""Traces, profiles, prints, inspection and effects: the tools of `ts.debug`."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest

import tessera as ts
from tessera import hooks
from tessera.__main__ import main as tessera_main
from tessera.runtime import nvtx


@ts.jit
def block(x, w):
    h = ts.tanh(x @ w)
    return ts.sum(h * h)


@pytest.fixture
def args(rng):
    return tuple(ts.tensor(rng.standard_normal(s).astype(np.float32)) for s in ((4, 3), (3, 2)))


class TestTrace:
    @pytest.mark.row("DBG-17")
    def test_records_in_order_with_shapes_and_types(self, args):
        with ts.debug.trace() as program:
            block(*args)
            ts.exp(args[0])
        ops = [r.op for r in program]
        assert ops == ["matmul", "tanh", "mul", "reduce_sum", "exp"]
        first, last = program[0], program[-1]
        assert list(map(str, first.inputs)) == ["f32[4, 3]", "f32[3, 2]"]
        assert list(map(str, first.outputs)) == ["f32[4, 2]"]
        assert "h = ts.tanh(x @ w)" in first.where.text and first.path == ("block",)
        assert last.path == () and last.where.text == "ts.exp(args[0])"
        assert str(program).splitlines()[0].startswith("matmul: f32[4, 3], f32[3, 2] -> f32[4, 2]")

    def test_it_ends_with_its_block_also_after_an_error(self, args):
        with pytest.raises(ZeroDivisionError), ts.debug.trace() as program:
            raise ZeroDivisionError
        before = [list(x) for x in (hooks.eager_ops, hooks.nodes, hooks.runs)]
        ts.exp(args[0])
        assert len(program) == 0
        assert [list(x) for x in (hooks.eager_ops, hooks.nodes,
                                  hooks.runs)] == before

    def test_traces_nest(self, args):
        with ts.debug.trace() as outer:
            ts.exp(args[0])
            with ts.debug.trace() as inner:
                ts.log(args[0])
        assert [r.op for r in outer] == ["exp", "log"] and [r.op for r in inner] == ["log"]


class TestProfile:
    def test_printing_one_shows_its_table(self, args):
        with ts.debug.profile() as p:
            block(*args)
        assert str(p) == p.launches.table() and "steps on the host" in str(p)
        assert repr(p).startswith("<") and len(repr(p)) < 200

    @pytest.mark.row("DBG-14")
    def test_named_ranges_nest(self, args):
        with ts.debug.profile() as p:
            with ts.debug.range("step"):
                with ts.debug.range("forward"):
                    block(*args)
                with ts.debug.range("update"):
                    pass
        assert [s.path for s in p.spans] == [("step", "forward"), ("step", "update"), ("step",)]
        forward, update, step = p.spans
        assert step.start_ns <= forward.start_ns <= forward.end_ns <= update.start_ns
        assert update.end_ns <= step.end_ns
        assert {r.path for r in p.records} == {("step", "forward", "block")}
        events = json.loads(p.chrome_trace())["traceEvents"]
        spans = {e["name"]: e for e in events if e["cat"] == "range"}
        assert spans["step"]["ts"] <= spans["forward"]["ts"]
        assert spans["forward"]["ts"] + spans["forward"]["dur"] <= spans["step"]["ts"] + \
            spans["step"]["dur"]

    @pytest.mark.row("DBG-14")
    def test_ranges_of_nvtx_when_they_are_on(self, monkeypatch):
        calls = []
        fake = SimpleNamespace(push_range=calls.append, pop_range=lambda: calls.append("end"))
        monkeypatch.setitem(sys.modules, "nvtx", fake)
        monkeypatch.setattr(nvtx, "functions", nvtx.functions.__wrapped__)
        with ts.debug.range("off"), ts.config.scope(nvtx=True):
            with pytest.raises(ZeroDivisionError), ts.debug.range("a"):
                with ts.debug.range("b"):
                    pass
                1 / 0  # noqa: B018
        assert calls == ["a", "b", "end", "end"]

    def test_nvtx_without_a_package(self, monkeypatch):
        for name in ("nvtx", "cupy.cuda.nvtx", "cupy"):
            monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setattr(nvtx, "functions", nvtx.functions.__wrapped__)
        with pytest.raises(ts.UnsupportedTargetError, match="neither nvtx nor CuPy"), \
                ts.config.scope(nvtx=True), ts.debug.range("a"):
            pass

    def test_nvtx_is_on_where_a_profiler_is_attached(self, monkeypatch, fresh_config):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "nvtx" or None)
        assert not ts.config.profiler_attached()
        monkeypatch.setenv("NVTX_INJECTION64_PATH", "somewhere")
        assert ts.config.profiler_attached()
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        assert not ts.config.profiler_attached()

    @pytest.mark.row("DBG-18")
    def test_folded_stacks(self, args):
        with ts.debug.profile() as p:
            with ts.debug.range("outer;part"):
                for _ in range(3):
                    block(*args)
        lines = [line.rsplit(" ", 1) for line in p.flamegraph().splitlines()]
        stacks = {stack: int(ns) for stack, ns in lines}
        assert set(stacks) == {f"outer,part;block;{op}"
                               for op in ("matmul", "tanh", "mul", "reduce_sum", "reshape")}
        assert all(ns > 0 for ns in stacks.values())
        total = sum(r.duration_ns for r in p.records)
        assert sum(stacks.values()) == total <= p.spans[0].end_ns - p.spans[0].start_ns

    def test_the_chrome_trace_is_written(self, args, tmp_path):
        with ts.debug.profile() as p:
            block(*args)
        text = p.chrome_trace(tmp_path / "trace.json")
        assert (tmp_path / "trace.json").read_text() == text
        ops = [e for e in json.loads(text)["traceEvents"] if e["cat"] == "op"]
        assert [e["name"] for e in ops] == ["matmul", "tanh", "mul", *["reduce_sum"] * 2, "reshape"]
        assert all(e["dur"] > 0 and "test_debug_tools" in e["args"]["line"] for e in ops)

    def test_the_fused_program_is_what_is_seen(self, rng):
        """Its loops, not the ops that they were; with operations, bytes and the user's line."""
        def f(x, w):
            h = x @ w
            return ts.sum(ts.tanh(h) * 2.0, axis=-1, keepdims=True)  # one loop

        x, w = (ts.tensor(rng.standard_normal((128, 128)).astype(np.float32)) for _ in range(2))
        g = ts.jit(f)
        want = g(x, w)
        with ts.debug.profile() as p:
            got = g(x, w)
        assert (got.array == want.array).all()
        matmul, loop = p.launches.records
        assert [r.op for r in p.records] == ["matmul", "loop tanh mul reduce_sum"]
        assert (matmul.work.kind, matmul.work.flops) == ("matmul", 2 * 128**3)
        assert (loop.work.kind, loop.work.flops) == ("reduction", 3 * 128 * 128)
        assert (loop.work.read_bytes, loop.work.written_bytes) == (4 * 128 * 128 + 4, 4 * 128)
        assert "one loop" in loop.work.where.text and min(matmul.us, loop.us) > 0
        assert "on the host" in p.launches.table() and "loop tanh mul" in p.launches.table()

    def test_ops_outside_of_functions_have_times(self, rng):
        x = ts.tensor(rng.standard_normal((512, 512)).astype(np.float32))
        with ts.debug.profile() as p:
            ts.exp(x)
        (exp,) = p.launches.records
        assert exp.work.name == "exp" and exp.work.part == "eager" and exp.us > 1
        assert exp.work.flops == 512 * 512 and exp.work.bytes == 2 * 4 * 512 * 512
        assert not hooks.timed_ops and not hooks.timed_groups

    def test_one_page_without_scripts(self, rng, tmp_path):
        x = ts.tensor(rng.standard_normal((128, 128)).astype(np.float32))
        with ts.debug.profile() as p:
            ts.jit(lambda x: ts.softmax(x @ x))(x)
            ts.exp(x)
        text = p.html(tmp_path / "page.html")
        assert (tmp_path / "page.html").read_text() == text
        assert "<script" not in text
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
        root = ElementTree.fromstring(text.partition("\n")[2].replace('<meta charset="utf-8">', ""))
        bars = [r for r in root.iter() if r.tag.endswith("rect")]
        assert len(bars) == len(p.launches.records) + len(p.memory_timeline().moments)
        titles = "".join(t.text for t in root.iter() if t.tag.endswith("title"))
        assert "matmul" in titles and "test_debug_tools.py" in titles and "bytes" in titles

    def test_the_command(self, tmp_path, capsys):
        script = tmp_path / "program.py"
        script.write_text("import sys\nimport tessera as ts\n"
                          "def main():\n    print('got', sys.argv[1:])\n"
                          "    ts.jit(lambda x: ts.exp(x) * 2.0)(ts.ones((100, 100)))\n"
                          "    sys.exit(3)\nmain()\n")
        files = {k: str(tmp_path / f"out.{k}") for k in ("html", "json", "trace")}
        options = [x for k, f in files.items() for x in (f"--{k}", f)]
        assert tessera_main(["profile", *options, str(script), "--steps", "2"]) == 3
        said = capsys.readouterr().out
        assert "got ['--steps', '2']" in said and "loop exp mul" in said
        figures = json.loads((tmp_path / "out.json").read_text())
        assert "elementwise forward" in {row["name"] for row in figures["kinds"]}
        assert all((tmp_path / f"out.{k}").stat().st_size for k in files)
        assert tessera_main(["profile", str(tmp_path / "none.py")]) == 1
        assert "there is no file" in capsys.readouterr().err

    def test_the_command_lists_kernels_that_the_program_calls(self, tmp_path, capsys):
        script = tmp_path / "program.py"
        script.write_text("import numpy as np\nimport tessera as ts\n@ts.kernel\n"
                          "def double(x: ts.Tensor['n', ts.f32]):\n"
                          "    x[tile_n:tile_n+64] = 2.0 * ts.tile.load(x[tile_n:tile_n+64])\n"
                          "for _ in range(3):\n    double(np.ones(200, np.float32))\n")
        assert tessera_main(["profile", str(script)]) == 0
        heading, row = capsys.readouterr().out.splitlines()
        assert heading.split()[:2] == ["us", "n"] and "called by the program" in heading
        assert row.split(maxsplit=2)[1:] == ["3", "double, under the interpreter"]
        assert float(row.split()[0]) > 0

    @pytest.mark.row("DBG-19")
    def test_live_bytes_are_those_counted_by_hand(self):
        def f(x):  # x: 400 bytes throughout
            a = ts.exp(x)  # 400
            b = ts.sum(a, axis=1)  # 40, a is dead after it
            c = ts.reshape(b, (2, 5))  # a view
            return c + 1.0  # the constant 4, the result 40

        x = ts.ones((10, 10))
        timeline = ts.debug.memory_timeline(ts.jit(f).graph(x))
        seen = [(m.op, m.bytes) for m in timeline.moments]
        assert seen == [("exp", 800), ("reduce_sum", 840), ("reshape", 440), ("constant", 444),
                        ("add", 484)]
        assert timeline.peak_bytes == 840 and timeline.peak.op == "reduce_sum"
        assert sorted(timeline.peak.live.values()) == [40, 400, 400]
        lives = [sorted(m.live.values()) for m in timeline.moments]  # of each tensor, at each op
        assert lives == [[400, 400], [40, 400, 400], [40, 400], [4, 40, 400], [4, 40, 40, 400]]
        first, *later = [set(m.live) for m in timeline.moments]
        assert len(first - later[1]) == 1, "exp's result is dead after the sum"
        with ts.debug.profile() as p:
            ts.jit(f)(x)
        ran = p.memory_timeline()
        assert [(m.op, m.bytes) for m in ran.moments] == [
            ("exp", 804), ("reduce_sum", 844), ("reshape", 444), ("add", 484)]
        assert ran.peak_bytes == 844  # with the constant
        assert str(timeline).startswith("peak 840 bytes") and "test_debug_tools" in str(timeline)

    def test_threads_have_paths_of_their_own(self, args):
        def work(name):
            with ts.debug.range(name):
                ts.exp(args[0])

        with ts.debug.profile() as p:
            threads = [threading.Thread(target=work, args=(n,)) for n in "ab"]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
        assert sorted(r.path for r in p.records) == [("a",), ("b",)]


class TestPrint:
    @pytest.mark.row("EFF-02")
    def test_once_per_run_compiled_or_not(self, capsys):
        def f(x):
            ts.debug.print("x = {} and {total:.1f}", x, total=ts.sum(x))
            return x * 2.0

        x = ts.tensor([1.0, 2.0])
        said = "x = [1. 2.] and 3.0\n"
        g = ts.jit(f)
        for call in (f, g, g, ts.jit(lambda x: f(x) + 1.0), ts.grad(lambda x: ts.sum(f(x)))):
            call(x)
            assert capsys.readouterr().out == said
        assert g.effects == {"io"}

    def test_it_has_no_result_to_show(self, capsys):
        @ts.jit
        def f(x):
            ts.debug.print("{}", x)
            return x * 2.0

        with ts.debug.trace() as program:
            f(ts.tensor([1.0]))
            ts.debug.print("{}", ts.tensor([3.0, 4.0]))
        shown = [str(r) for r in program if r.op == "print"]
        assert [s.split("   ")[0] for s in shown] == ["print: f32[1]", "print: f32[2]"]
        (line,) = [s for s in f.inspect_ir("graph").splitlines() if "print" in s]
        assert line.startswith("  print(%0) ") and "!io" in line
        assert capsys.readouterr().out == "[1.]\n[3. 4.]\n"

    @pytest.mark.row("EFF-02")
    def test_recomputation_does_not_print_again(self, capsys):
        def f(x):
            y = ts.exp(x)
            ts.debug.print("y = {:.1f}", y)
            return y * y

        for remat in (ts.checkpoint, ts.remat):
            g = ts.grad(lambda x, remat=remat: remat(f)(x) * 3.0)
            value = g(ts.tensor(0.5)).item()
            assert capsys.readouterr().out == "y = 1.6\n"
            assert value == pytest.approx(6 * np.exp(1.0), rel=1e-5)

    @pytest.mark.row("EFF-02")
    def test_in_the_order_of_the_program_and_never_dropped(self, capsys):
        @ts.jit
        def f(x):
            for i in range(5):
                ts.debug.print("{} {}", i, ts.cos(x * i))  # no result depends on it
            return x

        f(ts.tensor(0.0))
        assert capsys.readouterr().out == "".join(f"{i} 1.0\n" for i in range(5))

    def test_in_a_loop_under_vmap_and_in_its_gradient(self, capsys):
        def step(c, x):
            ts.debug.print("c = {}", c)
            return c * x, c

        def loop(c):
            return ts.scan(step, c, ts.tensor([2.0, 3.0]))[0]

        for f in (loop, ts.jit(loop), ts.grad(loop)):
            f(ts.tensor(1.0))
            assert capsys.readouterr().out == "c = 1.0\nc = 2.0\n"
        ts.vmap(lambda x: ts.debug.print("{}", x) or x)(ts.tensor([1.0, 2.0]))
        assert capsys.readouterr().out == "[1. 2.]\n"

    def test_a_format_is_of_each_element(self, capsys):
        ts.vmap(lambda x: ts.debug.print("{:.2f}", x) or x)(ts.tensor([1.0, 2.5]))
        ts.jit(lambda x: ts.debug.print("{:.1f} {:03d} {}", x, ts.arange(2), x.shape) or x)(
            ts.ones((2, 1), "bf16"))
        ts.debug.print("{0:.1f} {1:d} {rate:.0e} {0.shape}", ts.ones(2), 3, rate=0.01)
        assert capsys.readouterr().out == (
            "[1.00 2.50]\n[[1.0]\n [1.0]] [000 001] (2, 1)\n[1.0 1.0] 3 1e-02 (2,)\n")

    def test_low_precision_values_are_shown_as_numbers(self, capsys):
        ts.debug.print("{:.2f} {}", ts.cast(ts.tensor(1.5), "fp4_e2m1"), "text")
        ts.debug.print("{}", ts.quantize(ts.tensor([4.0, -4.0]), 'int8 @scaled("amax")'))
        first, second = capsys.readouterr().out.splitlines()
        assert first == "1.50 text" and second == "[ 4. -4.]"


class TestInspect:
    def test_the_function_compiled_last(self, args):
        @ts.jit
        def newest(x):
            return ts.exp(x) + 1.0

        newest(args[0])
        text = ts.inspect_ir("graph")
        assert text == newest.inspect_ir("graph") == ts.inspect_ir("graph", newest)
        assert "graph newest" in text and "return ts.exp(x) + 1.0" in text
        assert "test_debug_tools.py:" in text and "%1: f32[4, 3] = exp(%0)" in text

    def test_levels(self, args):
        block(*args)
        assert "schedule" in block.inspect_ir("schedule")
        for level, text in (("tile", "tile.func @g0"), ("target", "def g0")):
            assert text in block.inspect_ir(level)
        with pytest.raises(ts.ArgumentError, match="levels are graph, schedule, tile, target"):
            ts.inspect_ir("hlo", block)

    def test_the_gradient(self, args):
        def loss(x, w):
            return ts.sum(ts.tanh(x @ w))

        f = ts.jit(loss)
        f(*args)
        text = f.inspect_ir("graph", backward=True)
        assert "graph grad(loss)" in text and text.count("f32[4, 3] = matmul(") == 1
        f(args[0], ts.param(args[1]))
        assert "return" in text and "f32[3, 2] = matmul" in f.inspect_ir("graph", backward=True)

    def test_other_signatures_and_other_functions(self, args):
        f = ts.jit(lambda x: x + 1.0)
        assert "bf16[B, 3]" in f.inspect_ir("graph", ts.Tensor["B", 3, ts.bf16])
        assert "graph grad(block)" in ts.inspect_ir("graph", _called(ts.grad(block), *args))


def _called(f, *args):
    f(*args)
    return f
