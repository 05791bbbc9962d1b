"""Ranks of one host that meet through shared memory and file locks."""
