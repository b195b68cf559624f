"""Finding completions by meaning: the embedder, and nearest neighbours by cosine with FAISS or NumPy.

An index holds nothing of its own: the store can rebuild it at any time.
"""
