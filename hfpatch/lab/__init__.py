"""`hfpatch lab`: a kernel is made faster by evidence. Checked, profiled, one change, recorded."""
