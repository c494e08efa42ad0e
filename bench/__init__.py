"""The judge: one file per hop of an observation, each measured against the floor it cannot beat.

Knows the whole package; nothing in the package knows it.
"""
