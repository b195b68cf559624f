"""Precedent behind SGLang: a hook in its n-gram worker. Importing it imports neither SGLang nor torch."""
