"""What the schedule says of each launch: form, reason, bytes, operations; counted by hand."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

import tessera as ts
from tessera import ArgumentError, Tensor, UnsupportedTargetError, f32
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.kernels.kernel_kinds import kernel_kind, kernel_kinds, kinds_by_op
from tessera.graph.cuda.launch_work import SORTS
from tessera.graph.cuda.lower import MAKERS
from tessera.tile.cuda.lower.warp_specialised.program import Refusal
from tessera.tile.tuning.gpus import gpu

BF16 = "bf16 @accum(f32)"


def lines_of(text: str, group: str) -> list[str]:
    """Of one group in the schedule's text."""
    rows = text.splitlines()
    first = next(i for i, r in enumerate(rows) if r.startswith(f"  {group} "))
    return [rows[first].strip(), *(r.strip() for r in rows[first + 1:first + 12])]


class TestForms:
    def test_a_matmul_is_wgmma_and_says_so(self):
        x, w = ts.zeros((256, 128), BF16), ts.zeros((128, 512), BF16)
        f = ts.jit(lambda x, w: ts.relu(x @ w))
        plan = f.schedule(x, w, target="sm_90a")
        (launch,) = plan.launches
        assert (launch.form, launch.reason, launch.stream) == ("wgmma", "", "main")
        assert launch.work.matmuls == 2 * 256 * 128 * 512
        assert launch.work.flops - launch.work.matmuls in (256 * 512 * k for k in range(1, 5))
        assert launch.work.read_bytes == 2 * (256 * 128 + 128 * 512)
        assert launch.work.written_bytes == 2 * 256 * 512
        assert launch.operands == ("bf16", "bf16") and launch.where.text.startswith("f = ts.jit")
        text = lines_of(f.inspect_ir("schedule", x, w, target="sm_90a"), "g0")
        assert "form wgmma" in text

    @pytest.mark.parametrize("target, form, why", [
        ("sm_90a", "mma", "rows of A may not be multiples of 16 bytes: 1001 elements"),
        ("sm_80", "mma", "sm_80 has no wgmma")])
    def test_another_form_says_why(self, target, form, why):
        x, w = ts.zeros((256, 1001), BF16), ts.zeros((1001, 512), BF16)
        f = ts.jit(lambda x, w: x @ w)
        (launch,) = f.schedule(x, w, target=target).matmuls
        assert (launch.form, launch.reason) == (form, why)
        assert f"form {form}: {why}" in f.inspect_ir("schedule", x, w, target=target)

    def test_f32_is_by_threads(self):
        x = ts.zeros((64, 64))
        (launch,) = ts.jit(lambda x: x @ x).schedule(x, target="sm_90a").matmuls
        assert launch.form == "threads" and "f32" in launch.reason

    def test_copies_libraries_and_elementwise_kernels(self):
        def f(x):
            return ts.rfft(ts.transpose(x)), ts.exp(x)

        plan = ts.jit(f).schedule(ts.zeros((77, 32)), target="sm_90a")
        assert plan.forms == Counter({"copy": 1, "library:cuFFT": 1, "threads": 1})
        (copy,) = plan.copies
        reader = next(x.group for x in plan.launches if x.form == "library:cuFFT")
        assert copy.reason.startswith("a copy, because ") and copy.reason.endswith(f"by {reader}")
        assert copy.work.read_bytes == copy.work.written_bytes == 4 * 77 * 32
        assert copy.work.flops == 0
        (exp,) = (x for x in plan.launches if x.form == "threads")
        assert exp.reason == "it has no matmul" and exp.work.flops == 77 * 32

    def test_a_kernel_that_the_compiler_refuses_is_shown(self, monkeypatch):
        from tessera.tile.cuda import compile

        def refuse(*args, **kwargs):
            raise UnsupportedTargetError("no such instruction")

        monkeypatch.setattr(compile, "emit_kernel", refuse)
        (launch,) = ts.jit(ts.exp).schedule(ts.zeros((64, 33)), target="sm_90a").launches
        assert (launch.form, launch.reason) == ("refused", "no such instruction")

    def test_the_worst_of_a_kernels_matmuls_names_its_form(self, monkeypatch):
        from tessera.tile.cuda import compile

        emitted = SimpleNamespace(matmul_forms=("wgmma", "mma"))
        monkeypatch.setattr(compile, "emit_kernel", lambda *a, **k: SimpleNamespace(
            emitted=emitted, refusal=Refusal("one of them")))
        (launch,) = ts.jit(ts.exp).schedule(ts.zeros((64, 34)), target="sm_90a").launches
        assert (launch.form, launch.reason) == ("mma", "one of them")
        assert launch.how.all == ("wgmma", "mma")

    def test_what_the_host_does(self):
        def f(x):
            ts.debug.print("{}", x)
            return ts.exp(x)

        plan = ts.jit(f).schedule(ts.zeros((8, 4)), target="sm_90a")
        (host,) = (x for x in plan.launches if x.form == "host")
        assert host.work.read_bytes == 4 * 32 and host.reason.startswith("the host, ")

    def test_every_kind_of_group_has_its_sort(self):
        without = set(MAKERS) - {"view", "empty", "offload", "fetch", "launch"} - {*kernel_kinds()}
        assert without == {*SORTS}

    def test_every_kind_of_kernel_is_scheduled_and_every_op_is_of_one_kind(self):
        kinds = kernel_kinds()
        assert [k.name for k in kinds.values() if k.schedule is None and k.name not in MAKERS] == [
            "update"]  # scheduled as elements are
        assert len(kinds_by_op()) == sum(len(k.ops) for k in kinds.values())
        with pytest.raises(ArgumentError, match="'sort' is declared twice"):
            kernel_kind("sort", "sort", kinds["sort"].source)

    def test_a_gradient_of_many_rows_is_split_along_them(self, rng):
        """A weight of f32 had as many groups as its blocks, however many rows there were."""
        x, w = rng.standard_normal((2000, 24)), rng.standard_normal((24, 3))
        x, w = (ts.tensor(a, "f32") for a in (x, w))
        slope = ts.jit(ts.grad(lambda w, x: ts.sum((x @ w) ** 2)))
        program = CudaProgram(slope.graph(w, x), "sm_90a")
        assert [g.kind for g in program.plan.groups].count("gemm") == 2
        assert any(g.space[0] == 5 for g in program.plan.groups if g.kind == "gemm")  # 400 rows
        exact = 2 * x.numpy().astype("f8").T @ (x.numpy().astype("f8") @ w.numpy())
        got = program.run([w.array, x.array])[0]
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())

    def test_an_update_in_place_moves(self):
        put = ts.jit(lambda c, v, i: ts.dynamic_update_slice(c, v, (i, 0)), donate="c")
        plan = put.schedule(ts.zeros((64, 4)), ts.ones((1, 4)), 3, target="sm_90a")
        assert plan.launches[-1].work.kind == "move"

    def test_a_kernel_of_the_user(self):
        @ts.kernel
        def twice(x: Tensor["n", f32], y: Tensor["n", f32]):
            y[tile_n:tile_n+64] = 2.0 * ts.tile.load(x[tile_n:tile_n+64])  # noqa: F821

        def f(x):
            y = ts.zeros((256,))
            twice(x, y)
            return y

        (launch,) = ts.jit(f).schedule(ts.zeros((256,)), target="sm_90a").launches
        assert launch.work.kind == "kernel" and launch.form == "threads"
        assert launch.work.flops == 256 and launch.work.written_bytes == 4 * 256


