"""ONNX: `ts.onnx.export(f, path, *args)` writes a function as a model, `import_` reads one.

    ts.onnx.export(predict, "predict.onnx", params, x)   # parameters are in the file, x is an input
    predict = ts.onnx.import_("predict.onnx")
    y = predict(x)

The package `onnx` writes, checks and reads the files; the extra `onnx` brings it.
"""

from __future__ import annotations

from .exporting import export as export
from .importing import ImportedModel as ImportedModel
from .importing import import_ as import_

__all__ = ["ImportedModel", "export", "import_"]
