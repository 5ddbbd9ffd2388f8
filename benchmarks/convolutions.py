"""Convolutions of ResNet-50 beside cuDNN on a GPU: bf16, channels last, and both gradients.

    python benchmarks/convolutions.py [batch]

Microseconds of each and the ratio. Ours are compiled functions of several images, as a user writes
them: images and filters are [N, H, W, C] in memory and transposed views of that in the function.
Theirs are PyTorch's with cudnn.benchmark, as a CUDA graph. Both take images in turn of which L2
does not hold all; our gradients of filters are f32, theirs bf16. Results are checked against
cuDNN's first. Needs torch and a GPU. Writes benchmarks/results/convolutions.json, or
$OUT/convolutions.json when OUT is set.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import record
import torch
from gpu_timing import AHEAD_CYCLES, as_torch, captured, in_turn, require

import tessera as ts

# channels, extent of the images, filters, extent of the windows, stride
LAYERS = [
    (3, 224, 64, 7, 2),
    (64, 56, 64, 1, 1), (64, 56, 64, 3, 1), (64, 56, 256, 1, 1), (256, 56, 64, 1, 1),
    (256, 56, 128, 1, 1), (128, 56, 128, 3, 2), (256, 56, 512, 1, 2), (128, 28, 128, 3, 1),
    (128, 28, 512, 1, 1), (512, 28, 128, 1, 1),
    (512, 28, 256, 1, 1), (256, 28, 256, 3, 2), (512, 28, 1024, 1, 2), (256, 14, 256, 3, 1),
    (256, 14, 1024, 1, 1), (1024, 14, 256, 1, 1),
    (1024, 14, 512, 1, 1), (512, 14, 512, 3, 2), (1024, 14, 2048, 1, 2), (512, 7, 512, 3, 1),
    (512, 7, 2048, 1, 1), (2048, 7, 512, 1, 1)]
KINDS = {"forward": "y", "images": "dx", "filters": "dw"}
FOOTPRINT = 200 << 20  # bytes of images and results between two reads of one: four times an L2
LIMIT = 6e-3  # relative distance to cuDNN's, of bf16
ROUNDS, CALLS, IN_A_ROW = 7, 12, 4  # CALLS: at least, of one function
FRONT, BACK = (0, 3, 1, 2), (0, 2, 3, 1)


class Layer:
    """One convolution of several images."""

    def __init__(self, batch: int, C: int, H: int, M: int, K: int, stride: int):
        self.name = f"{K}x{K}/{stride} {C}->{M} @{H}"
        self.stride, self.padding, places = stride, K // 2, -(-H // stride)
        each = 2 * batch * (C * H * H + M * places * places)
        self.count = max(CALLS, math.ceil(FOOTPRINT / each))
        bf = {"device": "cuda", "dtype": torch.bfloat16}
        self.xs = torch.randn(self.count, batch, H, H, C, **bf)
        self.gs = torch.randn(self.count, batch, places, places, M, **bf)
        self.w = torch.randn(M, K, K, C, **bf) / (K * C**0.5)
        self.flops = 2.0 * batch * places**2 * M * K * K * C

    def conv(self, x: Any, w: Any) -> Any:
        y = ts.conv2d(ts.transpose(x, FRONT), ts.transpose(w, FRONT), stride=self.stride,
                      padding=self.padding)
        return ts.transpose(y, BACK)

    def ours(self, kind: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A function of what it needs of images, cotangents and filters, which gives a result for
        each image; and that."""
        shape, dtype = tuple(self.xs.shape[1:]), ts.bf16

        def forward(xs: Any, w: Any) -> Any:
            return [self.conv(xs[i], w) for i in range(xs.shape[0])]

        def images(gs: Any, w: Any) -> Any:
            x = ts.zeros(shape, dtype)  # a convolution's gradient for its images is not of them
            return [ts.cast(ts.vjp(lambda x: self.conv(x, w), x)[1](gs[i]), dtype)
                    for i in range(gs.shape[0])]

        def filters(xs: Any, gs: Any, w: Any) -> Any:
            return [ts.vjp(lambda w, i=i: self.conv(xs[i], w), w)[1](gs[i])
                    for i in range(xs.shape[0])]

        if kind == "forward":
            return forward, (self.xs, self.w)

        if kind == "images":
            return images, (self.gs, self.w)
        return filters, (self.xs, self.gs, self.w)

    def theirs(self, kind: str, x: Any, g: Any) -> Any:
        x, g, w = (a.permute(FRONT) for a in (x, g, self.w))
        both = (self.stride,) * 2, (self.padding,) * 2
        if kind == "forward":
            y = torch.nn.functional.conv2d(x, w, stride=self.stride, padding=self.padding)
        else:
            made = torch.ops.aten.convolution_backward(
                g, x, w, None, *both, (1, 1), False, (0, 0), 1,
                [kind == "images", kind == "filters", False])
            y = made[kind == "filters"]
        return y.permute(BACK)


