"""What emitted kernels call: operations in PTX instructions, a file per family of ops."""
