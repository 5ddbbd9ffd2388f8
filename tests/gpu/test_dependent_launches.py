"""A kernel begins while the one in front of it ends, and finds memory as that one leaves it."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu
from kernels.build import build
from tessera.runtime.buffer import DEFAULT, DeviceBuffer
from tessera.runtime.device import device
from tessera.runtime.graphs import DeviceGraph, recording_stream
from tessera.runtime.module import LoadedKernel

require_gpu()
GROUPS, STEPS, LAUNCHES = 64, 20000, 20
SOURCE = f"""
@kernel
def k(x: Tensor["N", f32], y: Tensor["N", f32]):
    g = tile.group_id(0)
    at = (g + 1) % {GROUPS} * 128
    v = tile.load(x[at:at+128])
    steps = {STEPS} if g % 7 == 3 else 1
    for i in range(0, steps):
        v = v * 0.5 + 1.0
    y[g*128:g*128+128] = v

@kernel
def reread(x: Tensor[4, f32], y: Tensor[4, f32], z: Tensor["N", f32]):
    g = tile.group_id(0)
    v = tile.zeros((4,))
    for i in range(0, {STEPS} + 10 * g):
        v = v * 0.5 + tile.load(x[0:4])
    z[g*4:g*4+4] = v
    if g == 5:
        y[0:4] = v * 0.5 + 1.0
"""
PLUS_ONE = """\
.version 7.8
.target sm_90
.address_size 64
.visible .entry plus_one(.param .u64 x, .param .u64 y)
{
    .reg .b64 %address, %number;
    griddepcontrol.wait;
    griddepcontrol.launch_dependents;
    ld.param.u64 %address, [x];
    ld.global.u64 %number, [%address];
    add.u64 %number, %number, 1;
    ld.param.u64 %address, [y];
    st.global.u64 [%address], %number;
    ret;
}
"""
SLOW = (np.arange(GROUPS) % 7 == 3)[:, None]


def after(x: np.ndarray, launches: int) -> np.ndarray:
    """What kernel k leaves of x, launched again and again on its own results."""
    x = x.astype(np.float64)
    for _ in range(launches):
        rows = np.roll(x.reshape(GROUPS, 128), -1, 0)
        x = np.where(SLOW, 2.0 + (rows - 2.0) * 0.5**STEPS, rows * 0.5 + 1).reshape(-1)
    return x


def test_what_is_written_last_is_read(rng):
    """Groups that take long, whose results others read in the next launch; and what they read is
    written by the next."""
    kernel = build(SOURCE)["k"]
    x = rng.standard_normal(128 * GROUPS).astype(np.float32)
    a, b = ts.tensor(x).to("cuda"), ts.zeros(len(x)).to("cuda")
    for _ in range(LAUNCHES):
        kernel[GROUPS](a, b)
        a, b = b, a
    np.testing.assert_allclose(a.numpy(), after(x, LAUNCHES), rtol=1e-6)


def test_what_came_to_a_cache_beside_what_was_written_is_read_anew():
    """All groups read four numbers until they end, from first-level caches; one writes those beside
    them in the same sector, which all groups of the next launch read."""
    torch = pytest.importorskip("torch")
    kernel = build(SOURCE)["reread"]
    memory, z = torch.zeros(8, device="cuda"), torch.zeros(1024 * 4, device="cuda")
    x, y, want = memory[:4], memory[4:], 0.0
    for _ in range(LAUNCHES):
        kernel[1024](x, y, z)  # v = 2 x
        x, y, want = y, x, want + 1.0
    assert (x == want).all() and (z == 2 * (want - 1)).all()


def test_what_a_copy_of_another_stream_reads_is_written_behind_it(rng):
    """In a graph: a copy between two kernels, beside a third."""
    torch = pytest.importorskip("torch")
    kernel = build(SOURCE)["k"]
    x = rng.standard_normal(128 * GROUPS).astype(np.float32)
    a = torch.from_numpy(x).cuda()
    b, c, d = (torch.zeros_like(a) for _ in range(3))
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def launches() -> None:
        main = torch.cuda.current_stream()
        kernel[GROUPS](a, b)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            c.copy_(b)
        kernel[GROUPS](b, d)
        main.wait_stream(side)
        kernel[GROUPS](c, b)
        kernel[GROUPS](b, a)

    launches()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        launches()
    for _ in range(LAUNCHES):
        graph.replay()
    total = 3 * (LAUNCHES + 1)
    for got, launched in ((a, total), (b, total - 1), (c, total - 2), (d, total - 1)):
        np.testing.assert_allclose(got.cpu().numpy(), after(x, launched), rtol=1e-6)


def test_a_graph_of_such_kernels_is_changed_in_place():
    """y = x + 1 from word to word; then the second reads and writes elsewhere."""
    on, stream = device(), recording_stream(0)
    kernel = LoadedKernel(PLUS_ONE.encode() + b"\0", "plus_one", ("i64", "i64"), target=on.target,
                          threads=1, dependent=True)
    kernel.on(0)
    words = DeviceBuffer(8 * 8, on)

    def left(graph: DeviceGraph) -> list[int]:
        words.write(np.zeros(8, np.int64))
        graph.launch(DEFAULT)
        on.synchronize()
        found = np.empty(8, np.int64)
        words.read(found)
        return found.tolist()

    def step(x: int, y: int):
        at = words.pointer
        return lambda: kernel.launch((1,), (at + 8 * x, at + 8 * y), stream=stream)

    graph = DeviceGraph.record(on, stream, [step(i, i + 1) for i in range(4)])
    assert left(graph) == [0, 1, 2, 3, 4, 0, 0, 0]
    assert graph.update(stream, {1: step(1, 6), 2: step(6, 3)})
    assert left(graph) == [0, 1, 0, 3, 4, 0, 2, 0]
