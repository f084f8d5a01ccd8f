"""Text files and JSONL as batches of tokens: deterministic, sharded, resumable."""

from infinity.data.loader import TokenLoader
from infinity.data.opening import Data, open_data
from infinity.data.sequences import Batch

__all__ = ["Batch", "Data", "TokenLoader", "open_data"]
