package hfpatch

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"os"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"unsafe"
)

// vector is one case of the file that HFPATCH_VECTORS names (tests/clib/vectors.py).
type vector struct {
	name, function, message string
	status                  int
	memory                  [][]uint64 // of 64 bits, so that every dtype is aligned
	tensors                 []*Tensor
	of                      []int   // the memory of each tensor
	offsets                 []int64 // where in it the tensor begins, in bytes
	values                  []any
	expected                []expectation
	allocated               []*Tensor
}

type expectation struct {
	tensor    int
	tolerance float64
	values    []byte
}

func integers(text string) []int64 {
	found := []int64{}
	for _, part := range strings.Fields(text) {
		value, err := strconv.ParseInt(part, 10, 64)
		if err != nil {
			panic(err)
		}
		found = append(found, value)
	}
	return found
}

func bytesOf(text string) []byte {
	found, err := hex.DecodeString(strings.TrimLeft(text, "-"))
	if err != nil {
		panic(err)
	}
	return found
}

func floatOf(text string) float64 {
	return math.Float64frombits(binary.BigEndian.Uint64(bytesOf(text)))
}

func (v *vector) view(memory int, dtype DType, parts []string) {
	sizes := integers(parts[0])[1:]
	offset := integers(parts[2])[0] * dtype.Bits / 8
	data := unsafe.Add(unsafe.Pointer(&v.memory[memory][0]), offset)
	tensor := newTensor(data, dtype, CPU, sizes, integers(parts[1]))
	tensor.goes = true
	v.tensors = append(v.tensors, tensor)
	v.of = append(v.of, memory)
	v.offsets = append(v.offsets, offset)
}

// inC is a tensor's copy in memory of C, for a list.
func (v *vector) inC(index int) *Tensor {
	of := v.memory[v.of[index]]
	data := Alloc(Int64, int64(len(of)))
	copy(unsafe.Slice((*uint64)(data.data), len(of)), of)
	v.memory[v.of[index]] = unsafe.Slice((*uint64)(data.data), len(of))
	v.allocated = append(v.allocated, data)
	tensor := *v.tensors[index]
	tensor.data, tensor.goes = unsafe.Add(data.data, v.offsets[index]), false
	return &tensor
}

func (v *vector) line(word, rest string) {
	switch word {
	case "function":
		v.function = rest
	case "tensor":
		parts := strings.Split(rest, " | ")
		head := integers(parts[0])
		data := make([]byte, head[3])
		if parts[4] != "zeros" {
			copy(data, bytesOf(parts[4]))
		}
		memory := make([]uint64, len(data)/8+1)
		copy(unsafe.Slice((*byte)(unsafe.Pointer(&memory[0])), len(memory)*8), data)
		v.memory = append(v.memory, memory)
		v.view(len(v.memory)-1, DType{head[1], head[2]}, parts[1:])
	case "view":
		parts := strings.Split(rest, " | ")
		of := integers(parts[0])[1]
		meta := v.tensors[of].meta
		v.view(v.of[of], DType{meta[2], meta[3]}, parts[1:])
	case "host": // all are
	case "address":
		numbers := integers(rest)
		table := v.memory[v.of[numbers[0]]]
		table[numbers[1]] = uint64(uintptr(v.inC(int(numbers[2])).data))
	case "null":
		v.values = append(v.values, (*Tensor)(nil))
	case "float":
		v.values = append(v.values, floatOf(rest))
	case "int":
		v.values = append(v.values, integers(rest)[0])
	case "use":
		v.values = append(v.values, v.tensors[integers(rest)[0]])
	case "list":
		list := []*Tensor{}
		for _, index := range integers(rest) {
			if index < 0 {
				list = append(list, nil)
			} else {
				list = append(list, v.inC(int(index)))
			}
		}
		v.values = append(v.values, list)
	case "status":
		v.status = int(integers(rest)[0])
	case "message":
		v.message = rest
	case "expect":
		parts := strings.Split(rest, " ")
		e := expectation{int(integers(parts[0])[0]), floatOf(parts[1]), bytesOf(parts[2])}
		v.expected = append(v.expected, e)
	default:
		panic("no line begins with " + word)
	}
}

func half(bits uint16) float64 {
	exponent, fraction := int(bits>>10&31), float64(bits&1023)
	found := math.Ldexp(1024+fraction, exponent-25)
	if exponent == 0 {
		found = math.Ldexp(fraction, -24)
	} else if exponent == 31 && fraction == 0 {
		found = math.Inf(1)
	} else if exponent == 31 {
		found = math.NaN()
	}
	if bits>>15 == 1 {
		return -found
	}
	return found
}

func (v *vector) element(tensor, i int) float64 {
	at := unsafe.Pointer(&v.memory[v.of[tensor]][0])
	meta := v.tensors[tensor].meta
	switch (DType{meta[2], meta[3]}) {
	case Float32:
		return float64(*(*float32)(unsafe.Add(at, 4*i)))
	case Int64:
		return float64(*(*int64)(unsafe.Add(at, 8*i)))
	case Float16:
		return half(*(*uint16)(unsafe.Add(at, 2*i)))
	case DType{1, 8}:
		return float64(*(*uint8)(unsafe.Add(at, i)))
	case Bfloat16:
		return float64(math.Float32frombits(uint32(*(*uint16)(unsafe.Add(at, 2*i))) << 16))
	}
	panic(fmt.Sprint(meta))
}

