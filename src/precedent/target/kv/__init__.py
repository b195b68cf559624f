"""Keys and values: what a layer stores of a token, the rows of a forward, and which of them a row may see.

Knows neither kernels nor how a model is loaded.
"""
