"""@ts.kernel: a function as a kernel, and what calls, schedules and inspects it."""
