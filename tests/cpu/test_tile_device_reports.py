"""What kernels on a GPU report: assertions, bounds, printed lines. A fake GPU writes the words."""

from __future__ import annotations

import struct

import numpy as np
import pytest

import tessera as ts
from device_kernels import CAPTURING, double, floats, fresh
from fake_gpu import Parameter, Torch, aligned, memory
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from tessera import config
from tessera.runtime import device as devices
from tessera.runtime import flags
from tessera.runtime.flags import ReportSite
from tessera.tile.ir.errors import BoundsError, KernelAssertionError

REPORT = (Parameter("claim", "claim", "i64"), Parameter("report", "report", "i64"),
          Parameter("kernel", "kernel", "i32"))


def reporting(gpu, *sites, words=()):
    """The fake kernels fail with the first site: (group, lane, values...)."""
    gpu.sites, gpu.extra = sites, REPORT

    def after(values):
        if words and not memory(gpu.seen["claim"], (1,), np.int32)[0]:
            memory(gpu.seen["claim"], (1,), np.int32)[0] = 1
            report = memory(gpu.seen["report"], (8,), np.int64)
            report[:] = [1, gpu.seen["kernel"], *words, *[0] * (6 - len(words))]

    gpu.after = after


@ts.kernel
def asserted(x: ts.Tensor["N", ts.f32]):
    i = ts.tile.linear_id()
    ts.tile.device_assert(x[i] < 0.5, f"x is {x[i]}")  # pytest rewrites `assert`


def site_of(kernel, kind, message, *formats):
    line = next(n.where for n in kernel.lower(np.zeros(128, np.float32)).body
                if n.name in ("device_assert", "load_element"))
    return ReportSite(line, message, kind, formats)


@pytest.mark.row("TILE-60")
def test_asserts_are_those_of_the_interpreter(gpu, driver, rng):
    x = np.zeros(128, np.float32)
    x[7] = 0.7
    with pytest.raises(KernelAssertionError) as wanted:
        asserted(x)
    bits = struct.unpack("<i", struct.pack("<f", 0.7))[0]
    site = site_of(asserted, "assert", "x is {}", "f32")
    reporting(gpu, site, words=(0, 7, bits))
    kernel, a = fresh(asserted), Torch(aligned((128,), np.float32))  # only the fake reports
    kernel(a)  # it fails, and nobody has waited
    with pytest.raises(KernelAssertionError) as found:
        kernel(a)
    assert found.value.message == wanted.value.message
    assert found.value.where.text == wanted.value.where.text
    assert found.value.code == "E_KERNEL_ASSERT"
    assert len(driver.launches) == 1
    kernel(a)
    with pytest.raises(KernelAssertionError):
        devices.device(0).synchronize()
    with config.scope(debug=True), pytest.raises(KernelAssertionError):
        kernel(a)  # at once
    driver.capturing = CAPTURING
    with config.scope(debug=True):
        kernel(a)  # a captured launch is not waited for
    driver.capturing = 0
    with pytest.raises(KernelAssertionError):
        fresh(double)(a)  # the next launch of any kernel


def test_bounds_errors_are_those_of_the_interpreter(gpu, rng):
    with pytest.raises(BoundsError) as wanted:
        asserted[2](np.zeros(200, np.float32))
    message = "index {} is outside of 'x': axis 0 has extent {}"
    reporting(gpu, site_of(asserted, "bounds", message), words=(1, 72, 200, 200))
    with config.scope(debug=True), pytest.raises(BoundsError) as found:
        fresh(asserted)[2](Torch(aligned((200,), np.float32)))
    assert found.value.message == wanted.value.message and found.value.hint == wanted.value.hint
    assert found.value.where.line == wanted.value.where.line


def test_reports_of_the_group_and_of_the_runtime(gpu, rng):
    reporting(gpu, ReportSite(None, "value {1} of {0}", formats=("i64", "f64")), words=(
        3, flags.WHOLE_GROUP, 5, struct.unpack("<q", struct.pack("<d", 2.25))[0]))
    with config.scope(debug=True), pytest.raises(ts.TesseraError) as info:
        fresh(double)(Torch(floats(rng, 4)))
    assert info.value.message == "kernel double, group 3: value 2.25 of 5"


def test_printed_lines(gpu, driver, rng, capsys):
    site = ReportSite(None, "lane {} has {}", "print", ("i64", "f32"))
    gpu.sites = (site,)
    gpu.extra = (Parameter("count", "count", "i64"), Parameter("lines", "lines", "i64"),
                 Parameter("kernel", "kernel", "i32"))

    def after(values):
        lines = memory(gpu.seen["lines"], (flags.LINES, 8), np.int64)
        for at, (group, lane) in enumerate([(1, 0), (0, 3), (0, 2)]):
            bits = struct.unpack("<i", struct.pack("<f", group + 0.5))[0]
            lines[at] = [1, gpu.seen["kernel"], group, lane, lane, bits, 0, 0]
        memory(gpu.seen["count"], (1,), np.int64)[0] = 3

    gpu.after = after
    kernel = fresh(double)
    for _ in range(2):
        kernel(Torch(floats(rng, 4)))
        assert capsys.readouterr().out == "lane 2 has 0.5\nlane 3 has 0.5\nlane 0 has 1.5\n"
    gpu.after = lambda values: after(values) or memory(gpu.seen["count"], (1,), np.int64).fill(2000)
    kernel(Torch(floats(rng, 4)))
    assert capsys.readouterr().out.endswith("\n...\n")
