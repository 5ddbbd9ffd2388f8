"""Fabrics: published measurements, the relations between bandwidths, and which axis crosses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from mesh.layouts import meshes
from tessera.mesh.collectives.cost import COSTS
from tessera.planning.fabric import FABRICS, LOW_PART, Link, bus_factor, fabric, fabric_of

MiB, GiB = 1 << 20, 1 << 30
ANY = pytest.mark.parametrize("name", FABRICS)


def row(n: int):
    return ts.dist.mesh(axes="x", shape=n)


def grid(**axes: int):
    return ts.dist.mesh(axes=tuple(axes), shape=tuple(axes.values()))


def bus_gbps(name: str, op: str, size: int, n: int) -> float:
    return size / fabric(name).time(op, size, row(n)).us / 1e3 * bus_factor(op, n)


# --- what was measured ---------------------------------------------------------------------------
@pytest.mark.parametrize("size, bus", [(16 * MiB, 219.9), (64 * MiB, 346.5), (128 * MiB, 401.9),
                                       (512 * MiB, 450.0), (8 * GiB, 473.1), (16 * GiB, 480.0)])
def test_all_reduce_of_eight_h200(size, bus):
    """NCCL 2.27.7 with NVLS: stas00/ml-engineering, network/README."""
    assert bus_gbps("8xh200", "all_reduce", size, 8) == pytest.approx(bus, rel=0.04)


def test_small_all_reduces_are_of_the_right_order():
    """The same source: 1 MiB 39.9 GB/s; 8 x H100, 4 B to 1 MiB: 20 to 25 us (marin, issue 6736)."""
    assert bus_gbps("8xh200", "all_reduce", MiB, 8) == pytest.approx(39.9, rel=0.35)
    assert 10 < fabric("8xh200").time("all_reduce", 4, row(8)).us < 25


@pytest.mark.parametrize("op, n, bus", [("all_reduce", 4, 363.3), ("all_gather", 8, 361.4),
                                        ("reduce_scatter", 8, 362.9)])
def test_rings_of_h200(op, n, bus):
    assert bus_gbps("8xh200", op, 16 * GiB, n) == pytest.approx(bus, rel=0.01)


@pytest.mark.parametrize("size, low, high", [(4 * GiB, 835, 839), (8 * GiB, 835, 847)])
def test_all_reduce_of_the_rack(size, low, high):
    """All 72 GPUs: NVIDIA/nccl-tests, pull request 43."""
    assert 0.97 * low < bus_gbps("nvl72", "all_reduce", size, 72) < 1.03 * high


# --- relations -----------------------------------------------------------------------------------
@pytest.mark.parametrize("op, factor", [
    ("all_reduce", lambda n: 2 * (n - 1) / n), ("all_gather", lambda n: (n - 1) / n),
    ("reduce_scatter", lambda n: (n - 1) / n), ("all_to_all", lambda n: (n - 1) / n),
    ("broadcast", lambda n: 1.0), ("permute", lambda n: 1.0)])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_bus_bandwidth_is_that_of_nccls_tests(op, factor, n):
    """busbw = size / time * factor is the link's, whatever the number of ranks."""
    size = 1 << 40
    rate = size / fabric("pcie").time(op, size, row(n)).us / 1e3
    assert bus_factor(op, n) == factor(n)
    assert rate * factor(n) == pytest.approx(FABRICS["pcie"].inside.bus_gbps, rel=1e-3)


def test_a_ring_by_hand():
    """4 ranks on PCIe, 1 GB: 8.4 us + 6 steps of 5.7 us + 1.5 GB at 24 GB/s."""
    got = fabric("pcie").time("all_reduce", 1e9, row(4)).us
    assert got == pytest.approx(8.4 + 6 * 5.7 + 1.5e9 / 24e3)


