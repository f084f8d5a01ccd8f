"""Programs behind the command line: train, runs, plan; recipes, data, models."""
