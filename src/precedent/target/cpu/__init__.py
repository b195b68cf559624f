"""A CPU's own kernels: products, norms, attention and whole layers for a few rows, the same bits in a tree and alone.

Imported by the target model alone; knows nothing of CUDA, of loading or of several processes.
"""
