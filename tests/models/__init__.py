"""Eleven models as users write them, each in a module of its own, on the CPU and on GPUs alike.

    parameters(rng)             a nested value of f32 tensors
    batch(rng)                  tensors, what a step is given beside the parameters
    loss(p, *batch)             a scalar, in ops of ts
    torch_loss(torch, p, *batch)   the same in PyTorch, of tensors of its own
    RATE                        of gradient descent

training.py makes a step of them; a model whose gradients are not those of its loss has `gradients`
and `torch_gradients`.
"""
