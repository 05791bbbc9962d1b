"""Reading traces: who made whom wait, where and for how long. ``syncprims trace`` on the way in.

What is read here was written by :mod:`syncprims.tracefile`. Numpy is needed, and nothing else, but
for pictures.
"""
