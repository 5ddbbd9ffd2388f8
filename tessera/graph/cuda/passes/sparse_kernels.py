"""Products of matrices in compressed rows by the library's kernels."""

from __future__ import annotations

from ....kernels.sparse import LANES, csr_matrix, csr_vector
from ....tensor import Tensor
from ... import functions as F
from ...expand import expand_by
from ...ir import Graph, Node
from ...ops.sparse import CSR_PRODUCT
from ..choose_schedule import power

MOST_ROWS = 1 << 26  # whose threads the kernels count


def use_sparse_kernels(graph: Graph) -> Graph:
    """The graph with the products that the kernels take as their launches."""
    return expand_by(graph, lambda node: _product if node.op is CSR_PRODUCT and _is_taken(
        node) else None)


def _is_taken(node: Node) -> bool:
    avals = [v.aval for v in (*node.inputs, *node.outputs)]
    return avals[0].dtype.name in ("f32", "f64") and all(
        isinstance(n, int) and n for a in avals for n in a.shape) and (
        avals[2].shape[0] <= MOST_ROWS)


def _product(values: Tensor, indices: Tensor, indptr: Tensor, x: Tensor) -> Tensor:
    M, K = indptr.shape[0] - 1, x.shape[1]
    y = F.zeros((M, K), values.type)
    if K == 1:
        csr_vector.launcher(lanes=LANES)(values, indices, indptr, x, y)
    else:
        csr_matrix.launcher(lanes=LANES)(values, indices, indptr, x, y, min(power(K), LANES))
    return y


__all__ = ["use_sparse_kernels"]
