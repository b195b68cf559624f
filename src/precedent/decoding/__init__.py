"""The decode loop: plan, draw, score, verify, commit, accept, for all running sequences at once.

Knows no text, no prompt and no caller: token ids in, token ids out.
"""
