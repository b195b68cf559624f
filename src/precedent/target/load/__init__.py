"""Loading target and draft models: any Hugging Face id or folder, the packaged model, trained drafts.

Makes models; how they run is the affair of `precedent.target`.
"""
