"""Worlds of tests in which ``torch.distributed`` is served; nothing else of the kit needs torch."""
