"""Ranks: rendezvous, collectives, failures of peers."""
