"""Forwards of fixed size for a GPU: CUDA graphs, split attention, Triton kernels.

Only the target model imports this package; it does not know CPU kernels, loading or parallel processes.
"""
