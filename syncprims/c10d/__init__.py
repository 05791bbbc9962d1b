"""``torch.distributed`` served by syncprims."""
