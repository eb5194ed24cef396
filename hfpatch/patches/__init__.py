"""Patch families: one file each; `families.py` lists them."""
