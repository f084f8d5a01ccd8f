"""What a recipe says: its keys, the data that it names, the models that it can describe."""
