"""Data loaders: batches dealt to ranks, in an order that can be resumed."""
