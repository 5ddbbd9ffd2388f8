"""Where the segment of each place begins and ends: what attention with segments sees.

One op, for a GPU makes it in one launch. Of comparisons, running sums and searches there were
seven, 33 us of 518 that attention to documents took (64 heads of 64 and 8192 places; NVIDIA H200,
2026-11-28, calls in turn).
"""

from __future__ import annotations

from math import prod

import numpy as np

from ...kernels.segment_spans import segment_spans
from ...numerics import as_type
from ...tensor import Tensor
from .. import functions as F
from ..op import Aval, GraphOp, sample
from ..trace import apply

INT32 = as_type("int32")


def _shape(ids: Aval) -> Aval:
    return Aval((*ids.shape[:-1], 2, ids.shape[-1]), INT32)


def _ref(ids: np.ndarray) -> np.ndarray:
    S = ids.shape[-1]
    begins, places = np.zeros(ids.shape, bool), np.arange(S, dtype=np.int32)
    begins[..., 1:] = ids[..., 1:] != ids[..., :-1]
    first = np.maximum.accumulate(np.where(begins, places, np.int32(0)), axis=-1)
    end = np.full(ids.shape, S, np.int32)
    later = np.where(begins, places, np.int32(S))[..., :0:-1]
    end[..., :-1] = np.minimum.accumulate(later, axis=-1)[..., ::-1]
    return np.stack([first, end], axis=-2)


def _by_kernel(ids: Tensor) -> Tensor:
    lead, S = tuple(ids.shape[:-1]), ids.shape[-1]
    made = F.zeros((prod(lead), 2, S), "int32")
    segment_spans(F.reshape(ids, (prod(lead), S)), made)
    return F.reshape(made, (*lead, 2, S))


def _letters(ids: Aval) -> str:
    lead = "abcdefgh"[:ids.ndim - 1]
    return f"{lead}_->{lead}__"


SEGMENT_SPANS = GraphOp(
    "segment_spans",
    shape=_shape,
    ref=_ref,
    batch=lambda size, batched, ids: (apply(SEGMENT_SPANS, ids), True),
    expand_gpu=_by_kernel,
    axes=_letters,
    differentiable=False,
    samples=(sample(((9,), "index:2")), sample(((2, 7), "index:2")),
             sample(((2, 1, 1), "index:3"))),
    doc="of each place of a line the first of the neighbours that have its number, and the first "
    "behind these",
)
