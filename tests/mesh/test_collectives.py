"""Collectives on simulated ranks: values, numerics, order, uneven parts, what they send."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import tessera as ts
from mesh.battery import TYPES, collectives, legal, operand
from tessera.mesh.collectives.record import COLLECTIVES
from tessera.mesh.ranks.local import LocalTransport
from tessera.numerics import decode, encode

RANKS = pytest.mark.parametrize("ranks", [1, 2, 3, 4])
SAMPLES = [pytest.param(c, s, id=f"{c.name}-{i}")
           for c in COLLECTIVES.values() for i, s in enumerate(c.samples)]


def on_ranks(ranks: int, program) -> list:
    return ts.dist.simulate(lambda: program(ts.dist.rank()), ranks)


@RANKS
@pytest.mark.parametrize("record, sample", SAMPLES)
def test_each_collective_is_its_meaning(record, sample, ranks, rng):
    arrays = [rng.standard_normal(sample.shape(r, ranks)) for r in range(ranks)]
    call = getattr(ts.dist, record.name)
    got = on_ranks(ranks, lambda r: call(ts.tensor(arrays[r]), **sample.attrs).numpy())
    for mine, meant in zip(got, record.meaning(arrays, **sample.attrs), strict=True):
        np.testing.assert_allclose(mine, meant, rtol=1e-14, atol=1e-14, strict=True)


@RANKS
@pytest.mark.parametrize("kind", TYPES)
def test_sums_are_made_in_the_accumulate_type_and_rounded_once(kind, ranks):
    """Against a sum written out here: pairs of neighbours, then pairs of pairs."""
    if ts.as_type(kind).dtype.kind == "bool":
        pytest.skip("bools are not added")
    terms = [operand((5, 3), kind, r) for r in range(ranks)]
    accum = ts.as_type(kind).accum

    def add(a, b):
        return decode(encode(a + b, accum), accum) if accum is ts.bf16 else a + b

    wide = [decode(t.array, t.dtype) for t in terms]
    if accum.kind == "int":
        wide = [w.astype(accum.numpy) for w in wide]
    total = wide[0] if ranks == 1 else add(wide[0], wide[1]) if ranks == 2 else \
        add(add(wide[0], wide[1]), wide[2] if ranks == 3 else add(wide[2], wide[3]))
    policy = ts.as_type(kind).policy
    stochastic = {"rounding": "stochastic", "key": 5} if policy.rounding == "stochastic" else {}
    meant = encode(total, terms[0].dtype, saturate=policy.saturate, **stochastic)
    for y in on_ranks(ranks, lambda r: ts.dist.all_reduce(terms[r], dtype=kind, key=5)):
        assert y.type == ts.as_type(kind) and y.array.tobytes() == meant.tobytes()


def test_the_order_is_fixed_and_does_not_depend_on_where_an_element_lies(rng):
    """One column, reduced alone and inside a large array, has the same bits; so has every run."""
    terms = [rng.standard_normal((4, 50)).astype(np.float32) * 10.0 ** r for r in range(4)]
    whole = on_ranks(4, lambda r: ts.dist.all_reduce(terms[r]).numpy())
    again = on_ranks(4, lambda r: ts.dist.all_reduce(terms[r]).numpy())
    assert all((a == whole[0]).all() for a in whole + again)
    one = on_ranks(4, lambda r: ts.dist.all_reduce(terms[r][:, 7:8]).numpy())
    assert (one[0] == whole[0][:, 7:8]).all()
    halves = on_ranks(4, lambda r: ts.dist.reduce_scatter(terms[r], dim=1).numpy())
    assert (np.concatenate(halves, axis=1) == whole[0]).all()


class TestStochasticRounding:
    TYPE = ts.as_type("bf16 @stochastic_round")

    def exact(self, rng) -> list[np.ndarray]:
        """Four terms whose sums are exact in f32 in any order, but not in bf16."""
        return [rng.integers(-4000, 4000, (8, 6)).astype(np.float32) for _ in range(4)]

    def test_one_and_four_ranks_give_the_same_bits(self, rng):
        terms = self.exact(rng)
        alone = ts.dist.all_reduce(sum(terms), dtype=self.TYPE, key=9)
        assert (alone.array != ts.cast(ts.tensor(sum(terms)), "bf16").array).any()
        four = on_ranks(4, lambda r: ts.dist.all_reduce(terms[r], dtype=self.TYPE, key=9).array)
        assert all((y == alone.array).all() for y in four)
        blocks = on_ranks(4, lambda r: ts.dist.reduce_scatter(
            terms[r], dim=0, dtype=self.TYPE, key=9).array)
        assert (np.concatenate(blocks) == alone.array).all()

    def test_a_sharded_operand_draws_by_its_place_in_the_whole(self, rng):
        """Rows over dp, terms over tp: 2 x 2 ranks round as one."""
        terms = self.exact(rng)[:2]
        mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(2, 2))
        rows = ts.ShardSpec(("row",), ("dp",)).resolve(mesh, 2)

        def program():
            rank = ts.dist.rank()
            part = ts.dist.take(terms[mesh.coords(rank)[1]], rows, rank)
            return ts.dist.all_reduce(part, "tp", dtype=self.TYPE, key=9,
                                      index=ts.dist.indices(rows, (8, 6), rank)).array

        alone = ts.dist.all_reduce(sum(terms), dtype=self.TYPE, key=9).array
        parts = ts.dist.simulate(program, mesh)
        assert (ts.dist.assemble(parts, rows, (8, 6)) == alone).all()

    def test_a_key_is_needed(self):
        with pytest.raises(ts.ArgumentError, match="needs a key"):
            ts.dist.all_reduce(ts.ones((2,)), dtype=self.TYPE)
        with pytest.raises(ts.ArgumentError, match=r"index has int64\[3\], the operand is \[2\]"):
            ts.dist.all_reduce(ts.ones((2,)), dtype=self.TYPE, key=1, index=np.arange(3))


class TestMovement:
    def test_nothing_is_rounded(self):
        """Every code of a format, NaNs with their payloads, goes round and comes back."""
        codes = np.arange(256, dtype=np.uint8).view(ts.fp8_e4m3.numpy).reshape(16, 16)
        x = ts.Tensor(codes, ts.as_type("fp8_e4m3"))
        ring = [(r, (r + 1) % 3) for r in range(3)]

        def program(rank):
            y = x
            for _ in range(3):
                y = ts.dist.permute(y, pairs=ring)
            return ts.dist.all_to_all(ts.dist.all_to_all(y), split=1, concat=0).array.tobytes()

        assert set(on_ranks(3, program)) == {codes.tobytes()}

    @RANKS
    def test_the_guide_s_uneven_columns_are_gathered_exactly(self, ranks, rng):
        whole = rng.standard_normal((2, 8192 // 64 + 1)).astype(np.float32)
        mesh = ts.dist.mesh(axes=("tp",), shape=(ranks,))
        layout = ts.ShardSpec(("col",), ("tp",)).resolve(mesh, 2)
        got = on_ranks(ranks, lambda r: ts.dist.all_gather(
            ts.dist.take(whole, layout, r), "tp", mesh=mesh).numpy())
        assert all((g == whole).all() for g in got)

    @pytest.mark.parametrize("kind", ["fp4", "fp6", "int4"])
    def test_packed_types_travel_packed(self, kind, monkeypatch):
        sent = []
        monkeypatch.setattr(LocalTransport, "exchange", counting(LocalTransport.exchange, sent))
        x = operand((4, 24), kind, 0)
        y = on_ranks(2, lambda r: ts.dist.broadcast(x))
        assert all((t.array == x.array).all() and t.type == x.type for t in y)
        assert sent == [96 * x.dtype.bits // 8]


def counting(exchange, sent: list):
    """`exchange`, noting the bytes of data; what ranks tell each other first is not data."""
    def counted(self, sends, receives, label):
        sent.extend(d.size for d in sends.values())
        return exchange(self, sends, receives, label)

    return counted


@pytest.mark.parametrize("record", COLLECTIVES.values(), ids=lambda c: c.name)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_a_collective_sends_is_what_its_record_says(record, ranks, monkeypatch):
    """Of 8 x 8 elements; the busiest rank's bytes."""
    attrs = dict(record.samples[0].attrs)
    if record.name == "permute":
        attrs = {"pairs": [(r, (r + 1) % ranks) for r in range(ranks)]}
    counts = {r: [] for r in range(ranks)}
    plain = LocalTransport.exchange
    monkeypatch.setattr(LocalTransport, "exchange", lambda self, *args: counting(
        plain, counts[self.rank])(self, *args))
    on_ranks(ranks, lambda r: getattr(ts.dist, record.name)(ts.ones((8, 8)), **attrs))
    busiest = max(map(sum, counts.values()))
    expected = 0 if ranks == 1 else record.sends(64, ranks) * 4
    assert busiest == expected


