"""Benchmarks: what is compared is interleaved in one run, with the same congestion control, and given as medians."""
