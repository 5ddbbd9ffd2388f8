"""Formats, codecs, packed storage, random bits and numeric policies. NumPy only, no device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.numerics import dtypes, public
from tessera.numerics.codec import (
    decode,
    encode,
    encode_as,
    from_codes,
    to_codes,
)
from tessera.numerics.counts import CastCounts
from tessera.numerics.dtypes import all_dtypes, dtype_names, dtype_of_numpy, find_dtype
from tessera.numerics.packing import pack, row_bytes, stored_bytes, unpack
from tessera.numerics.parse import parse, parse_policy
from tessera.numerics.philox import (
    as_key,
    fold_in,
    fold_in_each,
    philox4x32,
    random_bits,
    random_bits_at,
    random_bits_of_keys,
    uniform,
)
from tessera.numerics.policy import (
    Modifier,
    ModifierKind,
    as_dtype,
    custom_policies,
    is_custom_policy,
    modifier_kinds,
)
from tessera.numerics.promote import merge_policies, weak_result
from tessera.numerics.public import *  # noqa: F403
from tessera.numerics.scaling import dequantize, nonzero_scale, quantize_amax
from tessera.numerics.table import dtype_table

__all__ = [
    *public.__all__,
    "all_dtypes",
    "as_dtype",
    "as_key",
    "CastCounts",
    "custom_policies",
    "decode",
    "dequantize",
    "dtype_names",
    "dtype_of_numpy",
    "dtype_table",
    "encode",
    "encode_as",
    "find_dtype",
    "fold_in",
    "fold_in_each",
    "from_codes",
    "is_custom_policy",
    "merge_policies",
    "Modifier",
    "modifier_kinds",
    "ModifierKind",
    "nonzero_scale",
    "pack",
    "parse",
    "parse_policy",
    "philox4x32",
    "quantize_amax",
    "random_bits",
    "random_bits_at",
    "random_bits_of_keys",
    "row_bytes",
    "stored_bytes",
    "to_codes",
    "uniform",
    "unpack",
    "weak_result",
]

if not TYPE_CHECKING:  # which shall find misspelled names

    def __getattr__(name: str) -> dtypes.DType:
        """A format that public.py does not list."""
        if (format_ := dtypes.named_dtype(name)) is not None:
            return format_
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
