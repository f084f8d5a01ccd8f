"""Measurements side by side; each script prints ratios from one run."""
