"""Finding completions by meaning: the embedder, and nearest neighbours by cosine with FAISS or NumPy.

Holds nothing that the store cannot give again; may import the store and the snapshot, not what maintains a cache.
"""
