module hfpatch

go 1.19
