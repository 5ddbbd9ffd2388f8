"""What users write: meshes, ShardSpec, Block, Cyclic, dicts, rectangles; and their errors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from mesh.layouts import meshes
from tessera.mesh.layout import Layout, Split

MESH = ts.dist.mesh(axes=("dp", "tp", "pp"), shape=(4, 9, 2))
S = ts.ShardSpec


@given(meshes())
def test_coordinates_are_row_major(mesh):
    places = [mesh.coords(r) for r in range(mesh.size())]
    assert places == sorted(places) and len(set(places)) == mesh.size()
    assert [mesh.rank(p) for p in places] == list(range(mesh.size()))


@given(meshes(), st.data())
def test_groups_divide_the_ranks(mesh, data):
    axes = data.draw(st.lists(st.sampled_from(mesh.axes), unique=True))
    groups = mesh.groups(axes)
    assert sorted(r for g in groups for r in g) == list(range(mesh.size()))
    for group in groups:
        assert [mesh.index(r, axes) for r in group] == list(range(mesh.size(axes)))
        assert all(mesh.group(r, axes) == group for r in group)


def test_a_mesh_is_plain_data():
    assert MESH == ts.dist.mesh([f"cpu:{i}" for i in range(72)], ("dp", "tp", "pp"), (4, 9, 2))
    assert hash(MESH) and str(MESH) == "mesh(dp=4, tp=9, pp=2)"
    assert ts.mesh(["a", "b"]) == ts.dist.mesh(["a", "b"], ("devices",), (2,))
    assert ts.dist.mesh(axes="tp", shape=3, topology="nvl72").topology == "nvl72"


@pytest.mark.parametrize("make, error, words", [
    (lambda: ts.dist.mesh([*"abcdef"], ("x", "y"), (2, 2)), ts.ShapeError,
     "2 x 2 = 4 ranks cannot have 6"),
    (lambda: ts.dist.mesh(["a", "a"]), ts.ArgumentError, "a stands twice"),
    (lambda: ts.dist.mesh(axes=("x", "y"), shape=(4,)), ts.ArgumentError, "2 axes"),
    (lambda: ts.dist.mesh(axes=("x", "x"), shape=(2, 2)), ts.ArgumentError, "different names"),
    (lambda: ts.dist.mesh(axes=("x", "y")), ts.ArgumentError, "needs a shape"),
    (lambda: ts.dist.mesh(axes=("x",), shape=(0,)), ts.ArgumentError, ">= 1"),
    (lambda: ts.dist.mesh([1, 2]), ts.ArgumentError, "devices are names"),
    (lambda: ts.dist.mesh(axes=(1,), shape=(2,)), ts.ArgumentError, "by name"),
    (lambda: MESH.size("tq"), ts.AxisError, "has no axis 'tq'"),
    (lambda: MESH.coords(72), ts.AxisError, "ranks 0 to 71, asked for 72"),
    (lambda: MESH.rank((0, 9, 0)), ts.AxisError, "no place"),
    (lambda: S(("row",), ()), ts.ArgumentError, "1 dimensions"),
    (lambda: S((), ("tp",)), ts.ArgumentError, "0 dimensions"),
    (lambda: S(("row",), ("tp",), replicate=True), ts.ArgumentError, "has no partition"),
    (lambda: S(reduce="prod"), ts.ArgumentError, "no reduction"),
    (lambda: S(("row", 0), ("dp", "tp")).resolve(MESH, 2), ts.ArgumentError, "dimension 0 twice"),
    (lambda: S(("row", "col"), ("tp", "tp")).resolve(MESH, 2), ts.ArgumentError, "used twice"),
    (lambda: S(("row",), ("xx",)).resolve(MESH, 2), ts.AxisError, "has no axis 'xx'"),
    (lambda: S(("seq",), ("tp",)).resolve(MESH, 2), ts.AxisError, "no dimension 'seq'"),
    (lambda: S((2,), ("tp",)).resolve(MESH, 2), ts.AxisError, "no dimension 2"),
    (lambda: S(("row",), ("tp",)).resolve(MESH, 0), ts.AxisError, "no dimension 'row'"),
    (lambda: S((0,), (("dp", "tp", "pp"),), reduce="sum").resolve(MESH, 1), ts.ArgumentError,
     "no axis left"),
    (lambda: ts.dist.Block(("dp", "tp")).resolve(MESH, 1), ts.AxisError, "splits 2 dimensions"),
    (lambda: ts.dist.Cyclic(("dp",), run=0), ts.ArgumentError, "at least one element"),
    (lambda: Layout(MESH, (Split(),), ("tp",)), ts.ArgumentError, "pending reduction needs"),
    (lambda: ts.dist.axes_of_names({"a": "shared"}, MESH), ts.ArgumentError, "layout of 'a'"),
    (lambda: ts.dist.axes_of_names(dict.fromkeys("abcd", "shard"), MESH), ts.ArgumentError,
     "left to shard 'd'"),
    (lambda: ts.domain.Rect((2, -1)), ts.ArgumentError, ">= 0"),
    (lambda: ts.domain.Rect((2,), lo=(0, 0)), ts.ShapeError, "1 dimensions"),
    (lambda: ts.dist.simulate(len, 0), ts.ArgumentError, "1 or more"),
    (lambda: ts.debug.show_sharding(S(), (2,)), ts.ArgumentError, "needs the mesh"),
])
def test_mistakes_say_what_was_asked(make, error, words):
    with pytest.raises(error) as info:
        make()
    assert words in str(info.value), str(info.value)
    assert info.value.where.file == __file__


def test_the_hint_offers_shapes_that_fit():
    with pytest.raises(ts.ShapeError) as info:
        ts.dist.mesh([f"cuda:{i}" for i in range(6)], ("dp", "tp"), (3, 4))
    assert info.value.hint == "give 12 devices, or shape=(3, 2)"
    with pytest.raises(ts.AxisError) as wrong:
        S(("row",), ("tpp",)).resolve(MESH, 2)
    assert wrong.value.hint == "did you mean 'tp'?"


class TestSpecs:
    def test_rows_columns_numbers_and_names(self):
        row = S(("row",), ("dp",)).resolve(MESH, 3)
        assert row == S((0,), ("dp",)).resolve(MESH, 3) == S((-3,), ("dp",)).resolve(MESH, 3)
        assert row == S(("b",), ("dp",)).resolve(MESH, 3, ("b", "s", "d"))
        assert S("col", "tp").resolve(MESH, 3).axes_of(2) == ("tp",)

    def test_several_axes_split_one_dimension(self):
        layout = S(("row",), (("dp", "pp"),)).resolve(MESH, 1)
        assert layout.parts(0) == 8 and layout.repeated == ("tp",)
        assert [layout.part(r, 0) for r in (0, 1, 2, 18)] == [0, 1, 0, 2]

    def test_pending_reductions(self):
        layout = S(("row",), ("dp", "tp"), reduce="sum").resolve(MESH, 2)
        assert layout.pending == ("tp",) and layout.repeated == ("pp",)
        assert S(reduce="max").resolve(MESH, 1).pending == MESH.axes
        assert S(replicate=True).resolve(MESH, 2).is_replicated
        assert not layout.is_replicated and layout.dim_of("dp") == 0 and layout.dim_of("pp") is None
        assert layout.settled().with_split(1, ("tp",)).axes_of(1) == ("tp",)
        assert str(layout) == "(dp, -) + sum over tp on mesh(dp=4, tp=9, pp=2)"

    def test_distributions_map_leading_dimensions(self):
        assert ts.dist.Block(("dp", "tp")).resolve(MESH, 3).splits == (
            Split(("dp",)), Split(("tp",)), Split())
        assert ts.dist.Cyclic("pp", 2).resolve(MESH, 1).splits == (Split(("pp",), 2),)
        assert ts.dist.Replicated().resolve(MESH, 2).is_replicated


class TestRect:
    def test_rectangles(self):
        a, b = ts.domain.Rect((4, 6)), ts.domain.Rect((4, 6), lo=(2, 5))
        assert (a & b) == ts.domain.Rect((2, 1), lo=(2, 5)) and str(a & b) == "[2:4, 5:6]"
        assert a.size == 24 and a.ndim == 2 and (3, 5) in a and (4, 0) not in a
        assert (a & ts.domain.Rect((1, 1), lo=(9, 9))).size == 0
        assert b.slices((2, 5)) == (slice(0, 4), slice(0, 6))


class TestPictures:
    def test_text(self):
        mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(2, 3))
        with mesh:
            grid = S(("row", "col"), ("dp", "tp"))
            text = str(ts.debug.show_sharding(grid, (5, 7), dtype="bf16"))
        assert text == ("bf16[5, 7] in (dp, tp) on mesh(dp=2, tp=3)\n"
                        "     0:3  3:5  5:7\n"
                        "0:3  0    1    2\n"
                        "3:5  3    4    5")

    def test_whole_groups_repeats_terms_and_slabs(self):
        mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(2, 2))
        show = ts.debug.show_sharding
        assert "0:12" in str(show(S(("row",), ("tp",)), (22,), mesh, dtype="fp6"))
        assert "0, 2" in str(show(S(("row",), ("tp",)), (22,), mesh))
        assert "0 + 2" in str(show(S(("row",), ("tp", "dp"), reduce="sum"), (22,), mesh))
        assert "0 max 2" in str(show(S(("row",), ("tp", "dp"), reduce="max"), (22,), mesh))
        cube = ts.dist.mesh(axes=("a", "b", "c"), shape=(2, 2, 2))
        assert str(show(S((0, 1, 2), ("a", "b", "c")), (2, 2, 2), cube)).count("dim 0 ") == 2
        assert "4 more" in str(show(ts.dist.Cyclic(("dp",)), (20,), mesh))
        assert "0-3" in str(show(S(), (), mesh)) and "0:0" in str(show(S(), (0,), mesh))

    def test_html_shows_each_holder_and_escapes(self):
        mesh = ts.dist.mesh(axes=("<b>",), shape=(3,))
        picture = ts.debug.show_sharding(S(("row",), ("<b>",)), (3,), mesh)
        page = picture._repr_html_()
        assert page.count("<td") == 3 and "<b>" not in page and "&lt;b&gt;" in page
        assert len({c.split('"')[1] for c in page.split("<td ")[1:]}) == 3  # three colours


class TestAmbientMesh:
    def test_blocks_nest(self):
        outer, inner = ts.mesh(["a"]), ts.mesh(["b"])
        assert ts.current_mesh() is None
        with outer:
            with inner as opened:
                assert opened is inner and ts.current_mesh() is inner
            assert ts.current_mesh() is outer
        assert ts.current_mesh() is None

    def test_simulated_ranks_see_it(self):
        with MESH:
            assert ts.dist.simulate(ts.current_mesh, 2) == [MESH, MESH]
        small = ts.dist.mesh(axes=("dp",), shape=(2,))
        assert ts.dist.simulate(ts.current_mesh, small) == [small, small]
