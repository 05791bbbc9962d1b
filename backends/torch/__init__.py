"""Ranks of one host or several, as torchrun, SLURM or MPI start them."""
