"""Rows that a warpgroup leaves out, in kernels whose operands lie in the memory of others."""

from __future__ import annotations

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from tessera import bf16, f32
from tessera.tile.cuda.lower.warp_specialised.rewrite import is_part, number, ops_in
from tessera.tile.ir.ir import walk
from tessera.tile.launch import machine_code


def test_rows_are_left_out_by_where_they_lie(gpu, monkeypatch):
    """In memory heads may lie between the rows of a tile and its columns."""
    emitted, real = [], machine_code.compile_request

    def compiled(function, request, image=None):
        if function.name == "attention_queries":
            emitted.append(machine_code.emit_request(function, request))
        return real(function, request, image)

    monkeypatch.setattr(machine_code, "compile_request", compiled)

    def loss(x):
        q, k, v = (ts.transpose(ts.reshape(p, (2, 328, 2, 128)), (0, 2, 1, 3))
                   for p in ts.split(x, 3, axis=-1))
        return ts.sum(ts.cast(ts.attention(q, k, v, causal=True), f32) ** 2)

    ts.jit(ts.grad(loss))(ts.ones((2, 328, 768), bf16).to("cuda"))
    (made,) = emitted
    assert made.refusal is None
    (rows,) = {op.args for op in ops_in(made.function.body, "own_rows")}
    (view,) = (op for op in walk(made.function.body) if is_part(op) and op.args[0].name == "Q")
    assert view.attr["kept"] == (1, 3)  # rows are the second of four axes, heads the third
    assert rows[0].name.startswith("q0") and rows[1] == number(328)