def on_gpu(x: Any) -> Any:
    """Arrays as tensors of ours, which lie where they lay."""
    if isinstance(x, tuple | list):
        return type(x)(map(on_gpu, x))
    return ts.from_dlpack(x)


def measured(layer: Layer, kind: str) -> dict[str, float]:
    given, args = layer.ours(kind)
    fn, args = ts.jit(given), on_gpu(args)
    want = layer.theirs(kind, layer.xs[0], layer.gs[0])
    require(f"{layer.name} {kind}", as_torch(fn(*args)[0]).reshape(want.shape), want, LIMIT)
    theirs = [partial(layer.theirs, kind, x, g) for x, g in zip(layer.xs, layer.gs, strict=True)]
    us = in_turn({"ours": lambda: fn(*args), "cuDNN": captured(theirs)}, IN_A_ROW, ROUNDS,
                 AHEAD_CYCLES)
    ours, cudnn = us["ours"] / layer.count, us["cuDNN"] / layer.count
    return {"ours_us": round(ours, 1), "cudnn_us": round(cudnn, 1),
            "ratio": round(cudnn / ours, 3), "tflops": round(layer.flops / ours / 1e6)}


def compile_all(batch: int) -> None:
    """All kernels side by side: those of one function are compiled by several processes."""
    layers = [Layer(batch, *of) for of in LAYERS]
    for layer in layers:
        layer.xs, layer.gs = layer.xs[:1], layer.gs[:1]
    calls = [layer.ours(kind) for layer in layers for kind in kinds_of(layer)]
    ts.jit(lambda given: [fn(*a) for (fn, _), a in zip(calls, given, strict=True)])(
        on_gpu([args for _, args in calls]))


def kinds_of(layer: Layer) -> list[str]:
    """The images of the first layer are data: nobody asks for their gradient."""
    return [k for k in KINDS if k != "images" or layer.w.shape[3] > 3]


def main() -> None:
    torch.backends.cudnn.benchmark = True
    batch = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    compile_all(batch)
    figures: dict[str, Any] = {}
    for of in LAYERS:
        layer = Layer(batch, *of)
        figures[layer.name] = {kind: measured(layer, kind) for kind in kinds_of(layer)}
        print(layer.name, json.dumps(figures[layer.name]), flush=True)
    ratios = {kind: [f[kind]["ratio"] for f in figures.values() if kind in f] for kind in KINDS}
    means = {kind: round(statistics.geometric_mean(r), 3) for kind, r in ratios.items()}
    print("geometric means", means, "least", {k: min(r) for k, r in ratios.items()}, flush=True)
    made = {"batch": batch, "geometric_mean": means, "layers": figures}
    record.write("convolutions", {"device": torch.cuda.get_device_name(), **made}, shown=False)


if __name__ == "__main__":
    main()
