"""Programs behind the command line: train, runs, export."""
