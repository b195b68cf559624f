"""Precedent's decode loop behind transformers' own hook: `model.generate(..., custom_generate=precedent.generate)`.

`hook` holds the function and what it returns, `refusals` what cannot be kept and is refused by name, `processors` how
processors and stopping criteria are applied to a candidate tree, `prepared` what is set up once per model, on a `twin`.
"""

from precedent.custom_generate.hook import GenerateOutput, generate

__all__ = ["GenerateOutput", "generate"]
