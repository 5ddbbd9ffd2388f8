"""Where elements of shared buffers lie: a bijection, and the same in emitted address arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator import Builder
from tessera.tile.cuda.intrinsics.swizzle import Addresses, Panel
from tessera.tile.ir.shared_layout import BANKS, CHUNK_BYTES, SharedLayout

TYPES = {"int8": 1, "bf16": 2, "f32": 4, "f64": 8}
SWIZZLES = (None, "xor", "chunks")
panels = st.builds(Panel, st.integers(1, 70), st.sampled_from([1, 4, 8, 16, 24, 32, 64, 96, 128]),
                   st.sampled_from(list(TYPES)), st.sampled_from(SWIZZLES))


def grid(panel: Panel) -> tuple[np.ndarray, np.ndarray]:
    return np.meshgrid(np.arange(panel.rows), np.arange(panel.columns), indexing="ij")


@given(panels)
def test_every_element_has_its_own_place(panel):
    offset = panel.layout.offset(*grid(panel))
    assert sorted(offset.reshape(-1)) == list(range(panel.rows * panel.columns))
    if panel.layout.whole_chunks and panel.pitch % CHUNK_BYTES == 0:
        chunks = offset.reshape(-1, panel.layout.chunk)
        assert (np.diff(chunks, axis=1) == 1).all() and not (chunks[:, 0] % chunks.shape[1]).any()


@given(panels, st.integers(0, 69), st.integers(0, 127), st.integers(0, 63), st.integers(0, 127),
       st.booleans())
def test_addresses_move_by_constants(panel, row, column, dr, dc, known):
    """zeros: what is known of the column; with nothing known the address is computed anew."""
    column, dc = column % panel.columns, dc % panel.columns
    if column & dc or column + dc >= panel.columns or row + dr >= panel.rows:
        return
    base = 1024
    place = (np.int32(base), np.int32(row), np.int32(column))
    found = Addresses(Builder(None), panel, place, ~column if known else 0).at(dr, dc)
    wanted = panel.layout.offset(np.asarray(row + dr), np.asarray(column + dc)) * panel.size
    assert found == base + wanted


@pytest.mark.parametrize("columns", [16, 32, 64, 128, 256])
def test_a_column_of_chunks_meets_all_banks(columns):
    """ldmatrix reads 16 bytes of eight rows at once."""
    layout = SharedLayout(64, columns, 2, "xor")
    for row in range(0, 64, 8):
        words = layout.word(np.arange(row, row + 8), np.zeros(8, np.int64))
        assert len({int(w) % BANKS // 4 for w in words}) == 8
