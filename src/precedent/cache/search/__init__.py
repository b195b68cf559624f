"""Finds completions by meaning: the embedder, and nearest neighbours by cosine with FAISS or NumPy.

It holds nothing that cannot be read from the store again. May import the store and the snapshot, not `maintain`.
"""
