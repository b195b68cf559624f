"""The drafter that remembers: every stored completion of the tenant, weighted by how near its request was.

Reads the speculation cache; loads no torch.
"""
