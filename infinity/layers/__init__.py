"""Ways to run a model's layers in less memory, or with fewer reads."""
