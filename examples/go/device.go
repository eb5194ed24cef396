package main

// #cgo CFLAGS: -I${SRCDIR}/../c
// #cgo pkg-config: hfpatch
// #cgo LDFLAGS: -ldl
// #include "device.h"
import "C"

import (
	"errors"
	"unsafe"

	"hfpatch"
)

// useCUDA makes cuda:0 the device in use, or says why it cannot.
func useCUDA() error {
	if why := C.device_use_cuda(); why != nil {
		return errors.New(C.GoString(why))
	}
	return nil
}

func device() hfpatch.Device {
	if C.device_in_use().device_type == C.kDLCUDA {
		return hfpatch.CUDA(0)
	}
	return hfpatch.CPU
}

// array is the memory of a tensor: a slice, and on a GPU its copy there.
type array[T hfpatch.Element] struct {
	data  []T
	dtype hfpatch.DType
	there unsafe.Pointer
}

func (a *array[T]) bytes() C.size_t {
	return C.size_t(int64(len(a.data)) * a.dtype.Bits / 8)
}

// put is such a slice on the device in use.
func put[T hfpatch.Element](data []T, dtype hfpatch.DType) *array[T] {
	a := &array[T]{data: data, dtype: dtype}
	if device() != hfpatch.CPU {
		a.there = C.device_get(a.bytes() + 1)
		if len(data) > 0 {
			C.device_write(a.there, unsafe.Pointer(&data[0]), a.bytes())
		}
	}
	return a
}

func zeros(size int64) *array[float32] {
	return put(make([]float32, size), hfpatch.Float32)
}

// view is a tensor of it, after so many elements. strides: nil where it is contiguous.
func (a *array[T]) view(first int64, shape, strides []int64) *hfpatch.Tensor {
	checked, err := hfpatch.Strided(a.data[first:], a.dtype, shape, strides)
	check(err)
	if a.there == nil {
		return checked
	}
	at := unsafe.Add(a.there, first*a.dtype.Bits/8)
	return hfpatch.FromPointer(at, a.dtype, device(), shape, strides)
}

func (a *array[T]) all() *hfpatch.Tensor {
	return a.view(0, []int64{int64(len(a.data))}, nil)
}

// read is what it holds, after what was launched on the default stream.
func (a *array[T]) read() []T {
	if a.there != nil {
		C.device_read(unsafe.Pointer(&a.data[0]), a.there, a.bytes())
	}
	return a.data
}

func (a *array[T]) free() {
	if a.there != nil {
		C.device_free(a.there)
	}
}
