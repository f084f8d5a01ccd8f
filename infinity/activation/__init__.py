"""Saved activations: which storage they are, where they wait for backward, and what is computed again."""
