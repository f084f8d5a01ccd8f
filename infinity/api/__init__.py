"""What a training script calls."""
