"""Worlds of tests in which ``torch.distributed`` is served; all other worlds need no torch."""
