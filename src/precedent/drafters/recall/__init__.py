"""The drafter that recalls the tenant's stored completions, weighted by the similarity of their requests.

Reads the speculation cache; does not load torch.
"""
