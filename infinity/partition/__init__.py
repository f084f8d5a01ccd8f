"""A model cut into units; units fetched, gathered, prefetched, released."""
