"""Reading a module's code, beside running it: what the samples of a proof cannot show."""
