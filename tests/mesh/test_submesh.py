"""Parts of a mesh: which ranks they have, collectives on them, and messages between ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from mesh import parallel
from mesh.launch import needs_mpi, results_of_all
from mesh.layouts import meshes
from tessera.mesh.ranks.envelope import here_in
from tessera.mesh.world import is_here, mesh_rank, transport

PROGRAMS = Path(parallel.__file__)


class TestParts:
    def test_ranks_axes_and_devices(self):
        mesh = ts.dist.mesh(axes=("dp", "tp", "pp"), shape=(2, 3, 2))
        part = mesh.sub(pp=1)
        assert part.axes == ("dp", "tp") and part.shape == (2, 3) and part.size() == 6
        assert tuple(part.world_ranks) == (1, 3, 5, 7, 9, 11) and part.world_size == 12
        assert part.devices == tuple(f"cpu:{r}" for r in part.world_ranks)
        assert part.coords(4) == (1, 1) and part.group(4, "dp") == (1, 4)
        assert part.has(3) and not part.has(2)
        assert str(part) == "mesh(dp=2, tp=3) of ranks 1, 3, 5, 7, ... 11"

    def test_a_part_of_a_part_and_the_order_of_places(self):
        mesh = ts.dist.mesh(axes=("dp", "tp", "pp"), shape=(2, 3, 2))
        assert mesh.sub(pp=1).sub(dp=0) == mesh.sub(dp=0).sub(pp=1) == mesh.sub(dp=0, pp=1)
        assert hash(mesh.sub(pp=1)) == hash(mesh.sub(pp=1)) != hash(mesh.sub(pp=0))
        assert mesh.sub(pp=0) != mesh.sub(pp=1) and mesh.sub() != mesh

    def test_one_rank_has_no_axes(self):
        one = ts.dist.mesh(axes=("dp", "pp"), shape=(2, 2)).sub(dp=1, pp=0)
        assert one.axes == () and one.size() == 1 and tuple(one.world_ranks) == (2,)
        assert one.coords(0) == () and one.group(0) == (0,) and one.rank(()) == 0

    @given(mesh=meshes(), data=st.data())
    def test_the_parts_along_an_axis_are_the_mesh(self, mesh, data):
        axis = data.draw(st.sampled_from(mesh.axes))
        parts = [mesh.sub(**{axis: p}) for p in range(mesh.size(axis))]
        assert sorted(r for part in parts for r in part.world_ranks) == list(range(mesh.size()))
        for p, part in enumerate(parts):
            for number, rank in enumerate(part.world_ranks):
                place = dict(zip(part.axes, part.coords(number), strict=True)) | {axis: p}
                assert mesh.coords(rank) == tuple(place[a] for a in mesh.axes)

    def test_the_layout_dict_without_the_axes_that_are_gone(self):
        mesh = ts.dist.mesh(axes=("dp", "pp"), shape=(2, 2), layout={
            "batch": "shard", "layers": ("shard", "pp"), "rows": "dp", "params": "replicate"})
        assert mesh.sub(pp=0).layout == {"batch": "shard", "layers": "replicate", "rows": "dp",
                                         "params": "replicate"}
        assert mesh.layout["layers"] == ("shard", "pp")

    @pytest.mark.parametrize("places, words", [
        ({"pp": 2}, "no place pp=2.*pp goes from 0 to 1"), ({"pp": -1}, "no place pp=-1"),
        ({"pp": True}, "no place pp=True"), ({"ep": 0}, "has no axis 'ep'")])
    def test_places_that_are_not_there(self, places, words):
        mesh = ts.dist.mesh(axes=("dp", "pp"), shape=(2, 2))
        with pytest.raises(ts.AxisError, match=f"(?s){words}"):
            mesh.sub(**places)

    def test_a_world_of_another_size(self):
        part = ts.dist.mesh(axes=("dp", "pp"), shape=(2, 2)).sub(pp=0)
        with pytest.raises(ts.dist.MeshError, match="part of a mesh of 4 ranks and this program "
                                                    "runs on 1"):
            ts.dist.all_reduce(ts.ones(3), mesh=part)


class TestOnRanks:
    def test_only_its_ranks_run_and_their_results_come_by_mesh_rank(self):
        part = ts.dist.mesh(axes=("dp", "pp"), shape=(3, 2)).sub(pp=1)

        def program():
            assert ts.current_mesh() is part
            total = ts.dist.all_reduce(ts.tensor([1.0 * ts.dist.rank()]))
            return mesh_rank(part), ts.dist.rank(), total.item()

        assert ts.dist.simulate(program, part) == [(0, 1, 9.0), (1, 3, 9.0), (2, 5, 9.0)]

    def test_a_rank_that_is_not_in_it(self):
        part = ts.dist.mesh(axes=("dp", "pp"), shape=(2, 2)).sub(pp=1)

        def program():
            assert is_here(part) == (ts.dist.rank() in (1, 3))
            return ts.dist.all_reduce(ts.ones(3), "dp", mesh=part)

        with pytest.raises(ts.dist.MeshError, match=r"rank 0 is not in mesh\(dp=2\) of ranks 1, 3"):
            ts.dist.simulate(program, 4)

    @pytest.mark.parametrize("ranks", [2, 4, 6])
    @pytest.mark.parametrize("program", [parallel.two_halves, parallel.between_halves])
    def test_programs(self, program, ranks):
        results = ts.dist.simulate(program, ranks)
        assert len(set(results)) > 1 and ts.dist.simulate(program, ranks) == results

    def test_the_halves_compute_what_they_would_alone(self):
        """The even ranks' mean and the odd ranks' sum, in NumPy."""
        def program():
            mesh = ts.dist.mesh(axes=("dp", "pp"), shape=(2, 2))
            me = ts.dist.rank()
            half = mesh.sub(pp=me % 2)
            x = parallel.operand((3, 4), "f64", me)
            return ts.dist.all_reduce(x, op="mean" if me % 2 == 0 else "sum", mesh=half).numpy()

        terms = [parallel.operand((3, 4), "f64", r).numpy() for r in range(4)]
        got = ts.dist.simulate(program, 4)
        np.testing.assert_allclose(got[0], (terms[0] + terms[2]) / 2, rtol=1e-15)
        np.testing.assert_allclose(got[3], terms[1] + terms[3], rtol=1e-15)
        assert (got[0] == got[2]).all() and (got[1] == got[3]).all()

    def test_ranks_of_a_part_that_disagree_are_named_by_their_world_ranks(self):
        part = ts.dist.mesh(axes=("dp", "pp"), shape=(2, 2)).sub(pp=1)

        def program():
            x = ts.ones(3)
            return ts.dist.all_gather(x) if ts.dist.rank() == 3 else ts.dist.all_reduce(x)

        with pytest.raises(ts.dist.DisagreementError, match=r"(?s)rank 1: all_r.*rank 3: all_g"):
            ts.dist.simulate(program, part)

    @needs_mpi
    @pytest.mark.parametrize("program", ["two_halves", "between_halves", "messages"])
    def test_mpi_gives_the_bits_of_the_simulation(self, program):
        found = results_of_all(PROGRAMS, parallel.COMPARED, 4)[program]
        assert found == dict(enumerate(ts.dist.simulate(getattr(parallel, program), 4)))


class TestMessages:
    @pytest.mark.parametrize("ranks", [2, 3])
    def test_tags_and_order(self, ranks):
        ts.dist.simulate(parallel.messages, ranks)

    def test_done_does_not_wait(self):
        def program():
            here, buffer, label = transport(), np.zeros(2, np.uint8), here_in("a pair")
            request = here.irecv(0, buffer, 3, label) if here.rank == 1 else None
            before = request is not None and request.done()
            ts.dist.barrier()
            if request is None:
                return here.isend(1, np.array([5, 6], np.uint8), 3, label).done()
            request.wait()
            return before, buffer.tolist()

        assert ts.dist.simulate(program, 2) == [True, (False, [5, 6])]

    def test_a_message_that_nobody_sends_is_a_deadlock(self):
        def program():
            if ts.dist.rank() == 1:
                transport().irecv(0, np.zeros(1, np.uint8), 0, here_in("activation 3")).wait()

        with pytest.raises(ts.dist.StalledError, match="rank 1 waits for rank 0 in activation 3"):
            ts.dist.simulate(program, 2)

    def test_alone_there_is_nobody(self):
        for begin in (transport().isend, transport().irecv):
            with pytest.raises(ts.dist.MeshError, match="rank 0 of 1 cannot exchange with rank 1"):
                begin(1, np.zeros(1, np.uint8), 0, here_in("x"))
