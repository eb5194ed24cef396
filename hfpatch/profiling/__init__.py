"""`hfpatch profile`: where a model's time goes, as it is and patched."""
