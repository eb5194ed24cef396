"""Kernels of users and of the Hub: what is asked of them before they are used, and as they are.

`battery` asks at `apply`, `watch` at the first call of each kind; both compare with the formula, by
`compare`, on memory of `samples`. `process` and `reads` see what else a kernel touches or keeps;
`device` what it does to a GPU's streams and to the host. What all this cannot see is a list in
docs/registry-and-probe.md.
"""
