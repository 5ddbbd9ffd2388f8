"""Figures of a fabric from what was measured, and the command that measures."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

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


def time_of(link, op: str, ranks: int, size: int) -> ExchangeTime:
    """What a call over a link would be measured at."""
    t = ExchangeTime(op, ranks, size, 0.0)
    large = link.base + t.steps * link.step + t.sent / (1e3 * link.bus_gbps)
    small = link.low_base + t.steps * link.low_step + t.sent / (LOW_PART * 1e3 * link.bus_gbps)
    return replace(t, us=min(large, small))


def times_of(link, ranks: int, rng=None) -> list[ExchangeTime]:
    """Of calls of all sizes, within 5 %."""
    found = [time_of(link, op, ranks, size) for op in OPS for size in SIZES]
    return [t if rng is None else replace(t, us=t.us * rng.uniform(0.95, 1.05)) for t in found]


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
    """The calls are made; their times are those of a link, whatever else this machine does."""
    link = replace(FABRICS["cpu"].inside, bus_gbps=2.0)
    measured, took = fabric_command.measured, []

    def timed(op, size, mesh, place):
        t = measured(op, size, mesh, place)
        took.append(t.us)
        return time_of(link, op, t.ranks, t.bytes)

    monkeypatch.setattr(fabric_command, "measured", timed)
    monkeypatch.setattr(fabric_command, "SIZES", tuple(1 << n for n in range(12, 23, 2)))
    monkeypatch.setattr(fabric_command, "ROUND_US", 1.0)
    monkeypatch.setattr(measured_fabric, "LARGE", 1 << 20)
    path = tmp_path / "here.json"
    args = argparse.Namespace(out=path, like=None, most=None)
    assert ts.dist.simulate(lambda: fabric_command.run(args), 2) == [0, 0]
    said, data = capsys.readouterr().out, json.loads(path.read_text())
    assert data["like"] == "cpu" and len(data["measured"]) == 3 * 6
    assert {m["op"] for m in data["measured"]} == set(OPS) and "GB/s on the bus" in said
    assert len(took) == 2 * 3 * 6 and min(took) > 0
    made = fabric(str(path))
    for m in data["measured"]:
        says = made.time(m["op"], m["bytes"], ts.dist.mesh(axes="x", shape=2)).us
        assert says == pytest.approx(m["us"], rel=0.05), said


def test_what_cannot_be_measured_is_said(tmp_path, capsys):
    assert main(["fabric", "--out", str(tmp_path / "x.json")]) == 1
    assert "one rank has nothing to measure" in capsys.readouterr().err


def test_messages_that_are_too_short_are_refused_before_any_is_sent(tmp_path):
    args = argparse.Namespace(out=tmp_path / "x.json", like=None, most=100_000)
    with pytest.raises(ts.ArgumentError, match="--most 100000: figures need two sizes") as info:
        ts.dist.simulate(lambda: fabric_command.run(args), 2)
    assert info.value.hint == "--most 67108864, or more"
