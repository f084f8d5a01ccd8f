"""One model's training step on this rank."""
