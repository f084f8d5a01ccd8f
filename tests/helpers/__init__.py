"""What the tests share: starting ranks, the plain reference loop, tiny models."""
