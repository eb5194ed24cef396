// One row of a tiny language model with libhfpatch: the token's embedding, an RMSNorm, a gated MLP
// with a residual, the logits, and five tokens drawn from them.
//
//	go run . ../row.safetensors 7
//
// It prints what examples/row_pytorch.py prints. The products of matrices and the row are loops here.
package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"strconv"

	"hfpatch"
)

type matrix struct {
	data  []float32
	shape []int64
}

func (m matrix) product(x []float32) []float32 {
	out := make([]float32, m.shape[0])
	for i := range out {
		for k, value := range x {
			out[i] += m.data[i*len(x)+k] * value
		}
	}
	return out
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

// row is one of Go's slices as a tensor.
func row(data []float32) *hfpatch.Tensor {
	t, err := hfpatch.New(data, hfpatch.Float32, int64(len(data)))
	check(err)
	return t
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "row:", err)
		os.Exit(1)
	}
}

func main() {
	if len(os.Args) != 3 {
		check(fmt.Errorf("usage: row FILE TOKEN"))
	}
	w, err := load(os.Args[1])
	check(err)
	token, err := strconv.Atoi(os.Args[2])
	check(err)
	for _, name := range []string{"embed", "norm", "gate", "up", "down", "head"} {
		if _, there := w[name]; !there {
			check(fmt.Errorf("%s: no tensor %s", os.Args[1], name))
		}
	}
	width := int(w["embed"].shape[1])
	if token < 0 || token >= int(w["embed"].shape[0]) {
		check(fmt.Errorf("no such token: %d", token))
	}

	x := w["embed"].data[token*width : (token+1)*width]
	normed := make([]float32, width)
	check(hfpatch.RmsNorm(row(normed), row(x), row(w["norm"].data), nil, 1e-6, 0,
		hfpatch.CastInput, nil))

	// In the place of the first.
	inner, upper := w["gate"].product(normed), w["up"].product(normed)
	gated := row(inner)
	check(hfpatch.Gated(gated, gated, row(upper), hfpatch.ActSilu, nil))

	y := w["down"].product(inner)
	for i := range y {
		y[i] += x[i]
	}
	logits := w["head"].product(y)

	// Five rows with the same logits: the stride of the rows is 0.
	shape := []int64{5, int64(len(logits))}
	z, err := hfpatch.Strided(logits, hfpatch.Float32, shape, []int64{0, 1})
	check(err)
	seeds, err := hfpatch.New([]int64{0, 1, 2, 3, 4}, hfpatch.Int64, 5)
	check(err)
	tokens := make([]int64, 5)
	drawn, err := hfpatch.New(tokens, hfpatch.Int64, 5)
	check(err)
	check(hfpatch.Sample(drawn, z, seeds, nil, nil, nil, nil, nil, 0.8, 10, 0.95, 0, nil))

	fmt.Printf("y       %.4f %.4f %.4f %.4f\n", y[0], y[1], y[2], y[3])
	fmt.Printf("logits  %.4f %.4f %.4f %.4f\n", logits[0], logits[1], logits[2], logits[3])
	fmt.Println("tokens ", fmt.Sprint(tokens)[1:len(fmt.Sprint(tokens))-1])
}