def test_simulated_ranks_give_the_same_bits_every_time():
    assert ts.dist.simulate(collectives, 3) == ts.dist.simulate(collectives, 3)


def test_a_second_record_of_a_name_is_refused():
    with pytest.raises(ts.ArgumentError, match="registered already"):
        dataclasses.replace(COLLECTIVES["all_reduce"], doc="another")


@pytest.mark.parametrize("call, error, words", [
    (lambda x: ts.dist.all_reduce(x, op="prod"), ts.ArgumentError, "op='prod' is no reduction"),
    (lambda x: ts.dist.all_reduce(x > 0), ts.DTypeError, "no sum of bool_ over ranks"),
    (lambda x: ts.dist.all_reduce(ts.cast(x, "int8"), op="mean"), ts.DTypeError, "no mean of int8"),
    (lambda x: ts.dist.all_reduce(ts.cast(x, "int8 @scaled('amax')")), ts.DTypeError, "scaled"),
    (lambda x: ts.jit(ts.all_reduce).infer(ts.Tensor["B", 3, ts.f32]), ts.TraceError,
     "all_reduce of f32[B, 3]: ranks compare extents when they trace"),
    (lambda x: ts.dist.all_gather(x, dim=2), ts.AxisError, "dim=2 of a tensor with 2"),
    (lambda x: ts.dist.all_gather(ts.tensor(1.0)), ts.AxisError, "with 0 dimensions"),
    (lambda x: ts.dist.broadcast(x, root=1), ts.AxisError, "root=1 of 1 ranks"),
    (lambda x: ts.dist.permute(x, pairs=[(0, 1)]), ts.ArgumentError, "on 1 ranks"),
    (lambda x: ts.jit(lambda x: ts.all_reduce(x, op="mean"))(ts.cast(x, "int8")), ts.DTypeError,
     "no mean of int8"),
    (lambda x: ts.dist.all_reduce(x, mesh=ts.dist.mesh(axes=("tp",), shape=(2,))),
     ts.dist.MeshError, "has 2 ranks and this program runs on 1"),
    (lambda x: ts.dist.all_reduce(x, "dp", mesh=ts.mesh(["a"])), ts.AxisError, "no axis 'dp'"),
    (lambda x: ts.dist.all_reduce(ts.ones((1,) * 33)), ts.ShapeError, "up to 32 dimensions"),
])
def test_mistakes_say_what_was_asked(call, error, words):
    with pytest.raises(error) as info:
        call(ts.ones((2, 3)))
    assert words in str(info.value) and info.value.where.file == __file__


def test_a_mesh_that_does_not_fit_says_the_ways_out():
    with ts.dist.mesh(axes=("dp",), shape=(72,)), pytest.raises(ts.dist.MeshError) as info:
        ts.dist.barrier("dp")
    assert "mpirun -n 72" in info.value.hint and "ts.dist.simulate" in info.value.hint


def test_some_types_have_no_sum():
    assert not legal("all_reduce", {"op": "sum"}, "bool_") and legal("all_gather", {}, "bool_")
