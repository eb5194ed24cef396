// gemm.cpp: out = alpha * op(a) op(b) + beta * c; see hfp_gemm.
//
// The system's BLAS does fp32 where there is one (system_blas.cpp). Else, and for half types, blocks:
// columns of b are packed, as fp32, into the caller's workspace; each thread then takes rows of a,
// packs a part of them, and keeps the sums of its rows, in fp32, until all of k is done. Which thread
// takes which rows does not change the order of a sum: same input, same bits. Goto & van de Geijn,
// doi:10.1145/1356052.1356053.
#if !defined(HFP_SIMD)

#include "../products.h"
#include "system_blas.h"

namespace hfp {
namespace cpu {

// Some columns of b for some batches, which lie packed in the workspace.
struct GemmBlock {
  const GemmArgs *args;
  int64_t batch, batches;
  int64_t column, columns;
};

}  // namespace cpu
}  // namespace hfp

#define HFP_SIMD_SOURCE "gemm.cpp"
#include "foreach_simd.h"

namespace hfp {
namespace cpu {

int32_t gemm(const GemmArgs &args) {
  if (args.m <= kDirectRows) {
    // b is read once, as it is.
    const int64_t blocks = (args.n + kDirectColumns - 1) / kDirectColumns;
    const int64_t work = args.m * kDirectColumns * (args.k > 0 ? args.k : 1);
    parallel(HFP_FOR_SIMD(direct_kernel)(args), args, args.batch * blocks,
             kDirectWork / (work > 0 ? work : 1) + 1, 1);
    return HFP_OK;
  }
  if (args.type == DType::F32 && args.k > 0 && system_gemm(args)) return HFP_OK;
  const int64_t columns = gemm_columns(args.n, args.k);
  const int64_t group = gemm_group(args.batch, args.n, args.k);
  const int64_t panel_rows = HFP_FOR_SIMD(row_block)();
  const int64_t row_blocks = (args.m + panel_rows - 1) / panel_rows;
  for (int64_t batch = 0; batch < args.batch; batch += group) {
    GemmBlock block;
    block.args = &args;
    block.batch = batch;
    block.batches = args.batch - batch < group ? args.batch - batch : group;
    for (int64_t column = 0; column < args.n; column += columns) {
      block.column = column;
      block.columns = args.n - column < columns ? args.n - column : columns;
      const int64_t panels = HFP_FOR_SIMD(panels_of)(block.columns);
      const int64_t k = args.k > 0 ? args.k : 1;
      parallel(HFP_FOR_SIMD(pack_kernel)(args), block, block.batches * panels,
               kGrainElements / (k * kGemmPanel) + 1, 1);
      parallel(HFP_FOR_SIMD(product_kernel)(args), block, block.batches * row_blocks,
               kDirectWork / (panel_rows * block.columns * k) + 1, 1);
    }
  }
  return HFP_OK;
}

}  // namespace cpu
}  // namespace hfp

#else  // compiled once per instruction set

#if !defined(HFP_GEMM_SIZES)
#define HFP_GEMM_SIZES
namespace hfp {
namespace cpu {
constexpr int64_t kDirectRows = 4;         // of a, for which b is not packed
constexpr int64_t kDirectColumns = 64;
constexpr int64_t kDirectWork = 1 << 17;   // multiplications that are worth a thread
constexpr int64_t kDirectStep = 1024;      // of k
}  // namespace cpu
}  // namespace hfp
#endif

#include "any_type.h"
#include "micro_product.h"

