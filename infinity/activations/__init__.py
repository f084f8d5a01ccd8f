"""Saved tensors: kept, stored or recomputed; the profiler that measures them."""
