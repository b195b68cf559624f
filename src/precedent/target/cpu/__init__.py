"""CPU kernels for few rows: products, norms, attention and whole layers, bit-identical in a tree and alone.

Only the target model imports this package; it does not know CUDA, loading or parallel processes.
"""
