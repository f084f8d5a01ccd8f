"""Memory of this machine and its accelerators, in pools."""
