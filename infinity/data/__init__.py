"""Text files and JSONL as batches of tokens: deterministic, sharded, resumable."""

from infinity.data.loader import Batch, Data, TokenLoader, open_data

__all__ = ["Batch", "Data", "TokenLoader", "open_data"]
