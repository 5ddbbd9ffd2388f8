"""Figures of a fabric from what was measured, and the command that measures."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import numpy as np
import pytest

import tessera as ts
from tessera import config
from tessera.__main__ import main
from tessera.debug import fabric_command
from tessera.planning import measured_fabric
from tessera.planning.fabric import FABRICS, LOW_PART, fabric, fabric_of
from tessera.planning.measured_fabric import ExchangeTime, fit_link, write_fabric

OPS = ("all_reduce", "all_gather", "reduce_scatter")
SIZES = [1 << n for n in range(12, 31, 2)]


@pytest.fixture(autouse=True)
def declared_alone():
    before = dict(FABRICS)
    yield
    FABRICS.clear()
    FABRICS.update(before)


def times_of(link, ranks: int, rng=None) -> list[ExchangeTime]:
    """What a link would be measured at, within 5 %."""
    found = []
    for op in OPS:
        for size in SIZES:
            t = ExchangeTime(op, ranks, size, 0.0)
            large = link.base + t.steps * link.step + t.sent / (1e3 * link.bus_gbps)
            small = link.low_base + t.steps * link.low_step + t.sent / (
                LOW_PART * 1e3 * link.bus_gbps)
            noise = 1.0 if rng is None else rng.uniform(0.95, 1.05)
            found.append(replace(t, us=min(large, small) * noise))
    return found


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_figures_are_found_again(ranks, rng):
    link = FABRICS["8xh100"].inside
    real = replace(link, bus_gbps=290.0, base=3 * link.base, step=3 * link.step,
                   low_base=4 * link.low_base, low_step=4 * link.low_step)
    made = fit_link(link, times_of(real, ranks))
    for name in ("bus_gbps", "base", "step", "low_base", "low_step"):
        assert getattr(made, name) == pytest.approx(getattr(real, name), rel=1e-6)
    made = fit_link(link, times_of(real, ranks, rng))
    assert made.bus_gbps == pytest.approx(290, rel=0.05)
    assert made.low_base == pytest.approx(real.low_base, rel=0.1)
    assert made.gbps == link.gbps and made.sum_gbps == link.sum_gbps


def test_ranks_that_take_turns_have_a_part_of_the_bandwidth():
    link = FABRICS["cpu"].inside
    slow = replace(link, bus_gbps=2.0)
    assert fit_link(link, times_of(slow, 4), shared=True).bus_gbps == pytest.approx(8.0)


def test_messages_of_one_size_give_no_figures():
    with pytest.raises(ts.ArgumentError, match="0 large messages and 1 small"):
        fit_link(FABRICS["pcie"].inside, [ExchangeTime("all_reduce", 2, 4096, 10.0)])


def test_a_file_is_a_fabric(tmp_path, capsys):
    path, like = tmp_path / "here.json", FABRICS["nvl72"]
    real = replace(like.inside, bus_gbps=500.0)
    made = write_fabric(path, like, times_of(real, 2), {"memory_efficiency": 0.8},
                        {"device": "2 x GB200"})
    assert made.inside.bus_gbps == pytest.approx(500) and made.domain == 72
    assert made.device.memory_efficiency == 0.8 and made.between is like.between
    again = fabric(str(path))
    assert again is made and "measured; else as nvl72" in made.doc
    mesh = ts.dist.mesh(axes="x", shape=3)
    with config.scope(fabric=str(path)):
        assert fabric_of(mesh) is made and fabric_of(mesh, "pcie").name == "pcie"
    assert fabric_of(mesh).name == "cpu"
    assert main(f"plan --transformer 7b --mesh dp=8,tp=9 --fabric {path}".split()) == 0
    assert "here.json" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"like": "nvl72", "inside": {"x": 1}, '
                                  '"rates": {}}'])
def test_other_files_are_none(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ts.ArgumentError, match="no file of a measured fabric"):
        fabric(str(tmp_path / "a.json"))


def test_ranks_measure_what_joins_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fabric_command, "SIZES", (1 << 12, 1 << 14, 1 << 18, 1 << 19))
    monkeypatch.setattr(fabric_command, "ROUND_US", 1.0)
    monkeypatch.setattr(measured_fabric, "LARGE", 1 << 18)
    path = tmp_path / "here.json"
    args = argparse.Namespace(out=path, like=None, most=1 << 19)
    assert ts.dist.simulate(lambda: fabric_command.run(args), 2) == [0, 0]
    said, data = capsys.readouterr().out, json.loads(path.read_text())
    assert data["like"] == "cpu" and len(data["measured"]) == 3 * 4
    assert {m["op"] for m in data["measured"]} == set(OPS) and "GB/s on the bus" in said
    assert min(m["us"] for m in data["measured"]) > 0
    ratios = [fabric(str(path)).time(m["op"], m["bytes"], ts.dist.mesh(axes="x", shape=2)).us
              / m["us"] for m in data["measured"]]
    assert 0.2 < np.median(ratios) < 5, said


def test_what_cannot_be_measured_is_said(tmp_path, capsys):
    assert main(["fabric", "--out", str(tmp_path / "x.json")]) == 1
    assert "one rank has nothing to measure" in capsys.readouterr().err
