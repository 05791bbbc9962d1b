"""Analyse the traces of a run: which rank made others wait, where and for how long.

In a running world, `observer` sees its rounds, and `trace_file` writes them down: these need no
other library. `reading` reads the traces, `analysis` attributes the waiting to ranks, and
`pictures` draws it, with numpy, and matplotlib for images.
"""