class TestWork:
    def test_a_slice_and_a_take_move_what_they_give(self):
        table, ids = ts.zeros((1000, 64)), ts.zeros((10,), "int32")
        plan = ts.jit(lambda t, i: (ts.take(t, i, axis=0), t[10:20, 3:35])).schedule(
            table, ids, target="sm_90a")
        work = {x.work.kind: x.work for x in plan.launches}
        assert work["index"].read_bytes == 4 * 10 + 4 * 10 * 64
        assert work["index"].written_bytes == 4 * 10 * 64
        assert work["move"].read_bytes == work["move"].written_bytes == 4 * 10 * 32

    def test_attention_counts_two_matmuls_of_what_is_seen(self):
        q = ts.zeros((2, 4, 128, 64), BF16)
        for causal, seen in ((False, 128 * 128), (True, 128 * 129 / 2)):
            plan = ts.jit(lambda q, c=causal: ts.attention(q, q, q, causal=c)).schedule(
                q, target="sm_90a")
            (launch,) = plan.matmuls
            assert launch.work.matmuls == 2 * 8 * seen * (64 + 64)

    def test_parts_of_a_step(self):
        """Forward, backward and optimizer are told apart by the records, not by their lines."""
        optimizer = ts.optim.AdamW()
        p = {"w": ts.param(ts.zeros((128, 128)))}
        state = optimizer.init(p)

        def step(p, state, x):
            loss, g = ts.value_and_grad(lambda p: ts.sum(ts.tanh(x @ p["w"])))(p)
            return loss, optimizer.update(p, g, state, 1e-3)

        plan = ts.jit(step).schedule(p, state, ts.zeros((128, 128)), target="sm_90a")
        found = {(x.work.kind, x.work.part) for x in plan.launches}
        assert {("matmul", "forward"), ("matmul", "backward")} <= found
        assert {kind for kind, part in found if part == "optimizer"} <= {"optimizer", "matmul"}
        assert ("optimizer", "optimizer") in found

    def test_the_summary(self):
        x = ts.zeros((512, 512), BF16)
        plan = ts.jit(lambda x: ts.softmax(x @ x)).schedule(x, target="sm_90a")
        h200 = gpu("H200")
        parts = [x.work.least_us(h200) for x in plan.launches]
        assert plan.least_us("H200") == pytest.approx(sum(parts))
        product = plan.launches[0].work
        assert parts[0] == pytest.approx(max(
            1e6 * 2 * 512**3 / 989e12 + 1e6 * (product.flops - product.matmuls) / 67e12,
            product.bytes / 4800e3))
        text = str(plan)
        assert "launches: 2: 1 wgmma, 1 threads" in text and " on H200" in text
        assert plan.bytes == sum(x.work.bytes for x in plan.launches)
        assert np.isclose(plan.flops, sum(x.work.flops for x in plan.launches))
