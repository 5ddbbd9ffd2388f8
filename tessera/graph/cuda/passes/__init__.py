"""Passes on graphs and schedules for GPUs: what a program becomes before kernels are written."""
