"""One target model divided among several processes (tensor parallelism): one leads, the others follow.

Imported only when `tensor_parallel=True` is asked for.
"""
