"""Where this rank's shards live, their versions and commits, their updates."""
