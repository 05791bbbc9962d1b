"""Examine a running job: what each rank knows, what all measure together, and what is wrong.

`facts` is what one rank knows of itself and its machine, `measurements` what all ranks measure
together, and `findings` what both mean, with cures.
"""
