"""The nouns that parts of infinity share. Imports no other part and no torch, which planning goes without."""
