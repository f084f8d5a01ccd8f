"""The update: rules, the chunk pipeline that plays them beside training, gradient norm, loss scale."""