namespace hfp {
namespace cpu {
namespace HFP_SIMD {

constexpr int64_t kStep = 256;    // of k, for which rows of a are packed
constexpr int kPanelsOfRows = 2;  // that share what they read of b
constexpr int64_t kBlockRows = kPanelsOfRows * kProductRows;
#if HFP_SIMD_LEVEL == 2
constexpr int kAcross = 4;  // registers of b's row at once, where b is read as it is
#else
constexpr int kAcross = 2;
#endif

static int64_t row_block() { return kBlockRows; }
static int64_t panels_of(int64_t columns) {
  return (columns + kProductColumns - 1) / kProductColumns;
}

template <DType T>
HFP_INLINE float load_one(const char *p) {
  if constexpr (T == DType::F32) {
    float x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
  } else if constexpr (T == DType::BF16) {
    uint16_t h;
    __builtin_memcpy(&h, p, sizeof h);
    const uint32_t u = static_cast<uint32_t>(h) << 16;
    float x;
    __builtin_memcpy(&x, &u, sizeof x);
    return x;
  } else {
    return load_n<T>(p, 1)[0];
  }
}

// Rows [first, first + count) of a matrix of `T`, k contiguous, as [k][width], the rest 0.
template <DType T, int kWidth>
HFP_INLINE void pack_across(const char *from, int64_t row, int64_t count, int64_t k, float *to) {
  for (int64_t i = 0; i < k; i += kLanes) {
    const int64_t n = k - i < kLanes ? k - i : kLanes;
    for (int64_t r = 0; r < kWidth; ++r) {
      vf v = {};
      if (r < count) v = load_up_to<T>(from + (r * row + i) * size_of(T), n);
      float lanes[kLanes];
      __builtin_memcpy(lanes, &v, sizeof v);
      if (n == kLanes) {
#pragma GCC unroll 16
        for (int64_t j = 0; j < kLanes; ++j) to[(i + j) * kWidth + r] = lanes[j];
      } else {
        for (int64_t j = 0; j < n; ++j) to[(i + j) * kWidth + r] = lanes[j];
      }
    }
  }
}

// The same of a matrix whose rows run across: [k, count], rows `row` apart.
template <DType T, int kWidth>
HFP_INLINE void pack_along(const char *from, int64_t row, int64_t count, int64_t k, float *to) {
  for (int64_t i = 0; i < k; ++i, to += kWidth) {
    const char *line = from + i * row * size_of(T);
    if constexpr (kWidth % kLanes == 0) {
      for (int64_t c = 0; c < kWidth; c += kLanes) {
        const int64_t n = count - c < kLanes ? count - c : kLanes;
        vf v = {};
        if (n > 0) v = load_up_to<T>(line + c * size_of(T), n);
        store<DType::F32>(reinterpret_cast<char *>(to + c), v);
      }
    } else {
      for (int64_t c = 0; c < kWidth; ++c)
        to[c] = c < count ? load_one<T>(line + c * size_of(T)) : 0.0f;
    }
  }
}

template <DType T>
static void pack_b(const GemmBlock &block, int64_t begin, int64_t end) {
  const GemmArgs &g = *block.args;
  const int64_t panels = panels_of(block.columns);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t batch = unit / panels, panel = unit % panels;
    const int64_t column = block.column + panel * kProductColumns;
    const int64_t left = block.column + block.columns - column;
    const int64_t count = left < kProductColumns ? left : kProductColumns;
    const char *b = at(g.b, (block.batch + batch) * g.b_batch, T);
    float *to = g.workspace + (batch * panels + panel) * kProductColumns * g.k;
    if (g.b_transposed) {
      pack_across<T, kProductColumns>(b + column * g.b_row * size_of(T), g.b_row, count, g.k, to);
    } else {
      pack_along<T, kProductColumns>(b + column * size_of(T), g.b_row, count, g.k, to);
    }
  }
}

// alpha * sum + beta * c of one row.
template <DType T>
HFP_INLINE void finish_row(const GemmArgs &g, int64_t batch, int64_t row, int64_t column,
                           int64_t columns, const float *sum) {
  char *out = at(g.out, batch * g.out_batch + row * g.out_row + column, T);
  const char *c = g.c ? at(g.c, batch * g.c_batch + row * g.c_row + column, T) : nullptr;
  for (int64_t i = 0; i < columns; i += kLanes) {
    const int64_t n = columns - i < kLanes ? columns - i : kLanes;
    vf y = splat(g.alpha) * load_up_to<DType::F32>(reinterpret_cast<const char *>(sum + i), n);
    if (c) y = fma(splat(g.beta), load_up_to<T>(c + i * size_of(T), n), y);
    store_up_to<T>(out + i * size_of(T), y, n);
  }
}

template <DType T>
static void product_rows(const GemmBlock &block, int64_t begin, int64_t end) {
  const GemmArgs &g = *block.args;
  const int64_t panels = panels_of(block.columns), width = panels * kProductColumns;
  const int64_t row_blocks = (g.m + kBlockRows - 1) / kBlockRows;
  alignas(64) float packed[kPanelsOfRows][kStep * kProductRows];
  alignas(64) float sums[kBlockRows * kGemmColumns];
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t batch = unit / row_blocks, row = unit % row_blocks * kBlockRows;
    const int64_t rows = g.m - row < kBlockRows ? g.m - row : kBlockRows;
    const int64_t row_panels = (rows + kProductRows - 1) / kProductRows;
    const char *a = at(g.a, (block.batch + batch) * g.a_batch, T);
    const float *b = g.workspace + batch * width * g.k;
    for (int64_t i = 0; i < kBlockRows * width; ++i) sums[i] = 0;
    for (int64_t k = 0; k < g.k; k += kStep) {
      const int64_t steps = g.k - k < kStep ? g.k - k : kStep;
      for (int64_t p = 0; p < row_panels; ++p) {
        const int64_t first = row + p * kProductRows, left = row + rows - first;
        const int64_t count = left < kProductRows ? left : kProductRows;
        if (g.a_transposed) {
          pack_along<T, kProductRows>(a + (k * g.a_row + first) * size_of(T), g.a_row, count, steps,
                                      packed[p]);
        } else {
          pack_across<T, kProductRows>(a + (first * g.a_row + k) * size_of(T), g.a_row, count, steps,
                                       packed[p]);
        }
      }
      for (int64_t panel = 0; panel < panels; ++panel) {
        const float *right = b + (panel * g.k + k) * kProductColumns;
        for (int64_t p = 0; p < row_panels; ++p) {
          float *to = sums + p * kProductRows * width + panel * kProductColumns;
          vf sum[kProductRows][kProductVectors];
#pragma GCC unroll 16
          for (int r = 0; r < kProductRows; ++r) {
#pragma GCC unroll 2
            for (int v = 0; v < kProductVectors; ++v) sum[r][v] = vf{};
          }
          add_packed<kProductRows, kProductVectors>(packed[p], kProductRows, right, steps, sum);
#pragma GCC unroll 16
          for (int r = 0; r < kProductRows; ++r) {
#pragma GCC unroll 2
            for (int v = 0; v < kProductVectors; ++v) {
              char *place = reinterpret_cast<char *>(to + r * width + v * kLanes);
              store<DType::F32>(place, load<DType::F32>(place) + sum[r][v]);
            }
          }
        }
      }
    }
    for (int64_t r = 0; r < rows; ++r)
      finish_row<T>(g, block.batch + batch, row + r, block.column, block.columns, sums + r * width);
  }
}

// --- few rows: b is read as it is ---------------------------------------------------------------

// Columns of b, [n, k]: dot products, four columns at a time.
template <DType T>
HFP_INLINE void dots(const GemmArgs &g, const char *b, const float *a, int64_t steps,
                     int64_t columns, float (*sums)[kDirectColumns]) {
  for (int64_t c = 0; c < columns; c += 4) {
    const int64_t count = columns - c < 4 ? columns - c : 4;
    const char *at_column[4];
    for (int64_t j = 0; j < 4; ++j)
      at_column[j] = b + (c + (j < count ? j : 0)) * g.b_row * size_of(T);
    for (int64_t r = 0; r < g.m; r += 2) {
      const float *one = a + r * kDirectStep, *two = r + 1 < g.m ? one + kDirectStep : one;
      vf s[2][4] = {};
      for (int64_t i = 0; i < steps; i += kLanes) {
        const int64_t n = steps - i < kLanes ? steps - i : kLanes;
        const vf x = load<DType::F32>(reinterpret_cast<const char *>(one + i));  // padded with 0
        const vf y = load<DType::F32>(reinterpret_cast<const char *>(two + i));
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          const vf w = load_up_to<T>(at_column[j] + i * size_of(T), n);
          s[0][j] = fma(x, w, s[0][j]);
          s[1][j] = fma(y, w, s[1][j]);
        }
      }
      for (int64_t j = 0; j < count; ++j) {
        sums[r][c + j] += sum_lanes(s[0][j]);
        if (r + 1 < g.m) sums[r + 1][c + j] += sum_lanes(s[1][j]);
      }
    }
  }
}

