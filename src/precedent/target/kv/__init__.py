"""Keys and values: what a layer stores per token, the rows of a forward, and which of them a row may see.

It knows neither kernels nor loading.
"""
