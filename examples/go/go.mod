module row

go 1.19

require hfpatch v0.0.0

replace hfpatch => ../../bindings/go