// Rows of b, [k, n], times one number each.
template <DType T>
HFP_INLINE void weighted_rows(const GemmArgs &g, const char *b, const float *a, int64_t steps,
                              int64_t columns, float (*sums)[kDirectColumns]) {
  int64_t c = 0;
  // Whole lines of b at a time: its rows are far apart.
  for (; c + kAcross * kLanes <= columns; c += kAcross * kLanes) {
    vf s[kDirectRows][kAcross] = {};
    for (int64_t i = 0; i < steps; ++i) {
      const char *line = b + (i * g.b_row + c) * size_of(T);
      vf w[kAcross];
#pragma GCC unroll 4
      for (int v = 0; v < kAcross; ++v) w[v] = load<T>(line + v * kLanes * size_of(T));
#pragma GCC unroll 4
      for (int64_t r = 0; r < kDirectRows; ++r) {
        const vf x = splat(a[r * kDirectStep + i]);
#pragma GCC unroll 4
        for (int v = 0; v < kAcross; ++v) s[r][v] = fma(x, w[v], s[r][v]);
      }
    }
    for (int64_t r = 0; r < g.m; ++r) {
      for (int v = 0; v < kAcross; ++v) {
        char *to = reinterpret_cast<char *>(sums[r] + c + v * kLanes);
        store<DType::F32>(to, load<DType::F32>(to) + s[r][v]);
      }
    }
  }
  for (; c < columns; c += kLanes) {
    const int64_t n = columns - c < kLanes ? columns - c : kLanes;
    vf s[kDirectRows] = {};
    for (int64_t i = 0; i < steps; ++i) {
      const vf w = load_up_to<T>(b + (i * g.b_row + c) * size_of(T), n);
#pragma GCC unroll 4
      for (int64_t r = 0; r < kDirectRows; ++r) s[r] = fma(splat(a[r * kDirectStep + i]), w, s[r]);
    }
    for (int64_t r = 0; r < g.m; ++r) {
      for (int64_t j = 0; j < n; ++j) sums[r][c + j] += s[r][j];
    }
  }
}

