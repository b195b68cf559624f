"""Where the live text continues in known texts, and the tree of candidates that follows from it.

Arrays in, arrays out: knows neither the cache nor a model.
"""
