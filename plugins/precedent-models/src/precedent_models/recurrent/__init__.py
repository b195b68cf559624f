"""Layers with a state instead of keys and values, computed over candidate trees.

Each family of recurrences is one file of plain torch: a function of the inputs of every row, of how the rows descend
from one another, and of the state before them. Adapters let transformers' own modules compute with it.
"""
