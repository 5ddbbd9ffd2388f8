"""Training steps beside torch.compile's: the same models, weights and data, in turn in one run."""
