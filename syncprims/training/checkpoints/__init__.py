"""Checkpoints: saved atomically, without pickle, resumed bit for bit."""
