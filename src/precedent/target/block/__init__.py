"""Block drafts: models that fill several positions in one forward, from what the target saw of the text before.

The shape is DFlash's (2602.06036): outputs of chosen layers of the target, fused, are the keys and values of every
layer of the draft; its rows are the last token and masks, which all see each other. A low-rank term corrects
neighbours and a number per position says how sure the draft is (DSpark, 2607.05147).
"""
