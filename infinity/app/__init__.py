"""Programs behind the command line: train, plan, rok; recipes, data, models."""
