"""The proofs of single modules: which formula it computes, and whether a kernel computes it too."""