def test_small_messages_take_the_quicker_protocol():
    link = Link("test", 100, 80, step=5.0, base=9.0, low_step=1.0, low_base=6.0)
    assert link.ring(4, 8.0) == pytest.approx(6 + 4 + 8 / (80e3 * LOW_PART))
    assert link.ring(4, 8e6) == pytest.approx(9 + 20 + 100)


def test_the_switch_adds_from_its_number_of_ranks_on():
    large = 8 * GiB
    assert "switch" in fabric("8xh200").time("all_reduce", large, row(5)).how
    assert "ring" in fabric("8xh200").time("all_reduce", large, row(4)).how
    assert "ring" in fabric("8xh200").time("all_gather", large, row(8)).how


@given(meshes(), st.sampled_from(sorted(COSTS)), st.sampled_from(sorted(FABRICS)),
       st.integers(0, 1 << 30), st.integers(0, 1 << 30), st.data())
def test_more_bytes_take_longer_and_one_rank_takes_nothing(mesh, op, name, a, b, data):
    axes = data.draw(st.lists(st.sampled_from(mesh.axes), unique=True, min_size=1))
    f = fabric(name)
    if f.between is None and mesh.size() > f.domain:
        return
    small, large = (f.time(op, size, mesh, axes).us for size in sorted((a, b)))
    assert 0 <= small <= large
    if mesh.size(axes) == 1:
        assert large == 0


@ANY
def test_a_reduction_to_all_is_at_least_a_gather_and_at_most_scatter_and_gather(name):
    one = fabric(name).time("all_gather", GiB, row(4)).us
    all_ = fabric(name).time("all_reduce", GiB, row(4)).us
    assert one < all_ <= 2 * one + 1


# --- domains -------------------------------------------------------------------------------------
@pytest.mark.parametrize("axes, axis, spread", [
    ({"dp": 8, "tp": 8}, "tp", (8, 1, 8)), ({"dp": 8, "tp": 8}, "dp", (8, 8, 1)),
    ({"dp": 8, "tp": 9}, "tp", (9, 2, 1)),      # ranks 63 to 71: one in node 7, eight in node 8
    ({"dp": 4, "tp": 4}, "dp", (4, 2, 2)), ({"dp": 2, "tp": 4}, ("dp", "tp"), (8, 1, 8)),
    ({"pp": 2, "dp": 2, "tp": 4}, "pp", (2, 2, 1))])
def test_which_axis_leaves_a_node_of_eight(axes, axis, spread):
    """The last axis is fastest: the first ones leave."""
    f = fabric("infiniband")
    assert f.spread(grid(**axes), axis) == spread
    assert f.crosses(grid(**axes), axis) is (spread[1] > 1)


def test_a_part_of_a_mesh_keeps_its_places():
    """World ranks 1, 5, 9 and 13: two in each node of eight, though the part has ranks 0 to 3."""
    part = grid(pp=4, tp=4).sub(tp=1)
    assert fabric("infiniband").spread(part, "pp") == (4, 2, 2)


def test_stages_over_two_nodes_by_hand():
    """16 ranks: a ring of 16 has 8 wires of 48 GB/s, 384, so NVLink's 364 bounds it."""
    size = 4 * GiB
    got = fabric("infiniband").time("all_reduce", size, row(16))
    inside = 2 * (8.4 + 7 * 3.4 + size * 7 / 8 / 364e3)
    between = 8.4 + 2 * 14.0 + size / 8 * (2 * 1 / 2) / 48e3
    ring = 8.4 + 28 * 3.4 + 2 * 14.0 + size * 2 * 15 / 16 / 364e3
    assert got.crosses and got.us == pytest.approx(min(inside + between, ring))


def test_one_rank_per_node_has_one_wire():
    got = fabric("infiniband").time("all_gather", GiB, grid(dp=8, tp=8), "dp").us
    assert got == pytest.approx(8.4 + 7 * 14.0 + GiB * 7 / 8 / 48e3)


