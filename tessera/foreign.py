"""What NumPy, PyTorch and JAX call the things that have another name here, for the hints of errors.

Each value is what to write instead; a word that is in no table is taken as misspelled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

ADAM = "ts.optim.AdamW(b2=0.999, weight_decay=0.0)"

# ts.jit(f, <word>=...)
_STATIC = 'static=("n",) names or numbers the arguments that are constants'
OPTIONS: Mapping[str, str] = {
    "static_argnums": _STATIC, "static_argnames": _STATIC,
    "donate_argnums": 'donate=("params",), or numbers', "donate_argnames": 'donate=("params",)',
    "device": 'target="cuda"; functions run where their arguments lie', "backend": 'target="cuda"',
    "fullgraph": "nothing: a function is one graph", "dynamic": "nothing: extents are of a call",
    "mode": "nothing: kernels are tuned by python -m tessera tune",
}

# ts.<word>
FUNCTIONS: Mapping[str, str] = {
    "asarray": "ts.tensor(data)", "as_tensor": "ts.tensor(data)",
    "from_numpy": "ts.tensor(data)", "ndarray": "ts.Tensor", "FloatTensor": "ts.tensor(data)",
    "LongTensor": 'ts.tensor(data, "int64")', "Variable": "ts.param(data)",
    "Parameter": "ts.param(data)", "empty": "ts.zeros(shape)", "empty_like": "ts.zeros_like(x)",
    "rand": "ts.random.uniform(shape)", "randn": "ts.random.normal(shape)",
    "rand_like": "ts.random.uniform(x.shape)", "randn_like": "ts.random.normal(x.shape)",
    "randperm": "ts.random.permutation(n)", "manual_seed": "ts.random.seed(n)",
    "PRNGKey": "ts.random.key(seed)", "multinomial": "ts.random.categorical(logits, shape)",
    "nn": "functions of ts: ts.layernorm, ts.gelu, ts.cross_entropy",
    "functional": "functions of ts: ts.layernorm, ts.gelu, ts.cross_entropy",
    "cat": "ts.concatenate(tensors, axis)", "concat": "ts.concatenate(tensors, axis)",
    "dstack": "ts.concatenate(tensors, 2)", "row_stack": "ts.vstack(tensors)",
    "column_stack": "ts.stack(lines, 1)", "atleast_2d": "ts.reshape(x, (1, -1))",
    "permute": "ts.transpose(x, axes)", "unsqueeze": "ts.expand_dims(x, axis)",
    "newaxis": "None as an index: x[:, None]", "nan": "math.nan", "view": "ts.reshape(x, shape)",
    "ravel": "ts.flatten(x)", "expand": "ts.broadcast_to(x, shape)",
    "mm": "ts.matmul(a, b)", "bmm": "ts.matmul(a, b)", "dot": "ts.matmul(a, b)",
    "mul": "ts.multiply(a, b)", "sub": "ts.subtract(a, b)", "div": "ts.divide(a, b)",
    "pow": "ts.power(x, exponent)", "neg": "ts.negative(x)", "eq": "ts.equal(a, b)",
    "amax": "ts.max(x, axis)", "amin": "ts.min(x, axis)", "clamp": "ts.clip(x, low, high)",
    "topk": "ts.top_k(x, k)", "index_select": "ts.take(x, ids, axis)",
    "gather": "ts.take_along_axis(x, ids, axis)", "masked_fill": "ts.where(condition, value, x)",
    "layer_norm": "ts.layernorm(x, gamma, beta)", "rms_norm": "ts.rmsnorm(x, weight)",
    "scaled_dot_product_attention": "ts.attention(q, k, v)", "mse_loss": "ts.mse(x, target)",
    "sigmoid_cross_entropy": "ts.binary_cross_entropy_with_logits(logits, target)",
    "absolute": "ts.abs(x)", "lt": "ts.less(a, b)", "le": "ts.less_equal(a, b)",
    "gt": "ts.greater(a, b)", "ge": "ts.greater_equal(a, b)", "ne": "ts.not_equal(a, b)",
    "positive": "x itself", "size": "x.size", "narrow": "x[start:stop]", "select": "x[:, i]",
    "unbind": "list(x)", "unstack": "list(x)", "repeat_interleave": "ts.repeat(x, n, axis)",
    "masked_select": "x[mask], or ts.where(mask, x, 0)", "ptp": "ts.max(x) - ts.min(x)",
    "logaddexp": "ts.logsumexp(ts.stack([a, b]), axis=0)",
    "nansum": "ts.sum(ts.where(ts.isnan(x), 0, x))",
    "fmod": "ts.remainder(a, b), with the sign of b", "vdot": "ts.sum(a * b)",
    "rot90": "ts.flip(ts.swapaxes(x, 0, 1), 0)", "heaviside": "ts.where(x < 0, 0, 1)",
    "hardtanh": "ts.clip(x, -1, 1)", "rad2deg": "x * (180 / ts.pi)", "kthvalue":
    "ts.sort(x)[..., k - 1]", "histc": "ts.histogram(x, bins, (low, high))",
    "gammaln": "ts.lgamma(x)", "loggamma": "ts.lgamma(x)", "psi": "ts.digamma(x)",
    "use_deterministic_algorithms": 'ts.determinism("strict"); by default functions are',
    "erf_inv": "ts.erfinv(x)", "compile": "ts.jit(f)", "no_grad": "ts.stop_gradient(x)",
    "detach": "ts.stop_gradient(x)", "function": "ts.jit(f)",
    "linalg": "functions of ts: ts.inv, ts.solve, ts.cholesky, ts.svd",
    "lax": "ts.scan, ts.while_loop, ts.cond",
    "SGD": "ts.optim.SGD()", "sgd": "ts.optim.SGD()", "AdamW": "ts.optim.AdamW()",
    "Adam": ADAM, "adam": ADAM,
    "adamw": "ts.optim.AdamW()", "half": "ts.f16", "double": "ts.f64", "long": "ts.int64",
    "bool": "ts.bool_",
    "switch": "ts.cond(i == 0, f, g), one in another", "linearize": "ts.jvp(f, (x,), (t,))",
    "gradient": "ts.grad(f) of a function, ts.diff(x) of samples", "vectorize": "ts.vmap(f)",
    "interp": "ts.searchsorted(xp, x), and ts.take around it", "apply_along_axis": "ts.vmap(f)",
    "convolve": "ts.conv1d(x, w), or a product of ts.rfft", "correlate": "ts.conv1d(x, w)",
    "cov": "d = x - ts.mean(x, axis=1, keepdims=True); d @ d.T / (n - 1)",
    "digitize": 'ts.searchsorted(bins, x, side="right")',
    "argwhere": "ts.stack(ts.nonzero(x), axis=-1)", "flatnonzero": "ts.nonzero(ts.flatten(x))[0]",
    "trapz": "ts.sum((y[1:] + y[:-1]) / 2 * ts.diff(x))", "betaln":
    "ts.lgamma(a) + ts.lgamma(b) - ts.lgamma(a + b)",
    "pure_callback": "outside of compiled functions: a graph calls no Python",
    "tree_map": "ts.map_tree(f, tree)", "tree": "ts.map_tree(f, tree)",
    "scatter_reduce": 'ts.put_along_axis(x, ids, values, axis, "max")',
    "solve_triangular": "ts.triangular_solve(a, b, lower=True)", "logdet": "ts.slogdet(a)[1]",
    "cdist": "ts.norm(a[:, None] - b[None], axis=-1)",
    "normalize": "x / ts.norm(x, axis=-1, keepdims=True)", "cosine_similarity":
    "ts.sum(a * b, -1) / (ts.norm(a, axis=-1) * ts.norm(b, axis=-1))",
    "binary_cross_entropy": "ts.binary_cross_entropy_with_logits(logits, target)",
    "log_sigmoid": "-ts.softplus(-x)", "logsigmoid": "-ts.softplus(-x)",
    "softmin": "ts.softmax(-x)", "softsign": "x / (1 + ts.abs(x))",
    "mish": "x * ts.tanh(ts.softplus(x))", "relu6": "ts.clip(x, 0, 6)",
    "prelu": "ts.where(x > 0, x, a * x)", "selu": "1.0507009873554805 * ts.elu(x, "
    "1.6732632423543772)", "celu": "a * ts.elu(x / a)",
    "hardsigmoid": "ts.clip(x / 6 + 0.5, 0, 1)", "hard_sigmoid": "ts.clip(x / 6 + 0.5, 0, 1)",
    "hardswish": "x * ts.clip(x / 6 + 0.5, 0, 1)", "expit": "ts.sigmoid(x)",
    "glu": "a * ts.sigmoid(b) of a, b = ts.split(x, 2, axis=-1)",
    "logit": "ts.log(p) - ts.log1p(-p)", "xlogy": "x * ts.log(ts.where(x == 0, 1, y))",
    "instance_norm": "ts.group_norm(x, x.shape[1], gamma, beta)",
    "adaptive_avg_pool2d": "ts.mean(x, axis=(2, 3), keepdims=True), for one element",
    "nanmean": "ts.mean of what is not NaN: m = ~ts.isnan(x); ts.sum(ts.where(m, x, 0)) / "
    "ts.sum(m)", "percentile": "ts.quantile(x, q / 100)",
    "average": "ts.mean(x), or ts.sum(w * x) / ts.sum(w)", "inner": "ts.sum(a * b)",
    "count_nonzero": "ts.sum(x != 0)", "custom_gradient": "ts.custom_vjp",
    "constexpr": "int, as in def k(x, B: int), or a default, B=64",
    "lstm": "a cell, under ts.scan(cell, state, xs)", "gru": "a cell, under ts.scan(cell, state, "
    "xs)", "Module": "a dict, list or dataclass that holds ts.param(data), and functions",
    "Linear": "ts.linear(x, w, b), with w = ts.param(data)",
    # hyperbolic and other elementwise ones that are written out
    **dict.fromkeys(("acosh", "arccosh"), "ts.log(x + ts.sqrt(x * x - 1))"),
    **dict.fromkeys(("asinh", "arcsinh"), "ts.log(x + ts.sqrt(x * x + 1))"),
    **dict.fromkeys(("atanh", "arctanh"), "(ts.log1p(x) - ts.log1p(-x)) / 2"),
    "tanhshrink": "x - ts.tanh(x)", "mod": "ts.remainder(a, b)",
    "fmax": "ts.maximum(a, b), where NaN stays", "fmin": "ts.minimum(a, b), where NaN stays",
    "true_divide": "ts.divide(a, b)", "sgn": "ts.sign(x)", "mv": "ts.matmul(a, x)",
    "addmm": "ts.gemm(a, b, c)", "movedim": "ts.moveaxis(x, source, destination)",
    "clone": "x itself, as no operation writes into it", "contiguous": "x itself",
    "expand_as": "ts.broadcast_to(x, y.shape)", "rearrange": "ts.reshape and ts.transpose",
    "identity": "ts.eye(n)", "tri": "ts.tril(ts.ones((n, m)))", "msort": "ts.sort(x, axis=0)",
    "triu_indices": "ts.nonzero(ts.triu(ts.ones((n, n))))",
    "tril_indices": "ts.nonzero(ts.tril(ts.ones((n, n))))",
    "bucketize": "ts.searchsorted(boundaries, x)",
    "trapezoid": "ts.sum((y[1:] + y[:-1]) / 2 * ts.diff(x))",
    "logspace": "10 ** ts.linspace(start, stop, n)", "array_equal": "ts.all(a == b)",
    "std_mean": "ts.std(x, ddof=1) and ts.mean(x)", "var_mean": "ts.var(x, ddof=1) and ts.mean(x)",
    "bce": "ts.binary_cross_entropy_with_logits(logits, target)",
    "triplet_margin_loss": "ts.mean(ts.relu(d_near - d_far + 1)) of ts.norm",
    "ctc_loss": "a ts.scan of ts.logsumexp over the labels with blanks between them",
    "gumbel_softmax": "ts.softmax((logits - ts.log(-ts.log(ts.random.uniform(shape)))) / t)",
    "grid_sample": "ts.take_along_axis of the four neighbours, weighted",
    "pixel_shuffle": "x.reshape(N, C, r, r, H, W), ts.transpose to (0, 1, 4, 2, 5, 3), a reshape",
    "max_pool1d": "ts.max_pool2d(x[:, :, None], (1, k))",
    "avg_pool1d": "ts.avg_pool2d(x[:, :, None], (1, k))",
    # complex numbers
    "complex": "ts.Complex(real, imag)", "polar": "ts.Complex(r * ts.cos(t), r * ts.sin(t))",
    "view_as_complex": "ts.Complex(x[..., 0], x[..., 1])",
    "view_as_real": "ts.stack([z.real, z.imag], axis=-1)", "real": "z.real", "imag": "z.imag",
    "conj": "z.conj()", "angle": "z.angle()",
    # programs
    "jacobian": "ts.jacrev(f), ts.jacfwd(f)", "make_jaxpr": 'ts.jit(f).inspect_ir("graph", x)',
    "eval_shape": "ts.jit(f).infer(x)", "ShapeDtypeStruct": "ts.Tensor[8, 4, ts.f32]",
    "block_until_ready": "x.numpy()", "device_put": 'ts.to(x, "cuda")',
    "checkpoint_sequential": "ts.checkpoint(f) of each part",
    **dict.fromkeys(("tree_leaves", "tree_flatten", "tree_util"), "ts.map_tree(f, tree)"),
    "save": "ts.checkpoints.save(path, tree)", "seed": "ts.random.seed(n)",
    "astype": "ts.cast(x, dtype)", "finfo": "ts.f32.max, ts.f32.eps, ts.f32.tiny",
    "iinfo": "ts.int32.max", "promote_types": "ts.result_type(a, b)",
    "clip_grad_norm_": "ts.optim.clip_by_global_norm(grads, limit)",
    "apply_updates": "optimizer.update(params, grads, state, lr)",
    "set_default_dtype": "a type where a tensor is made: ts.zeros(shape, ts.bf16)",
}

# ts.tile.<word>: what CUDA, Triton and CuTe call it
TILE: Mapping[str, str] = {
    "program_id": "ts.tile.group_id(axis)", "num_programs": "ts.tile.num_groups(axis)",
    "block_id": "ts.tile.group_id(axis)", "blockIdx": "ts.tile.group_id(axis)",
    "gridDim": "ts.tile.num_groups(axis)", "blockDim": "ts.tile.group_size()",
    "threadIdx": "ts.tile.local_id()", "thread_id": "ts.tile.local_id()",
    "thread_idx": "ts.tile.local_id()", "block_idx": "ts.tile.group_id(axis)",
    "global_id": "ts.tile.linear_id()", "grid": "ts.tile.linear_id()",
    "laneid": "ts.tile.lane_id()", "syncthreads": "ts.tile.barrier()",
    "debug_barrier": "ts.tile.barrier()", "sync": "ts.tile.barrier()",
    "syncwarp": "ts.tile.barrier()", "shared": "ts.tile.alloc_shared(shape, dtype)",
    "local": "ts.tile.alloc_register(shape, dtype)",
    "make_block_ptr": "a slice: x[m:m+64, k:k+32]", "make_tensor_descriptor":
    "a slice: x[m:m+64, k:k+32]", "advance": "a slice with another origin: x[m:m+64, k:k+32]",
    "constexpr": "a keyword-only parameter, or one annotated int", "static_range":
    "for i in tuple(range(4)), whose iterations are written out",
    "matmul": "ts.tile.dot(a, b)", "sum": "ts.tile.row_sum(t), "
    "ts.tile.col_sum(t) or ts.tile.reduce_sum(t)", "max": "ts.tile.row_max(t) or "
    "ts.tile.reduce_max(t)", "min": "ts.tile.row_min(t) or ts.tile.reduce_min(t)",
    "trans": "t.T", "permute": "t.T", "to": "ts.tile.cast(t, dtype)", "expand_dims":
    "t[:, None] or t[None, :]", "view": "ts.tile.reshape(t, shape)", "rand":
    "ts.tile.random_uniform(index, seed)", "randint": "ts.tile.random_bits(index, seed)",
    "device_print": "print(x)", "shfl_down_sync":
    "ts.tile.shuffle_down(x, delta)", "shfl_sync": "ts.tile.shuffle(x, lane)",
    "atomicAdd": "ts.tile.atomic_add(x, index, value)", "atomic_xchg":
    "ts.tile.atomic_exchange(x, index, value)", "full_like": "ts.tile.full(t.shape, value)",
    "zeros_like": "ts.tile.zeros(t.shape)", "empty": "ts.tile.zeros(shape)",
    "any": "ts.tile.reduce_max(mask)", "all": "ts.tile.reduce_min(mask)",
    "clamp": "min(max(t, low), high)", "clip": "min(max(t, low), high)",
    "softmax": "p = ts.tile.exp(t - ts.tile.row_max(t)), and p / ts.tile.row_sum(p)",
    "relu": "ts.tile.maximum(t, 0.0)", "silu": "t * ts.tile.sigmoid(t)",
    "gelu": "0.5 * t * (1.0 + ts.tile.erf(t * math.sqrt(0.5)))",
    "histogram": "ts.tile.scatter(counts, bins, 1, mode='add')",
    "associative_scan": "ts.tile.scan(t, combine, axis)", "topk": "-ts.tile.smallest(-t, k)",
    "atomicCAS": "ts.tile.atomic_cas(x, index, expected, value)",
    **dict.fromkeys(("cat", "concat", "concatenate", "hstack", "vstack", "join", "split"),
                    "a shared buffer: s[0:8] = a, s[8:16] = b, then ts.tile.barrier() and "
                    "ts.tile.load(s)"),
    "flip": "positions that count down: x[m, 63 - ts.tile.arange(64)]",
    "roll": "positions: x[m, (ts.tile.arange(64) - 1) % 64]",
    "outer": "a[:, None] * b[None, :]", "mean": "ts.tile.row_mean(t)",
    "var": "d = t - ts.tile.row_mean(t), and ts.tile.row_mean(d * d)",
    "std": "d = t - ts.tile.row_mean(t), and ts.tile.sqrt(ts.tile.row_mean(d * d))",
    "norm": "ts.tile.sqrt(ts.tile.row_sum(t * t))",
    "logsumexp": "m = ts.tile.row_max(t), and m + ts.tile.log(ts.tile.row_sum(ts.tile.exp(t - m)))",
    "prod": "ts.tile.row_prod(t) or ts.tile.reduce_prod(t)",
    "one_hot": "ts.tile.arange(C)[None, :] == at[:, None]",
    "tril": "ts.tile.where(rows >= cols, t, 0.0) of rows = ts.tile.arange(M)[:, None], "
    "cols = ts.tile.arange(N)[None, :]",
    "eye": "ts.tile.arange(N)[:, None] == ts.tile.arange(N)[None, :]",
    "square": "t * t", "sign": "ts.tile.where(t > 0, 1.0, ts.tile.where(t < 0, -1.0, 0.0))",
    "interleave": "ts.tile.reshape(ts.tile.stack((a, b)), shape)",
    "logical_and": "a & b", "logical_or": "a | b", "logical_not": "~a",
    "size": "the product of the extents, which the annotations name",
    "ravel": "ts.tile.reshape(t, (n,)) of a tile, and x[i // N, i % N] of a tensor",
    "flatten": "ts.tile.reshape(t, (n,)) of a tile, and x[i // N, i % N] of a tensor",
}

# ts.tile.<op>(<word>=): what is written instead of an argument that ops of tiles have elsewhere
_EDGES = "leave it out: a slice that goes beyond its tensor reads as 0 there, or as fill="
_ROWS = "leave it out: a tile of rank 1 is a column beside a matrix, t - ts.tile.row_max(t)"
TILE_KEYWORDS: Mapping[str, str] = {
    "mask": f"{_EDGES}; else ts.tile.where(mask, t, 0.0)", "other": f"{_EDGES}, its number",
    "boundary_check": _EDGES, "padding_option": f"{_EDGES}, its number",
    "keepdims": _ROWS, "keep_dims": _ROWS, "keepdim": _ROWS, "dim": "that is axis=",
    "allow_tf32": 'precision="tf32" or "f32"', "input_precision": 'precision="tf32" or "f32"',
    "out_dtype": "ts.tile.cast(t, dtype)", "acc": "that is accumulator=",
    "sem": "release=True", **dict.fromkeys(("eviction_policy", "cache_modifier"),
                                           "leave it out: the compiler chooses"),
}

# ts.random.<word>
RANDOM: Mapping[str, str] = {
    "multivariate_normal": "mean + ts.random.normal(shape) @ ts.cholesky(cov).T",
    "rademacher": "2 * ts.random.bernoulli(0.5, shape) - 1",
    "rand": "ts.random.uniform(shape)", "random": "ts.random.uniform(shape)",
    "random_sample": "ts.random.uniform(shape)", "randn": "ts.random.normal(shape)",
    "standard_normal": "ts.random.normal(shape)", "gaussian": "ts.random.normal(shape)",
    "randperm": "ts.random.permutation(n)", "shuffle": "ts.random.permutation(n)",
    "integers": "ts.random.randint(low, high, shape)", "PRNGKey": "ts.random.key(seed)",
    "default_rng": "ts.random.philox(seed)", "Generator": "ts.random.philox(seed)",
    "manual_seed": "ts.random.seed(n)", "multinomial": "ts.random.categorical(logits, shape)",
    "bits": "ts.random.random_bits(shape)", "binomial": "ts.random.bernoulli(p, shape)",
    "exponential": "-ts.log(1 - ts.random.uniform(shape))",
    "gumbel": "-ts.log(-ts.log(ts.random.uniform(shape))), or ts.random.categorical(logits)",
    "truncated_normal": "ts.clip(ts.random.normal(shape), low, high)",
    "get_rng_state": "ts.random.get_state()", "set_rng_state": "ts.random.set_state(state)",
}

# ts.optim.<word>
OPTIM: Mapping[str, str] = {
    "Adam": ADAM, "adam": ADAM,
    "adamw": "ts.optim.AdamW()", "sgd": "ts.optim.SGD()", "Momentum": "ts.optim.SGD(momentum=0.9)",
    "PagedAdamW": "ts.optim.paged(ts.optim.AdamW())",
    "lion": "ts.optim.Lion()", "adafactor": "ts.optim.Adafactor()", "muon": "ts.optim.Muon()",
    "clip_grad_norm_": "ts.optim.clip_by_global_norm(grads, limit)",
    "clip_grad_norm": "ts.optim.clip_by_global_norm(grads, limit)",
    "cosine_decay_schedule": "ts.optim.CosineSchedule(peak, steps, warmup)",
    "warmup_cosine_decay_schedule": "ts.optim.CosineSchedule(peak, steps, warmup)",
    "CosineAnnealingLR": "ts.optim.CosineSchedule(peak, steps, warmup)",
    "lr_scheduler": "ts.optim.CosineSchedule(peak, steps, warmup)",
    "apply_updates": "optimizer.update(params, grads, state, lr)",
    "RMSprop": "ts.optim.AdamW(b1=0.0, b2=0.99, weight_decay=0.0), which corrects the bias too",
    "clip_grad_value_": "ts.map_tree(lambda g: ts.clip(g, -limit, limit), grads)",
    "ema": "ts.map_tree(lambda a, p: d * a + (1 - d) * p, average, params)",
    "EMA": "ts.map_tree(lambda a, p: d * a + (1 - d) * p, average, params)",
    **dict.fromkeys(("StepLR", "ExponentialLR", "LinearLR", "OneCycleLR", "LinearSchedule"),
                    "a function of the step: the rate is an argument of optimizer.update"),
}

# x.<word> of a tensor
METHODS: Mapping[str, str] = {
    "type_as": "ts.cast_like(x, like)", "float": "x.astype(ts.f32)",
    "half": "x.astype(ts.f16)", "double": "x.astype(ts.f64)", "long": "x.astype(ts.int64)",
    "bfloat16": "x.astype(ts.bf16)", "int": "x.astype(ts.int32)", "bool": "x.astype(ts.bool_)",
    "detach": "ts.stop_gradient(x)", "clone": "x.copy()",
    "requires_grad": "ts.param(data), and ts.grad(f)",
    "requires_grad_": "ts.param(data), and ts.grad(f)",
    "grad": "ts.grad(f)(x)", "backward": "ts.grad(f)(x)", "block_until_ready": "x.numpy()",
    "permute": "x.transpose(axes)", "t": "x.T", "view": "x.reshape(shape)",
    "ravel": "x.flatten()", "unsqueeze": "x.expand_dims(axis)",
    "expand": "ts.broadcast_to(x, shape)", "mm": "x @ y", "bmm": "x @ y", "dot": "x @ y",
    "add": "x + y", "mul": "x * y", "sub": "x - y", "div": "x / y", "pow": "x ** y",
    "add_": "x = x + y", "mul_": "x = x * y", "sub_": "x = x - y", "zero_": "ts.zeros_like(x)",
    "fill_": "ts.full_like(x, value)", "clamp": "x.clip(low, high)", "amax": "x.max(axis)",
    "amin": "x.min(axis)", "numel": "x.size", "dim": "x.ndim",
    "at": "ts.index_put(x, index, values)",
    "scatter_reduce": 'ts.put_along_axis(x, ids, values, axis, "max")',
    "masked_fill": "ts.where(condition, value, x)", "topk": "ts.top_k(x, k)",
    "gather": "ts.take_along_axis(x, ids, axis)", "itemsize": "x.dtype.bits // 8",
    **dict.fromkeys(("local", "parts"), "of a distributed tensor, and outside of ts.jit: inside "
                    "tensors are whole, and ts.shard(x, spec) says how one lies"),
    "mesh": "x.layout.mesh, of a distributed tensor",
}

# ts.dist.<word>, and ts.<word> where FUNCTIONS has none
DIST: Mapping[str, str] = {
    "PartitionSpec": 'ts.ShardSpec(("row",), ("dp",)): dimensions, then the axes that split them',
    "NamedSharding": 'ts.ShardSpec(("row",), ("dp",)), and mesh= where a tensor is made',
    "Shard": 'ts.ShardSpec((0,), ("dp",)): dimensions, then the axes that split them',
    "Replicate": "ts.ShardSpec(replicate=True), or None", "Partial": 'ts.ShardSpec(reduce="sum")',
    "DTensor": "ts.dist.tensor(shape, spec, mesh)",
    "distribute_tensor": "ts.dist.distribute(x, spec, mesh=mesh)",
    "make_array_from_process_local_data": "ts.dist.from_local(part, spec, mesh)",
    "make_array_from_single_device_arrays": "ts.dist.from_local(parts, spec, mesh)",
    "make_array_from_callback": "ts.dist.tensor(shape, spec, mesh, init=f)",
    "redistribute": "ts.shard(x, spec)", "with_sharding_constraint": "ts.shard(x, spec)",
    "device_put": "ts.dist.distribute(x, spec, mesh=mesh)",
    "DeviceMesh": 'ts.dist.mesh(axes=("dp", "tp"), shape=(4, 2))',
    "init_device_mesh": 'ts.dist.mesh(axes=("dp", "tp"), shape=(4, 2))',
    "make_mesh": 'ts.dist.mesh(axes=("dp", "tp"), shape=(4, 2))',
    "init_process_group": "nothing: the first use of ts.dist starts it",
    "destroy_process_group": "nothing: a program that ends leaves it",
    "new_group": "mesh.sub(pp=0), a part of a mesh", "get_rank": "ts.dist.rank()",
    "process_index": "ts.dist.rank()", "get_world_size": "ts.dist.world_size()",
    "process_count": "ts.dist.world_size()", "device_count": "ts.dist.world_size()",
    "psum": "ts.all_reduce(x, axis)", "pmean": 'ts.all_reduce(x, axis, op="mean")',
    "pmax": 'ts.all_reduce(x, axis, op="max")', "ppermute": "ts.dist.permute(x, axis, pairs=)",
    "axis_index": "ts.dist.rank() and mesh.coords", "allreduce": "ts.all_reduce(x, axis)",
    "all_gather_into_tensor": "ts.all_gather(x, axis, dim=0)",
    "reduce_scatter_tensor": "ts.reduce_scatter(x, axis, dim=0)",
    "broadcast_object_list": "ts.dist.share(message)",
    "shard_map": "a function of each rank's own tensors, which calls ts.all_reduce(x, axis)",
    "pjit": "ts.jit, of distributed tensors", "fully_shard": "ts.dist.fsdp(params)",
    "FullyShardedDataParallel": "ts.dist.fsdp(params)",
    "DistributedDataParallel": "ts.jit(step) with the batch split, ts.ShardSpec((0,), (\"dp\",))",
    "ZeroRedundancyOptimizer": "ts.dist.zero(optimizer, stage)",
}

# f(<word>=): the names it may have here; the first that the function has is meant.
KEYWORDS: Mapping[str, Sequence[str]] = {
    "dim": ("axis", "axes"), "dims": ("axes", "axis"), "axes": ("axis",), "axis": ("axes",),
    "keepdim": ("keepdims",), "keep_dims": ("keepdims",), "input": ("x", "q", "logits"),
    "other": ("b",), "y": ("b",), "x1": ("a",), "x2": ("b",), "size": ("shape",),
    "newshape": ("shape",), "type": ("dtype",), "p": ("ord",), "start_dim": ("start",),
    "end_dim": ("end",), "stop_dim": ("end",), "rate": ("p",),
    "prob": ("p",), "correction": ("ddof",), "unbiased": ("ddof",), "epsilon": ("eps",),
    "weight": ("gamma", "w"), "bias": ("beta",), "normalized_shape": ("gamma",),
    "a_min": ("low",), "a_max": ("high",), "min": ("low",), "max": ("high",),
    "minval": ("low",), "maxval": ("high",), "loc": ("mean",), "index": ("ids",),
    "indices": ("ids",), "indices_or_sections": ("sections",),
    "split_size_or_sections": ("sections",), "kernel_size": ("window",),
    "is_causal": ("causal",), "attn_mask": ("mask",),
    "dropout_p": ("dropout",), "query": ("q",), "value": ("v", "x"), "approximate": ("exact",),
    "negative_slope": ("slope",), "fill_value": ("value",), "minlength": ("length",),
    "train": ("training",),
    "deterministic": ("training",), "rng": ("key",), "seed": ("key",),
}


def instead(word: str, words: Mapping[str, str], known: Collection[str]) -> str | None:
    """The hint for a name that does not exist: its name here, else a near one, else None."""
    if word in words:
        return f"here that is {words[word]}"
    near = _nearest(word, known)
    return f"did you mean {near!r}?" if near else None


def keyword_instead(word: str, parameters: Collection[str]) -> str | None:
    """`axis=` for `dim=` of another library, or for a misspelled one; None when nothing fits."""
    for name in KEYWORDS.get(word, ()):
        if name in parameters:
            return name
    return _nearest(word, parameters)


def _nearest(word: str, known: Collection[str]) -> str | None:
    import difflib  # only a mistake pays for it

    near = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return near[0] if near else None
