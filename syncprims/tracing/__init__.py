"""Reading traces: who made whom wait, where and for how long. ``syncprims trace`` on the way in.

The traces were written by :mod:`syncprims._protocol.trace_file`. Reading them needs numpy; pictures
need matplotlib.
"""
