"""Finds where the current output continues in known texts, and builds a tree of candidates from it.

Arrays in, arrays out: knows neither the cache nor a model.
"""
