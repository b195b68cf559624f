"""The decode loop: plan, draw, score, verify, commit and accept, for all running sequences at once.

Works on token ids alone; knows no text, no prompt and no caller.
"""
