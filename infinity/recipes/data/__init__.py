"""Training data: text files and JSONL as batches of tokens, deterministic, sharded and resumable."""
