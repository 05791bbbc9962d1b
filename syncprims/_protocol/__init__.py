"""Rounds at one board: waiting, failures, and the diagnosis of a round that does not complete."""
