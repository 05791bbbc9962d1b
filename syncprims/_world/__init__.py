"""The world of this process: its topology, its backend, its groups, its start and end."""
