"""From a graph of distributed tensors to what each rank runs: layouts and collectives."""
