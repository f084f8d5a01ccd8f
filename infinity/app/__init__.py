"""Programs behind the command line: train, runs, plan, rok; recipes, data, models."""
