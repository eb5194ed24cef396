"""Whole blocks of any model, fused by what their code computes: captured, rewritten, proven."""
