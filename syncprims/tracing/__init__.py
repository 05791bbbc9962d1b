"""Analyse the traces of a run: which rank made others wait, where and for how long.

:mod:`syncprims._protocol.trace_file` writes the traces, `reading` reads them, `analysis` attributes
the waiting to ranks, and `pictures` draws it. Needs numpy, and matplotlib for images.
"""
