"""Decoder layers under autograd: what a training step computes of them, in fewer kernels and with
less kept for the backward. No list of class names: see offer.py."""
