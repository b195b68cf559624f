"""Precedent's decode loop behind transformers' own hook: `model.generate(..., custom_generate=precedent.generate)`.

`hook` has the function and its output class, `refusals` refuses by name what our loop cannot do, `processors` applies
processors and stopping criteria to a candidate tree, and `prepared` sets up each model once, on a `twin` of it.
"""

from precedent_generate.hook import GenerateOutput, generate

__all__ = ["GenerateOutput", "generate"]
