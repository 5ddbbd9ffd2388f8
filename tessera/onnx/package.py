"""The onnx package, which is needed by these two functions alone."""

from __future__ import annotations

from typing import Any

from ..errors import BundleError


def onnx_package() -> Any:
    """The package with its parts. Raises BundleError where it is not installed."""
    try:
        import onnx
        import onnx.inliner
        import onnx.reference
    except ImportError as err:
        raise BundleError("ONNX files need the onnx package, which is not installed",
                          hint="pip install onnx") from err
    return onnx
