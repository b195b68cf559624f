"""What the machine is asked for: compiled loops, OpenMP threads, device memory, numbers on their way to a device.

Knows nothing of models, trees or requests; every other room may import it.
"""
