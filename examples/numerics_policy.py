"""A numeric policy in a tensor's type: storage, accumulation, rounding.

    python examples/numerics_policy.py
"""

import sys

import numpy as np

import tessera as ts
from tessera import *  # noqa: F403

# ruff: noqa: F405  names of the star-import
x: Tensor["B","D", fp8_e4m3 @accum(fp32) @stochastic_round]


def main() -> None:
    kind = sys.modules[__name__].__annotations__["x"]
    print(f"type      {kind}")
    print(f"storage   {kind.dtype}, sums in {kind.policy.accum}, rounds {kind.policy.rounding}")
    ts.random.seed(0)
    # 1.03125 lies a quarter of the way from 1 to 1.125, its neighbours in fp8_e4m3.
    values = ts.cast(np.full((1000, 4), 1.03125, np.float32), kind.type)
    print(f"a value   {values.type}, {values.nbytes} bytes")
    mean = values.numpy().astype(np.float64).mean()
    print(f"mean      {mean:.4f}, because one in four was rounded up")
    print(f"sum       {ts.sum(ts.cast(values, ts.f32)).item():.1f}")


if __name__ == "__main__":
    main()