// call is the function with the arguments, and the default stream.
func (v *vector) call() (int, string) {
	inside := []reflect.Value{}
	for _, value := range v.values {
		inside = append(inside, reflect.ValueOf(value))
	}
	inside = append(inside, reflect.ValueOf(Stream(nil)))
	done := reflect.ValueOf(functions[v.function]).Call(inside)[0].Interface()
	if done == nil {
		return 0, ""
	}
	failed := done.(*Error)
	return failed.Status, failed.Message
}

func (v *vector) wrong(stub bool) string {
	status, said := v.call()
	if stub {
		right := v.function + ": this is the stub of libhfpatch, "
		if status == NotAvailable && strings.HasPrefix(said, right) {
			return ""
		}
		return fmt.Sprint(status, said)
	}
	if status != v.status || said != v.message {
		return fmt.Sprintf("expected %d `%s`, got %d `%s`", v.status, v.message, status, said)
	}
	for _, e := range v.expected {
		for i := 0; i < len(e.values)/8; i++ {
			right := math.Float64frombits(binary.BigEndian.Uint64(e.values[8*i:]))
			value := v.element(e.tensor, i)
			both := math.IsNaN(value) && math.IsNaN(right)
			if !both && value != right && !(math.Abs(value-right) <= e.tolerance) {
				return fmt.Sprintf("tensor %d[%d]: expected %v, got %v", e.tensor, i, right, value)
			}
		}
	}
	return ""
}

func TestVectors(t *testing.T) {
	path := os.Getenv("HFPATCH_VECTORS")
	if path == "" {
		t.Skip("HFPATCH_VECTORS is not set: nothing to go through")
	}
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<24)
	stub := os.Getenv("HFPATCH_VECTORS_STUB") == "1"
	count, failed := 0, 0
	v := &vector{}
	for lines.Scan() {
		word, rest, _ := strings.Cut(lines.Text(), " ")
		switch word {
		case "case":
			v = &vector{name: rest}
		case "end":
			count++
			if why := v.wrong(stub); why != "" {
				failed++
				t.Errorf("FAIL %s: %s", v.name, why)
			}
			for _, tensor := range v.allocated {
				tensor.Free()
			}
		default:
			v.line(word, rest)
		}
	}
	if lines.Err() != nil || count == 0 {
		t.Fatal("no cases", lines.Err())
	}
	t.Logf("%d cases, %d failed", count, failed)
}

func TestAViewStaysWithinItsMemory(t *testing.T) {
	data := make([]float32, 6)
	for _, shape := range [][]int64{{2, 3}, {0, 9}, {6}} {
		if _, err := New(data, Float32, shape...); err != nil {
			t.Error(err)
		}
	}
	large := int64(math.MaxInt64)
	for _, shape := range [][]int64{{2, 4}, {7}, {-1}, {large, large, large}, {large}} {
		if _, err := New(data, Float32, shape...); err == nil {
			t.Error(shape)
		}
	}
	_, err := New(data, Float32, 2, 4)
	right := "a view of 6 elements with shape [2 4]: expected it to stay within them"
	if err.Error() != right {
		t.Error(err)
	}
	for _, strides := range [][]int64{{5, 1}, {-1, 1}, {1}, {large, 1}} {
		if _, err := Strided(data, Float32, []int64{2, 2}, strides); err == nil {
			t.Error(strides)
		}
	}
	if _, err := Strided(data, Float32, []int64{2, 2}, []int64{4, 1}); err != nil {
		t.Error(err)
	}
	if _, err := New(data, Float16, 6); err == nil {
		t.Error("a dtype of another size")
	}
	if _, err := New([]float32{}, Float32); err == nil {
		t.Error("one element of none")
	}
}

func TestAListMustBeInMemoryOfC(t *testing.T) {
	tensor, _ := New(make([]float32, 2), Float32, 2)
	err := ScaleGrads([]*Tensor{tensor}, tensor, nil)
	if err == nil || !strings.HasPrefix(err.Error(), "`grads[0]` must be in memory of C") {
		t.Error(err)
	}
}

func TestSizes(t *testing.T) {
	rows, err := PartialRows(4, 64)
	if os.Getenv("HFPATCH_VECTORS_STUB") == "1" {
		right := "hfp_partial_rows: this is the stub of libhfpatch, "
		if err == nil || !strings.HasPrefix(err.Error(), right) {
			t.Error(rows, err)
		}
	} else if rows < 0 || err != nil {
		t.Error(rows, err)
	}
}

func TestTheLibraryIsOfThePackagesVersion(t *testing.T) {
	if AbiVersionOfLibrary() != AbiVersion {
		t.Error(AbiVersionOfLibrary())
	}
	if !strings.HasPrefix(BuildInfo(), `{"abi": `) {
		t.Error(BuildInfo())
	}
}
