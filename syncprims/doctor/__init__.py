"""Examine a running job: what each rank knows, what all measure together, and what is wrong.

`measurements` has the facts of each rank and what all ranks measure together; `findings` has what
they mean, with cures.
"""
