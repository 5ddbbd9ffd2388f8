"""What ops of ONNX are among the functions of `ts`: matmuls, convolutions, pools, norms."""

from __future__ import annotations

from typing import Any

from ..graph import functions as F
from ..tensor import Tensor
from .reading import OnnxNode, reads, tensor


@reads("Gemm")
def _gemm(node: OnnxNode, a: Any, b: Any, c: Any = None) -> Tensor:
    """alpha A B + beta C"""
    a, b = tensor(a), tensor(b)
    a = F.transpose(a) if node.option("transA", 0) else a
    b = F.transpose(b) if node.option("transB", 0) else b
    made = F.matmul(a, b)
    made = made if node.option("alpha", 1.0) == 1 else made * node.option("alpha")
    if c is None:
        return made
    return made + (tensor(c) if node.option("beta", 1.0) == 1 else
                   tensor(c) * node.option("beta"))


@reads("Einsum")
def _einsum(node: OnnxNode, *xs: Any) -> Tensor:
    return F.einsum(node.attrs["equation"].replace(" ", ""), *map(tensor, xs))


@reads("Softmax")
def _softmax(node: OnnxNode, x: Any) -> Tensor:
    return F.softmax(tensor(x), node.option("axis", -1))


@reads("LogSoftmax")
def _log_softmax(node: OnnxNode, x: Any) -> Tensor:
    return F.log_softmax(tensor(x), node.option("axis", -1))


# --- norms ---------------------------------------------------------------------------------------
@reads("LayerNormalization")
def _layernorm(node: OnnxNode, x: Any, scale: Any, bias: Any = None) -> Tensor:
    """Over the axes from `axis` on, which are one for ours."""
    node.one_result()
    x = tensor(x)
    axis = node.option("axis", -1) % x.ndim
    flat = F.reshape(x, (*x.shape[:axis], -1))
    gamma = F.reshape(F.broadcast_to(tensor(scale), x.shape[axis:]), (-1,))
    beta = None if bias is None else F.reshape(
        F.broadcast_to(tensor(bias), x.shape[axis:]), (-1,))
    return F.reshape(F.layernorm(flat, gamma, beta, eps=node.option("epsilon", 1e-5)), x.shape)


@reads("BatchNormalization")
def _batch_norm(node: OnnxNode, x: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Tensor:
    node.one_result()
    node.only(training_mode=0)
    return F.batch_norm(tensor(x), tensor(scale), tensor(bias), mean=tensor(mean),
                        var=tensor(var), eps=node.option("epsilon", 1e-5))


# --- windows -------------------------------------------------------------------------------------
def _padding(node: OnnxNode, rank: int) -> Any:
    """Pairs per axis, or a word. SAME_LOWER puts the odd element in front, which ours does not."""
    auto = node.option("auto_pad", "NOTSET")
    if auto == "SAME_LOWER":
        raise node.refuse("auto_pad='SAME_LOWER'")
    if auto != "NOTSET":
        return {"VALID": "valid", "SAME_UPPER": "same"}[auto]
    pads = node.option("pads", [0] * 2 * rank)
    return tuple((pads[i], pads[i + rank]) for i in range(rank))


def _options(node: OnnxNode, rank: int) -> dict[str, Any]:
    return {"stride": tuple(node.option("strides", [1] * rank)), "padding": _padding(node, rank),
            "dilation": tuple(node.option("dilations", [1] * rank)),
            "groups": node.option("group", 1)}


@reads("Conv")
def _conv(node: OnnxNode, x: Any, w: Any, bias: Any = None) -> Tensor:
    rank = len(w.shape) - 2
    if rank not in (1, 2):
        raise node.refuse(f"{rank} spatial axes")
    call = F.conv1d if rank == 1 else F.conv2d
    return call(tensor(x), tensor(w), None if bias is None else tensor(bias),
                **_options(node, rank))


@reads("ConvTranspose")
def _conv_transpose(node: OnnxNode, x: Any, w: Any, bias: Any = None) -> Tensor:
    """One spatial axis is the second of two, the first of which has one place."""
    node.only(auto_pad="NOTSET", output_shape=None)
    rank = len(w.shape) - 2
    if rank not in (1, 2):
        raise node.refuse(f"{rank} spatial axes")
    x, w, how = tensor(x), tensor(w), _options(node, rank)
    how["output_padding"] = tuple(node.option("output_padding", [0] * rank))
    if rank == 1:
        x, w = F.expand_dims(x, 2), F.expand_dims(w, 2)
        one = {"stride": 1, "padding": (0, 0), "dilation": 1, "output_padding": 0}
        how |= {k: (first, *how[k]) for k, first in one.items()}
    made = F.conv_transpose2d(x, w, None if bias is None else tensor(bias), **how)
    return F.squeeze(made, 2) if rank == 1 else made


@reads("MaxPool")
def _max_pool(node: OnnxNode, x: Any) -> Tensor:
    node.one_result()
    how = _pool(node)
    return F.max_pool2d(tensor(x), dilation=tuple(node.option("dilations", [1, 1])), **how)


@reads("AveragePool")
def _average_pool(node: OnnxNode, x: Any) -> Tensor:
    node.only(dilations=[1, 1])
    return F.avg_pool2d(tensor(x), count_include_pad=bool(node.option("count_include_pad", 0)),
                        **_pool(node))


def _pool(node: OnnxNode) -> dict[str, Any]:
    if len(node.attrs["kernel_shape"]) != 2:
        raise node.refuse(f"windows of {len(node.attrs['kernel_shape'])} axes")
    return {"window": tuple(node.attrs["kernel_shape"]), "padding": _padding(node, 2),
            "stride": tuple(node.option("strides", [1, 1])),
            "ceil_mode": bool(node.option("ceil_mode", 0))}


@reads("GlobalAveragePool")
def _global_average_pool(node: OnnxNode, x: Any) -> Tensor:
    return F.mean(tensor(x), tuple(range(2, len(x.shape))), True)


@reads("GlobalMaxPool")
def _global_max_pool(node: OnnxNode, x: Any) -> Tensor:
    return F.max(tensor(x), tuple(range(2, len(x.shape))), True)
