"""Update rules and their CPU loops, gradient norm, loss scale."""
