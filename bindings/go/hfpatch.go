// Package hfpatch calls libhfpatch: fused CPU and CUDA kernels for neural networks.
//
// A function of the C interface has its name without hfp_: hfp_rms_norm is RmsNorm. Results come
// first, as in C; nil is NULL. The library validates every call before it computes, and an error
// names the argument.
//
// pkg-config must find the library (PKG_CONFIG_PATH); with the build tag hfpatch_stub the stub is
// compiled instead, whose functions all answer NotAvailable.
package hfpatch

// #include "interface.h"
import "C"

import (
	"fmt"
	"unsafe"
)

// Error says why a call failed; nothing was written.
type Error struct {
	// Status is below 0: NotAvailable, InvalidArgument, LaunchFailed or OutOfMemory.
	Status int
	// Message names the argument, what was expected and what came.
	Message string
}

func (e *Error) Error() string { return e.Message }

// Stream is a cudaStream_t or CUstream; nil is the default one. It means nothing on the CPU.
type Stream unsafe.Pointer

// DType is the type of a tensor's elements, by DLPack's type code and its bits.
type DType struct{ Code, Bits int64 }

// Dtypes that the kernels take; Int64 is that of indices.
var (
	Float32  = DType{2, 32}
	Float16  = DType{2, 16}
	Bfloat16 = DType{4, 16}
	Int64    = DType{0, 64}
)

// Device is where memory is.
type Device struct{ Type, ID int64 }

// CPU is the host.
var CPU = Device{1, 0}

// CUDA is the GPU of that number.
func CUDA(id int64) Device { return Device{2, id} }

// Tensor is a view of memory that is not owned: of Go's, or of C's or a GPU's (FromPointer).
type Tensor struct {
	data unsafe.Pointer
	// What C reads beside the data, see interface.h.
	meta []int64
	// Whether the memory is Go's: then it cannot be in a list.
	goes bool
	free func()
}

func newTensor(data unsafe.Pointer, dtype DType, device Device, shape, strides []int64) *Tensor {
	if strides == nil {
		strides = make([]int64, len(shape))
		step := int64(1)
		for i := len(shape) - 1; i >= 0; i-- {
			strides[i] = step
			if shape[i] > 1 {
				step *= shape[i]
			}
		}
	}
	meta := []int64{device.Type, device.ID, dtype.Code, dtype.Bits, int64(len(shape))}
	meta = append(append(meta, shape...), strides...)
	return &Tensor{data: data, meta: meta}
}

// reach is how many elements a view needs, or an error.
func reach(have int, shape, strides []int64) error {
	refused := func(why string) error {
		text := fmt.Sprintf("a view of %d elements with shape %v", have, shape)
		if strides != nil {
			text += fmt.Sprintf(" and strides %v", strides)
		}
		return &Error{InvalidArgument, text + ": " + why}
	}
	if strides != nil && len(strides) != len(shape) {
		return refused("expected as many strides as dimensions")
	}
	empty := false
	for _, size := range shape {
		if size < 0 {
			return refused("expected sizes >= 0")
		}
		empty = empty || size == 0
	}
	if empty {
		return nil
	}
	last, step := int64(0), int64(1)
	for i := len(shape) - 1; i >= 0; i-- {
		by := step
		if strides != nil {
			by = strides[i]
		}
		if by < 0 {
			return refused("expected strides >= 0")
		}
		if shape[i] > 1 {
			// Neither product overflows: by and shape[i] - 1 are checked against what is left.
			if by > 0 && shape[i]-1 > (int64(have)-last)/by {
				return refused("expected it to stay within them")
			}
			last += (shape[i] - 1) * by
			if strides == nil {
				step *= shape[i]
			}
		}
	}
	if last >= int64(have) {
		return refused("expected it to stay within them")
	}
	return nil
}

// Element is what a tensor of Go's memory may hold; uint16 are the bits of a half or a bfloat16.
type Element interface{ float32 | int64 | uint16 }

// New is a contiguous tensor in memory of Go. dtype says what 16 bits mean; it must be that of T.
func New[T Element](data []T, dtype DType, shape ...int64) (*Tensor, error) {
	return Strided(data, dtype, shape, nil)
}

