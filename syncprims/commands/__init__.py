"""The commands of ``syncprims``: one module each, and what they share.

Every command's module has ``add_parser(commands)``, which describes it and says what runs it.
"""

from __future__ import annotations
