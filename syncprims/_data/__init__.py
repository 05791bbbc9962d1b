"""Values between ranks: objects, arrays, and the transports that carry them."""
