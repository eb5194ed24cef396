// One row of a tiny language model with libhfpatch: the token's embedding, an RMSNorm, a gated MLP
// with a residual, the logits, and five tokens drawn from them; on the CPU, and on a GPU if there is one.
//
//	go run . ../row.safetensors 7
//
// It prints what examples/row_pytorch.py prints.
package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"runtime"
	"strconv"

	"hfpatch"
)

type matrix struct {
	data  []float32
	shape []int64
}

// load reads a safetensors file: 8 bytes with the size of the header, the header as JSON, the data.
func load(path string) (map[string]matrix, error) {
	file, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if len(file) < 8 || binary.LittleEndian.Uint64(file) > uint64(len(file)-8) {
		return nil, fmt.Errorf("%s: not a safetensors file", path)
	}
	size := binary.LittleEndian.Uint64(file)
	var header map[string]struct {
		Dtype       string   `json:"dtype"`
		Shape       []int64  `json:"shape"`
		DataOffsets []uint64 `json:"data_offsets"`
	}
	if err := json.Unmarshal(file[8:8+size], &header); err != nil {
		return nil, err
	}
	found := map[string]matrix{}
	for name, about := range header {
		if name == "__metadata__" {
			continue
		}
		if about.Dtype != "F32" {
			return nil, fmt.Errorf("%s: expected fp32, got %s", name, about.Dtype)
		}
		data := file[8+size+about.DataOffsets[0] : 8+size+about.DataOffsets[1]]
		values := make([]float32, len(data)/4)
		for i := range values {
			values[i] = math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:]))
		}
		found[name] = matrix{values, about.Shape}
	}
	return found, nil
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "row:", err)
		os.Exit(1)
	}
}

// product is m x + c, where c may be nil; m is a linear layer's weight, [outputs, inputs].
func product(m matrix, x, c *array[float32]) *array[float32] {
	outputs, inputs := m.shape[0], m.shape[1]
	size, err := hfpatch.GemmWorkspace(1, 1, outputs, inputs, device().Type)
	check(err)
	out, scratch := zeros(outputs), zeros(size)
	defer scratch.free()
	weight := put(m.data, hfpatch.Float32)
	defer weight.free()
	var added *hfpatch.Tensor
	beta := 0.0
	if c != nil {
		added, beta = c.view(0, []int64{1, outputs}, nil), 1
	}
	check(hfpatch.Gemm(out.view(0, []int64{1, outputs}, nil), scratch.view(0, []int64{size}, nil),
		x.view(0, []int64{1, inputs}, nil), weight.view(0, m.shape, nil), added, 1, beta, 0, 1, nil))
	return out
}

func run(w map[string]matrix, token int64) {
	width := w["embed"].shape[1]
	x := put(w["embed"].data[token*width:(token+1)*width], hfpatch.Float32)
	defer x.free()
	norm := put(w["norm"].data, hfpatch.Float32)
	defer norm.free()
	normed := zeros(width)
	defer normed.free()
	check(hfpatch.RmsNorm(normed.all(), x.all(), norm.all(), nil, 1e-6, 0, hfpatch.CastInput, nil))

	// In the place of the first.
	inner, upper := product(w["gate"], normed, nil), product(w["up"], normed, nil)
	defer inner.free()
	defer upper.free()
	gated := inner.all()
	check(hfpatch.Gated(gated, gated, upper.all(), hfpatch.ActSilu, nil))

	y := product(w["down"], inner, x)
	defer y.free()
	logits := product(w["head"], y, nil)
	defer logits.free()

	// Five rows with the same logits: the stride of the rows is 0.
	z := logits.view(0, []int64{5, int64(len(logits.data))}, []int64{0, 1})
	seeds := put([]int64{0, 1, 2, 3, 4}, hfpatch.Int64)
	defer seeds.free()
	tokens := put(make([]int64, 5), hfpatch.Int64)
	defer tokens.free()
	check(hfpatch.Sample(tokens.all(), z, seeds.all(), nil, nil, nil, nil, nil, 0.8, 10, 0.95, 0, nil))

	for _, printed := range []struct {
		name  string
		array *array[float32]
	}{{"y", y}, {"logits", logits}} {
		v := printed.array.read()
		fmt.Printf("%-7s %.4f %.4f %.4f %.4f\n", printed.name, v[0], v[1], v[2], v[3])
	}
	drawn := fmt.Sprint(tokens.read())
	fmt.Println("tokens ", drawn[1:len(drawn)-1])
}

func main() {
	// CUDA's context is the thread's.
	runtime.LockOSThread()
	if len(os.Args) != 3 {
		check(fmt.Errorf("usage: row FILE TOKEN"))
	}
	w, err := load(os.Args[1])
	check(err)
	token, err := strconv.ParseInt(os.Args[2], 10, 64)
	check(err)
	for _, name := range []string{"embed", "norm", "gate", "up", "down", "head"} {
		if _, there := w[name]; !there {
			check(fmt.Errorf("%s: no tensor %s", os.Args[1], name))
		}
	}
	if token < 0 || token >= w["embed"].shape[0] {
		check(fmt.Errorf("no such token: %d", token))
	}
	fmt.Println("cpu")
	run(w, token)
	if err := useCUDA(); err != nil {
		fmt.Println("cuda:0  not run:", err)
		return
	}
	fmt.Println("cuda:0")
	run(w, token)
}
