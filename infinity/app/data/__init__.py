"""Text files and JSONL as batches of tokens: deterministic, sharded, resumable."""

from infinity.app.data.loader import TokenLoader
from infinity.app.data.opening import Data, open_data
from infinity.app.data.sequences import Batch

__all__ = ["Batch", "Data", "TokenLoader", "open_data"]
