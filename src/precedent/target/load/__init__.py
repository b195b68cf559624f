"""Loads target and draft models: any Hugging Face id or folder, the packaged model, trained drafts.

It only creates models; `precedent.target` runs them.
"""
