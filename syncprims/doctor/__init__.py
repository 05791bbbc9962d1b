"""What is measured in a running job, and what it means.

`facts` is what a rank knows of itself, `measures` what all find out together, `verdicts` what both
mean and what to do about it, `report` how a person reads it.
"""

from __future__ import annotations
