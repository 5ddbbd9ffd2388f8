"""Parallel forms: pipelines, ZeRO and FSDP, experts, ring attention, launches over parts."""
