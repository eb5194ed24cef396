"""Whole transformer blocks: one file per model family."""
