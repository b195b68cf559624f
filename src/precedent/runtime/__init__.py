"""Access to the machine: compiled loops, threads, processes, device memory, copies to a device.

Knows nothing of models, trees or requests; every other package may import it.
"""
