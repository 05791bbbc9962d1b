"""The world of this process: its place, its backend, its groups, its start and end."""
