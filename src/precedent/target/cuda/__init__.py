"""Forwards of fixed size for a GPU: CUDA graphs, split attention, Triton kernels.

Imported by the target model alone; knows nothing of CPU kernels, of loading or of several processes.
"""
