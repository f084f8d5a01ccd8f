"""What a recipe says: its keys, its task and model; recipes made of other tools' configurations."""
