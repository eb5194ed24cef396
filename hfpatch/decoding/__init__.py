"""Decoding: a language model's step of one new token a row, run as one engine call.

`spec.py` says what a model is; `reference.py` runs that description in plain PyTorch and is what
proofs compare with; `engine.py` runs it fast.
"""
