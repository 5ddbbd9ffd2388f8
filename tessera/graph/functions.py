"""Every public op function by its name, for rules of ops that are made of other ops' functions.

    from .. import functions as F

    F.reshape(x, (-1,))

Rules call each other's functions in circles, so nothing is imported here when the program runs: the
decorator `public` puts each function here when it is declared. The imports below tell an editor and
the type checker what there is; a test compares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__: list[str] = []  # filled by `public`, as this module is

if TYPE_CHECKING:
    from .ops.attention import attention as attention
    from .ops.attention import flash_attention as flash_attention
    from .ops.channel_norms import batch_norm as batch_norm
    from .ops.channel_norms import group_norm as group_norm
    from .ops.conv import conv1d as conv1d
    from .ops.conv import conv2d as conv2d
    from .ops.conv import conv_transpose2d as conv_transpose2d
    from .ops.convert import cast as cast
    from .ops.convert import cast_like as cast_like
    from .ops.cosine import dct as dct
    from .ops.cosine import idct as idct
    from .ops.create import arange as arange
    from .ops.create import eye as eye
    from .ops.create import full as full
    from .ops.create import full_like as full_like
    from .ops.create import linspace as linspace
    from .ops.create import ones as ones
    from .ops.create import ones_like as ones_like
    from .ops.create import zeros as zeros
    from .ops.create import zeros_like as zeros_like
    from .ops.create import zeros_like_type as zeros_like_type
    from .ops.cumulative import cummax as cummax
    from .ops.cumulative import cummin as cummin
    from .ops.cumulative import cumprod as cumprod
    from .ops.cumulative import linear_recurrence as linear_recurrence
    from .ops.cumulative import logcumsumexp as logcumsumexp
    from .ops.determinants import det as det
    from .ops.determinants import slogdet as slogdet
    from .ops.distances import huber_loss as huber_loss
    from .ops.distances import kl_div as kl_div
    from .ops.distances import l1_loss as l1_loss
    from .ops.distances import smooth_l1_loss as smooth_l1_loss
    from .ops.einsum import einsum as einsum
    from .ops.einsum import outer as outer
    from .ops.einsum import tensordot as tensordot
    from .ops.elementwise import abs_ as abs_
    from .ops.elementwise import acos as acos
    from .ops.elementwise import add as add
    from .ops.elementwise import asin as asin
    from .ops.elementwise import atan as atan
    from .ops.elementwise import atan2 as atan2
    from .ops.elementwise import ceil as ceil
    from .ops.elementwise import clip as clip
    from .ops.elementwise import cos as cos
    from .ops.elementwise import cosh as cosh
    from .ops.elementwise import div as div
    from .ops.elementwise import equal as equal
    from .ops.elementwise import erf as erf
    from .ops.elementwise import erfc as erfc
    from .ops.elementwise import exp as exp
    from .ops.elementwise import expm1 as expm1
    from .ops.elementwise import floor as floor
    from .ops.elementwise import floor_divide as floor_divide
    from .ops.elementwise import greater as greater
    from .ops.elementwise import greater_equal as greater_equal
    from .ops.elementwise import isfinite as isfinite
    from .ops.elementwise import isinf as isinf
    from .ops.elementwise import isnan as isnan
    from .ops.elementwise import less as less
    from .ops.elementwise import less_equal as less_equal
    from .ops.elementwise import log as log
    from .ops.elementwise import log1p as log1p
    from .ops.elementwise import maximum as maximum
    from .ops.elementwise import minimum as minimum
    from .ops.elementwise import mul as mul
    from .ops.elementwise import neg as neg
    from .ops.elementwise import not_equal as not_equal
    from .ops.elementwise import power as power
    from .ops.elementwise import relu as relu
    from .ops.elementwise import remainder as remainder
    from .ops.elementwise import round as round
    from .ops.elementwise import rsqrt as rsqrt
    from .ops.elementwise import sigmoid as sigmoid
    from .ops.elementwise import sign as sign
    from .ops.elementwise import sin as sin
    from .ops.elementwise import sinh as sinh
    from .ops.elementwise import sqrt as sqrt
    from .ops.elementwise import square as square
    from .ops.elementwise import sub as sub
    from .ops.elementwise import tan as tan
    from .ops.elementwise import tanh as tanh
    from .ops.elementwise import trunc as trunc
    from .ops.elementwise import where as where
    from .ops.factorizations import cholesky as cholesky
    from .ops.factorizations import eig as eig
    from .ops.factorizations import eigh as eigh
    from .ops.factorizations import qr as qr
    from .ops.factorizations import svd as svd
    from .ops.fourier import fft as fft
    from .ops.fourier import fft2 as fft2
    from .ops.fourier import fftfreq as fftfreq
    from .ops.fourier import fftn as fftn
    from .ops.fourier import fftshift as fftshift
    from .ops.fourier import hfft as hfft
    from .ops.fourier import ifft as ifft
    from .ops.fourier import ifft2 as ifft2
    from .ops.fourier import ifftn as ifftn
    from .ops.fourier import ifftshift as ifftshift
    from .ops.fourier import ihfft as ihfft
    from .ops.fourier import irfft as irfft
    from .ops.fourier import irfft2 as irfft2
    from .ops.fourier import irfftn as irfftn
    from .ops.fourier import rfft as rfft
    from .ops.fourier import rfft2 as rfft2
    from .ops.fourier import rfftfreq as rfftfreq
    from .ops.fourier import rfftn as rfftn
    from .ops.gather import embedding as embedding
    from .ops.gather import gather_axes as gather_axes
    from .ops.gather import one_hot as one_hot
    from .ops.gather import segment_sum as segment_sum
    from .ops.gather import take as take
    from .ops.gather import take_along_axis as take_along_axis
    from .ops.histogram import bincount as bincount
    from .ops.histogram import histogram as histogram
    from .ops.index import diag as diag
    from .ops.index import diagonal as diagonal
    from .ops.index import trace as trace
    from .ops.index import tril as tril
    from .ops.index import triu as triu
    from .ops.index_put import index_put as index_put
    from .ops.join import chunk as chunk
    from .ops.join import concatenate as concatenate
    from .ops.join import diff as diff
    from .ops.join import hstack as hstack
    from .ops.join import kron as kron
    from .ops.join import meshgrid as meshgrid
    from .ops.join import repeat as repeat
    from .ops.join import split as split
    from .ops.join import stack as stack
    from .ops.join import tile as tile
    from .ops.join import vstack as vstack
    from .ops.linalg import inv as inv
    from .ops.linalg import lstsq as lstsq
    from .ops.linalg import matrix_power as matrix_power
    from .ops.linalg import solve as solve
    from .ops.linalg import triangular_solve as triangular_solve
    from .ops.logic import bitwise_and as bitwise_and
    from .ops.logic import bitwise_not as bitwise_not
    from .ops.logic import bitwise_or as bitwise_or
    from .ops.logic import bitwise_xor as bitwise_xor
    from .ops.logic import left_shift as left_shift
    from .ops.logic import logical_and as logical_and
    from .ops.logic import logical_not as logical_not
    from .ops.logic import logical_or as logical_or
    from .ops.logic import logical_xor as logical_xor
    from .ops.logic import right_shift as right_shift
    from .ops.loss import binary_cross_entropy_with_logits as binary_cross_entropy_with_logits
    from .ops.loss import cross_entropy as cross_entropy
    from .ops.loss import mse as mse
    from .ops.loss import nll_loss as nll_loss
    from .ops.lu import lu as lu
    from .ops.maths import allclose as allclose
    from .ops.maths import cross as cross
    from .ops.maths import exp2 as exp2
    from .ops.maths import hypot as hypot
    from .ops.maths import isclose as isclose
    from .ops.maths import lerp as lerp
    from .ops.maths import log2 as log2
    from .ops.maths import log10 as log10
    from .ops.maths import nan_to_num as nan_to_num
    from .ops.maths import reciprocal as reciprocal
    from .ops.matmuls import batched_gemm as batched_gemm
    from .ops.matmuls import gemm as gemm
    from .ops.matmuls import gemv as gemv
    from .ops.matmuls import linear as linear
    from .ops.matmuls import matmul as matmul
    from .ops.matrix_functions import matrix_exp as matrix_exp
    from .ops.matrix_functions import pinv as pinv
    from .ops.matrix_norms import norm as norm
    from .ops.matrix_norms import vector_norm as vector_norm
    from .ops.nn import elu as elu
    from .ops.nn import gelu as gelu
    from .ops.nn import leaky_relu as leaky_relu
    from .ops.nn import merge_heads as merge_heads
    from .ops.nn import residual as residual
    from .ops.nn import rotary_embedding as rotary_embedding
    from .ops.nn import silu as silu
    from .ops.nn import softplus as softplus
    from .ops.nn import split_heads as split_heads
    from .ops.nn import split_qkv as split_qkv
    from .ops.nn import swish as swish
    from .ops.norms import layernorm as layernorm
    from .ops.norms import rmsnorm as rmsnorm
    from .ops.pool import avg_pool2d as avg_pool2d
    from .ops.pool import max_pool2d as max_pool2d
    from .ops.quantiles import median as median
    from .ops.quantiles import quantile as quantile
    from .ops.random import bernoulli as bernoulli
    from .ops.random import categorical as categorical
    from .ops.random import choice as choice
    from .ops.random import dropout as dropout
    from .ops.random import fold_in as fold_in
    from .ops.random import next_key as next_key
    from .ops.random import normal as normal
    from .ops.random import permutation as permutation
    from .ops.random import randint as randint
    from .ops.random import random_bits as random_bits
    from .ops.random import uniform as uniform
    from .ops.reduce import all_ as all_
    from .ops.reduce import any_ as any_
    from .ops.reduce import argmax as argmax
    from .ops.reduce import argmin as argmin
    from .ops.reduce import cumsum as cumsum
    from .ops.reduce import max_ as max_
    from .ops.reduce import mean as mean
    from .ops.reduce import min_ as min_
    from .ops.reduce import prod as prod
    from .ops.reduce import std as std
    from .ops.reduce import sum as sum
    from .ops.reduce import var as var
    from .ops.resize import interpolate as interpolate
    from .ops.safe import layernorm_safe as layernorm_safe
    from .ops.safe import logsumexp_safe as logsumexp_safe
    from .ops.safe import rmsnorm_safe as rmsnorm_safe
    from .ops.safe import softmax_safe as softmax_safe
    from .ops.scaled import dequantize as dequantize
    from .ops.scaled import quantize as quantize
    from .ops.scatter import dynamic_slice as dynamic_slice
    from .ops.scatter import dynamic_update_slice as dynamic_update_slice
    from .ops.scatter import put_along_axis as put_along_axis
    from .ops.scatter import scatter as scatter
    from .ops.scatter import scatter_add as scatter_add
    from .ops.segments import segment_max as segment_max
    from .ops.segments import segment_mean as segment_mean
    from .ops.segments import segment_min as segment_min
    from .ops.sets import isin as isin
    from .ops.sets import nonzero as nonzero
    from .ops.sets import unique as unique
    from .ops.shape import broadcast_to as broadcast_to
    from .ops.shape import expand_dims as expand_dims
    from .ops.shape import flatten as flatten
    from .ops.shape import flip as flip
    from .ops.shape import moveaxis as moveaxis
    from .ops.shape import pad as pad
    from .ops.shape import reshape as reshape
    from .ops.shape import squeeze as squeeze
    from .ops.shape import swapaxes as swapaxes
    from .ops.shape import transpose as transpose
    from .ops.softmax import log_softmax as log_softmax
    from .ops.softmax import logsumexp as logsumexp
    from .ops.softmax import softmax as softmax
    from .ops.sort import argsort as argsort
    from .ops.sort import searchsorted as searchsorted
    from .ops.sort import sort as sort
    from .ops.sort import top_k as top_k
    from .ops.sparse import spmm as spmm
    from .ops.sparse import spmv as spmv
    from .ops.special import digamma as digamma
    from .ops.special import erfinv as erfinv
    from .ops.special import lgamma as lgamma
    from .ops.special import polygamma as polygamma
    from .ops.spectral import roll as roll
    from .ops.stop_gradient import stop_gradient as stop_gradient

    # Declared under a shorter name, or under one that leaves Python's own alone.
    abs = abs_
    divide = div
    multiply = mul
    negative = neg
    subtract = sub
    all = all_
    any = any_
    max = max_
    min = min_
