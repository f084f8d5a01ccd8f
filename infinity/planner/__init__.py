"""Plan activations from a profile: keep, store or recompute each of them. Pure, without torch."""