// Strided is one whose strides, in elements, are given; nil: contiguous.
func Strided[T Element](data []T, dtype DType, shape, strides []int64) (*Tensor, error) {
	var zero T
	right := false
	switch any(zero).(type) {
	case float32:
		right = dtype == Float32
	case int64:
		right = dtype == Int64
	case uint16:
		right = dtype == Float16 || dtype == Bfloat16
	}
	if !right {
		return nil, &Error{InvalidArgument, fmt.Sprintf("expected a dtype of %T, got %v", zero, dtype)}
	}
	if err := reach(len(data), shape, strides); err != nil {
		return nil, err
	}
	var pointer unsafe.Pointer
	if len(data) > 0 {
		pointer = unsafe.Pointer(&data[0])
	}
	t := newTensor(pointer, dtype, CPU, shape, strides)
	t.goes = true
	return t, nil
}

// FromPointer is a tensor of memory that is not Go's, such as a GPU's, which must be there as far as
// the view reaches until the work is done. strides: in elements; nil: contiguous.
func FromPointer(data unsafe.Pointer, dtype DType, device Device, shape, strides []int64) *Tensor {
	return newTensor(data, dtype, device, shape, strides)
}

// Alloc is a contiguous tensor of zeros in memory of C, which Free gives back: for lists.
func Alloc(dtype DType, shape ...int64) *Tensor {
	count := int64(1)
	for _, size := range shape {
		count *= size
	}
	bytes := count * dtype.Bits / 8
	if bytes < 1 {
		bytes = 1
	}
	data := C.calloc(1, C.size_t(bytes))
	t := newTensor(data, dtype, CPU, shape, nil)
	t.free = func() { C.free(data) }
	return t
}

// Free gives the memory of Alloc back.
func (t *Tensor) Free() {
	if t.free != nil {
		t.free()
		t.free, t.data = nil, nil
	}
}

// Pointer is the address of the first element.
func (t *Tensor) Pointer() unsafe.Pointer { return t.data }

func (t *Tensor) view() *C.int64_t {
	if t == nil {
		return nil
	}
	return (*C.int64_t)(unsafe.Pointer(&t.meta[0]))
}

func (t *Tensor) pointer() unsafe.Pointer {
	if t == nil {
		return nil
	}
	return t.data
}

// list is a HfpTensorList in memory of C.
type list struct {
	c      *C.HfpTensorList
	memory []unsafe.Pointer
}

func (l *list) alloc(bytes uintptr) unsafe.Pointer {
	found := C.calloc(1, C.size_t(bytes))
	l.memory = append(l.memory, found)
	return found
}

func newList(name string, tensors []*Tensor) (*list, error) {
	for i, t := range tensors {
		if t != nil && t.goes {
			return nil, &Error{InvalidArgument, fmt.Sprintf(
				"`%s[%d]` must be in memory of C, got Go's; use Alloc or FromPointer", name, i)}
		}
	}
	l := &list{}
	l.c = (*C.HfpTensorList)(l.alloc(unsafe.Sizeof(C.HfpTensorList{})))
	l.c.count = C.int64_t(len(tensors))
	if len(tensors) == 0 {
		return l, nil
	}
	pointers := l.alloc(uintptr(len(tensors)) * unsafe.Sizeof(uintptr(0)))
	l.c.tensors = (**C.DLTensor)(pointers)
	for i, t := range tensors {
		if t == nil {
			continue
		}
		tensor := (*C.DLTensor)(l.alloc(unsafe.Sizeof(C.DLTensor{})))
		meta := l.alloc(uintptr(len(t.meta)) * 8)
		copy(unsafe.Slice((*int64)(meta), len(t.meta)), t.meta)
		C.hfp_go_tensor(tensor, (*C.int64_t)(meta), t.data)
		unsafe.Slice((**C.DLTensor)(pointers), len(tensors))[i] = tensor
	}
	return l, nil
}

func (l *list) free() {
	for _, pointer := range l.memory {
		C.free(pointer)
	}
}

// message is where C writes that of a failed call.
type message [C.HFP_GO_MESSAGE]byte

func (m *message) c() *C.char { return (*C.char)(unsafe.Pointer(m)) }

func (m *message) check(status C.int32_t) error {
	if status == 0 {
		return nil
	}
	return &Error{int(status), C.GoString(m.c())}
}

func (m *message) checkSize(found C.int64_t) error {
	if found >= 0 {
		return nil
	}
	return m.check(C.int32_t(found))
}

// AbiVersionOfLibrary is that of the linked library; AbiVersion is that of this package.
func AbiVersionOfLibrary() int { return int(C.hfp_abi_version()) }

// BuildInfo says what the linked library was built for, as JSON.
func BuildInfo() string { return C.GoString(C.hfp_build_info()) }
