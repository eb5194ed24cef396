//go:build !hfpatch_stub

package hfpatch

// #cgo pkg-config: hfpatch
import "C"