def test_all_to_all_and_permute_leave_on_a_ranks_own_wire():
    """Of 16 ranks, each sends 8/16 to the other node at 48 GB/s, and 7/16 inside meanwhile."""
    f = fabric("infiniband")
    assert f.time("all_to_all", GiB, row(16)).us == pytest.approx(
        8.4 + 8 * 14.0 + GiB / 2 / 48e3)
    assert f.time("permute", GiB, row(16)).us == pytest.approx(8.4 + 14.0 + GiB / 48e3)


def test_the_same_mesh_is_slower_where_axes_cross():
    mesh = grid(dp=8, tp=9)
    for axis in mesh.axes:
        assert fabric("nvl72").time("all_reduce", GiB, mesh, axis).us < \
            fabric("infiniband").time("all_reduce", GiB, mesh, axis).us / 5


def test_simulated_ranks_share_the_machine():
    f = fabric("cpu")
    one, two = (f.time("all_reduce", 64 * MiB, grid(dp=n, tp=4), "tp").us for n in (1, 2))
    assert two == pytest.approx(2 * one)
    share = f.device_of(row(4))
    assert share.peak(ts.f32) == f.device.peak(ts.f32) / 4
    assert share.memory_bytes == f.device.memory_bytes / 4
    assert fabric("nvl72").device_of(row(4)) == fabric("nvl72").device


# --- records -------------------------------------------------------------------------------------
@ANY
def test_records_are_whole(name):
    f = FABRICS[name]
    assert f.doc and f.device.source and f.device.memory_bytes > 1e9
    for link in filter(None, (f.inside, f.between)):
        assert 0 < link.bus_gbps <= link.gbps
    with pytest.raises(ts.ArgumentError, match="declared twice"):
        type(f)(f.name, f.doc, f.domain, f.inside, f.between, f.device)


def test_products_run_as_what_the_device_has():
    h200, l40s = FABRICS["8xh200"].device, FABRICS["pcie"].device
    assert h200.peak(ts.bf16) == h200.peak(ts.f16) == 989e12
    assert h200.peak(ts.fp4_e2m1) == h200.peak(ts.fp8) == 1979e12
    assert h200.peak(ts.f32) == 67e12 and h200.peak(ts.tf32) == 494e12
    assert h200.peak(ts.int8) == 1979e12 and h200.peak(ts.int32) == 67e12
    assert l40s.peak(ts.f64) == 1.4e12 and FABRICS["cpu"].device.peak(ts.bf16) == 0.2e12


def test_a_mesh_names_its_fabric():
    assert fabric_of(ts.dist.mesh(axes="x", shape=3, topology="nvl72")).name == "nvl72"
    assert fabric_of(row(3)).name == "cpu" and fabric_of(row(3), "pcie").name == "pcie"
    cuda = [f"cuda:{i}" for i in range(9)]
    assert fabric_of(ts.dist.mesh(cuda[:8])).name == "8xh200"
    assert fabric_of(ts.dist.mesh(cuda)).name == "infiniband"


@pytest.mark.parametrize("make, error, words", [
    (lambda: fabric("nvl27"), ts.ArgumentError, "did you mean 'nvl72'"),
    (lambda: fabric_of(ts.dist.mesh(axes="x", shape=2, topology="nvl")), ts.ArgumentError,
     "no fabric 'nvl'"),
    (lambda: fabric("8xh200").time("all_reduce", 1, row(9)), ts.ArgumentError,
     "9 ranks, the fabric 8xh200 joins 8"),
    (lambda: fabric("nvl72").time("all_reduse", 1, row(9)), ts.ArgumentError,
     "did you mean 'all_reduce'"),
    (lambda: fabric("nvl72").time("all_reduce", 1, row(9), "tp"), ts.AxisError, "no axis 'tp'"),
])
def test_mistakes_say_what_was_asked(make, error, words):
    with pytest.raises(error) as info:
        make()
    assert words in str(info.value), str(info.value)
