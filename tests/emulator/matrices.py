"""ldmatrix and mma of a block in lockstep."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tessera.numerics import decode, find_dtype
from tessera.tile.cuda.instruction import Instruction

MMA_TYPES = {"bf16": "bf16", "f16": "f16", "tf32": "f32", "s8": "int8", "u8": "uint8",
             "e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2"}


class Matrices:
    """W: warps of the block; g, t: a lane's group of four and its place in it."""

    t: np.ndarray
    shared: Any
    spread: Any
    bytes_at: Any
    count_conflicts: Any
    bulk: Any

    def ldmatrix(self, instruction: Instruction, at: Any) -> Any:
        count = int(instruction.name.split("_x")[1][0])
        address = self.bytes_at(at, 16).reshape(-1, 32, 16)[:, :8 * count]
        self.count_conflicts("ldmatrix", address[..., 0].reshape(-1, 8), np.ones((), bool))
        lanes = self.t.reshape(-1, 32)[:, :8 * count].reshape(-1)
        raw = self.shared.read(address.reshape(-1, 16), lanes)
        tiles = raw.view(np.uint16).reshape(-1, count, 8, 8)  # [W, tile, row, column]
        if "trans" in instruction.name:
            tiles = tiles.swapaxes(2, 3)
        words = np.ascontiguousarray(tiles).view(np.int32).reshape(-1, count, 32)
        parts = [words[:, i].reshape(-1) for i in range(count)]
        return parts if count > 1 else parts[0]

    def stmatrix(self, instruction: Instruction, at: Any, x: Any) -> None:
        count = int(instruction.name.split("_x")[1][0])
        address = self.bytes_at(at, 16).reshape(-1, 32, 16)[:, :8 * count]
        self.count_conflicts("stmatrix", address[..., 0].reshape(-1, 8), np.ones((), bool))
        lanes = self.t.reshape(-1, 32)[:, :8 * count].reshape(-1)
        words = np.stack([self.spread(r) for r in (x if isinstance(x, list) else [x])], 0)
        tiles = words.reshape(count, -1, 8, 4).swapaxes(0, 1)  # [W, tile, row, word]
        tiles = np.ascontiguousarray(tiles).view(np.uint16)  # [W, tile, row, column]
        if "trans" in instruction.name:
            tiles = np.ascontiguousarray(tiles.swapaxes(2, 3))
        raw = tiles.view(np.uint8).reshape(-1, 16)
        self.shared.write(address.reshape(-1, 16), lanes, raw)
        self.bulk.unfenced[:] = True

    def mma(self, instruction: Instruction, a: Any, b: Any, c: Any) -> list[np.ndarray]:
        k, d, first, second = re.match(  # type: ignore[union-attr]
            r"mma_m16n8k(\d+)_(\w+?)_(\w+?)_(\w+?)_", instruction.name).groups()
        A = self._fragment(a, first, 2).reshape(-1, 16, int(k))
        B = self._fragment(b if isinstance(b, list) else [b], second, 1)
        B = B.reshape(-1, 8, int(k)).swapaxes(1, 2)
        wide = np.int64 if d == "s32" else np.float64
        C = self._accumulator(c).astype(wide) + A.astype(wide) @ B.astype(wide)
        C = C.astype(np.int32 if d == "s32" else np.float32)
        parts = C.reshape(-1, 2, 8, 4, 2)  # [W, row half, g, t, j]
        return [parts[:, i, :, :, j].reshape(-1) for i in (0, 1) for j in (0, 1)]

    def _fragment(self, registers: list, kind: str, rows: int) -> np.ndarray:
        """[W, rows * 8, k] numbers of A (rows 2) or B (rows 1)."""
        words = np.stack([self.spread(r) for r in registers], 0)
        dtype = find_dtype(MMA_TYPES[kind])
        if kind == "tf32":
            words = words & -0x2000
        words = words.reshape(len(registers) // rows, rows, -1, 8, 4)  # [half, row, W, g, t]
        words = np.ascontiguousarray(words.transpose(2, 1, 3, 0, 4))  # [W, row, g, half, t]
        return decode(words.view(dtype.numpy), dtype)

    def _accumulator(self, c: list) -> np.ndarray:
        parts = np.stack([self.spread(x) for x in c], 0)
        return parts.reshape(2, 2, -1, 8, 4).transpose(2, 0, 3, 4, 1).reshape(-1, 16, 8)
