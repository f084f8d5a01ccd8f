"""The nouns that cross a boundary: what the parts of infinity say to each other.

Nothing here imports another part, and nothing here imports torch: the planner and the
simulator read these nouns on machines without it.
"""
