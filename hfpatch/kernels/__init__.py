"""Where kernels come from: what the user chose, what is on this machine, what others replaced."""
