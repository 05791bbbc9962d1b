"""Training programs that a machine writes, and the oracles that judge them."""
