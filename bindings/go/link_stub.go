//go:build hfpatch_stub

package hfpatch

// #cgo CFLAGS: -I${SRCDIR}/../../kernel_src
// #include "../../clib/stub.c"
import "C"
