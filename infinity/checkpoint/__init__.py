"""Model directories and checkpoints, in and out, by byte ranges."""
