"""`cuda_graphs=`: a model's calls recorded as CUDA graphs, and for which call one is good."""