template <DType T>
static void direct_columns(const GemmArgs &g, int64_t begin, int64_t end) {
  const int64_t blocks = (g.n + kDirectColumns - 1) / kDirectColumns;
  alignas(64) float left[kDirectRows * kDirectStep];
  alignas(64) float sums[kDirectRows][kDirectColumns];
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t batch = unit / blocks, column = unit % blocks * kDirectColumns;
    const int64_t columns = g.n - column < kDirectColumns ? g.n - column : kDirectColumns;
    const char *a = at(g.a, batch * g.a_batch, T), *b = at(g.b, batch * g.b_batch, T);
    for (int64_t r = 0; r < kDirectRows; ++r) {
      for (int64_t c = 0; c < kDirectColumns; ++c) sums[r][c] = 0;
    }
    for (int64_t k = 0; k < g.k; k += kDirectStep) {
      const int64_t steps = g.k - k < kDirectStep ? g.k - k : kDirectStep;
      const int64_t padded = (steps + kLanes - 1) / kLanes * kLanes;
      for (int64_t r = 0; r < kDirectRows; ++r) {
        float *to = left + r * kDirectStep;
        for (int64_t i = 0; i < padded; ++i) {
          const bool inside = r < g.m && i < steps;
          const int64_t from = g.a_transposed ? (k + i) * g.a_row + r : r * g.a_row + k + i;
          to[i] = inside ? load_one<T>(a + from * size_of(T)) : 0.0f;
        }
      }
      if (g.b_transposed) {
        dots<T>(g, b + (column * g.b_row + k) * size_of(T), left, steps, columns, sums);
      } else {
        weighted_rows<T>(g, b + (k * g.b_row + column) * size_of(T), left, steps, columns, sums);
      }
    }
    for (int64_t r = 0; r < g.m; ++r) finish_row<T>(g, batch, r, column, columns, sums[r]);
  }
}

using GemmPart = void (*)(const GemmBlock &, int64_t, int64_t);
using GemmDirect = void (*)(const GemmArgs &, int64_t, int64_t);

static GemmPart pack_kernel(const GemmArgs &g) {
  return g.type == DType::F32   ? pack_b<DType::F32>
         : g.type == DType::F16 ? pack_b<DType::F16>
                                : pack_b<DType::BF16>;
}
static GemmPart product_kernel(const GemmArgs &g) {
  return g.type == DType::F32   ? product_rows<DType::F32>
         : g.type == DType::F16 ? product_rows<DType::F16>
                                : product_rows<DType::BF16>;
}
static GemmDirect direct_kernel(const GemmArgs &g) {
  return g.type == DType::F32   ? direct_columns<DType::F32>
         : g.type == DType::F16 ? direct_columns<DType::F16>
                                : direct_columns<DType::BF16>;
}

}  // namespace HFP_SIMD
}  // namespace cpu
}  // namespace hfp

#endif
