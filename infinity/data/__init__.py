"""Training data: files of many kinds as batches of tokens, deterministic, sharded and resumable."""
