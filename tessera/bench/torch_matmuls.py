"""The products of a step by cuBLAS, through PyTorch, on the operands of ours where they lie."""

from __future__ import annotations

import itertools
from math import prod
from typing import Any

import torch

from ..graph.schedule.ir import GroupOperand
from ..runtime.device import device
from ..runtime.graphs import recording_stream
from .kernel_classes import of_torch
from .step_matmuls import MatmulRun, StepMatmul

TYPES = {"bf16": (torch.bfloat16, "<i2", torch.int16), "f16": (torch.float16, "<f2", None),
         "f32": (torch.float32, "<f4", None)}


class _Memory:
    """Device memory as PyTorch takes it from others."""

    def __init__(self, pointer: int, shape: tuple[int, ...], code: str, owner: Any):
        self.owner = owner
        self.__cuda_array_interface__ = {"data": (pointer, False), "shape": shape, "typestr": code,
                                         "strides": None, "version": 3}


def tensor(o: GroupOperand, pointer: int, owner: Any) -> torch.Tensor:
    """An operand as a matrix, or a row: what lies there, as if it lay densely."""
    name = o.type.dtype.name
    kind, code, held = TYPES[name]
    shape = o.shape[-2:] if len(o.shape) > 1 else o.shape
    made = torch.as_tensor(_Memory(pointer, shape, code, owner), device="cuda")
    return made if held is None else made.view(kind)


class TorchMatmul:
    """torch.mm, with a bias torch.addmm, and for each pair more one that adds to it. Biases have
    the type of the result, as autocast has them."""

    def __init__(self, product: StepMatmul, ours: MatmulRun):
        self.product, self.ours = product, ours
        self.copies = [self._operands(i) for i in range(ours.memory.copies)]
        M, N, _ = product.pairs[0].extents
        a = self.copies[0][0][0][0]
        self.out = [torch.empty(M, N, dtype=a.dtype, device="cuda") for _ in self.copies]
        self._next = itertools.cycle(range(len(self.copies)))
        # cuBLAS chooses, and takes memory for the stream, which it cannot while that is recorded.
        self._call(torch.cuda.ExternalStream(recording_stream(device().index)), 0)
        torch.cuda.synchronize()

    def _operands(self, copy: int) -> tuple[list[tuple[torch.Tensor, torch.Tensor]],
                                            torch.Tensor | None]:
        buffers = self.ours.memory.buffers[copy]

        def of(o: GroupOperand) -> torch.Tensor:
            return tensor(o, buffers[o.name].pointer, buffers[o.name])

        pairs = []
        for p in self.product.pairs:
            a, b = of(p.a), of(p.b)
            pairs.append((a.T if p.layout[0] == "t" else a, b.T if p.layout[1] == "t" else b))
        bias = [of(o).to(pairs[0][0].dtype) for o in self.product.beside]
        return pairs, bias[0] if bias else None

    def __call__(self, stream: int) -> None:
        self._call(torch.cuda.ExternalStream(stream), next(self._next))

    def _call(self, stream: Any, copy: int) -> None:
        (first, *more), bias = self.copies[copy]
        out = self.out[copy]
        with torch.cuda.stream(stream):
            if bias is None:
                torch.mm(*first, out=out)
            else:
                torch.addmm(bias, *first, out=out)
            for a, b in more:
                torch.addmm(out, a, b, out=out)

    def distance(self) -> float | None:
        """|ours - theirs| / |theirs| of the first copy, in f64 on their side; None where our
        operands or results do not lie densely. Parts are added here: the kernel that adds them in
        a step may go on with the sum, and write what becomes of it alone."""
        group = self.product.group
        if any(o.layout is not None for o in (*group.reads, *group.writes)):
            return None
        self.ours(0)
        self._call(torch.cuda.default_stream(), 0)
        device().synchronize()
        want = self.out[0].double().reshape(-1)
        o = next(o for o in group.writes if prod(o.shape) % want.numel() == 0)
        buffer, count = self.ours.memory.buffers[0][o.name], prod(o.shape)
        kind, code, held = TYPES[o.type.dtype.name]
        got = torch.as_tensor(_Memory(buffer.pointer, (count,), code, buffer), device="cuda")
        got = (got if held is None else got.view(kind)).double().reshape(-1, want.numel()).sum(0)
        return float((got - want).norm() / want.norm())

    def kernels(self) -> str:
        """Names of what a call launches."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA],
                                    acc_events=True) as p:
            self._call(torch.cuda.default_stream(), 0)
            torch.cuda.synchronize()
        return " ".join(e.key for e in p.key_averages() if of_torch(e.key) == "matmul")


__all__ = ["TorchMatmul"]
