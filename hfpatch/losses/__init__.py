"""Losses over a linear head whose logits are never whole; `hfpatch.loss` is the way in."""
