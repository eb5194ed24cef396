// decode_team.h: threads that go through a decoding step together, and where its buffers lie.
#pragma once

#include "../decode.h"

namespace hfp {
namespace cpu {

// Waits are a microsecond and less, hundreds of them a step: threads spin. Where there are fewer
// processors than threads they give theirs away.
struct DecodeTeam {
  alignas(64) int32_t arrived;
  alignas(64) int32_t round;
  int32_t size;
};

// Until all threads of the team are here; what they wrote before is then seen by all.
void wait_for_team(DecodeTeam &team);

// [a, b) of `count` for thread `index` of `size`, at multiples of `align`.
struct Share {
  int64_t begin, end;
  Share(int64_t count, int64_t index, int64_t size, int64_t align) {
    const int64_t units = (count + align - 1) / align;
    begin = units * index / size * align;
    end = units * (index + 1) / size * align;
    if (begin > count) begin = count;
    if (end > count) end = count;
  }
};

// Keys are taken in parts, which threads share out and whose results are merged in their order. How
// many keys a part has depends on how many there are and on nothing else.
constexpr int64_t kDecodeParts = 16, kDecodePart = 64;

// Of the workspace, in floats; each buffer begins at a multiple of a cache line.
struct DecodeBuffers {
  // Of all threads, [queries, ...]: a product's results are written by parts and read by all.
  int64_t qkv, attended, gate, up, attention_out, mlp_out, tables, partial;
  // Of each thread: the residual stream, what a product is given, and attention's own.
  int64_t own, own_size;
  int64_t stream, normed, queries, key, scores, sums;
  int64_t total;

  DecodeBuffers(const DecodeArgs &args, int64_t threads) {
    const int64_t n = args.queries(), x = args.width;
    const DecodeSizes &s = args.sizes;
    const int64_t of_group = args.tokens * s.group;
    int64_t at = 0;
    const auto take = [&at](int64_t floats) {
      const int64_t here = at;
      at += (floats + 15) / 16 * 16;
      return here;
    };
    qkv = take(n * s.qkv);
    attended = take(n * s.attended);
    gate = take(n * s.inner);
    up = take(n * s.inner);
    attention_out = take(n * x);
    mlp_out = take(n * x);
    tables = take(n * 2 * s.pairs);
    partial = take(args.rows * s.key_heads * kDecodeParts * of_group * (s.dim + 2));
    own = at;
    stream = take(n * x) - own;
    normed = take(n * x) - own;
    queries = take(of_group * s.dim) - own;
    key = take(s.attended) - own;
    scores = take(of_group * kDecodePart) - own;
    sums = take(of_group * (s.dim + 2)) - own;
    own_size = at - own;
    total = own + own_size * threads + 16;  // 16: to begin at a cache line
  }
};

struct DecodeThread {
  const DecodeArgs *args;
  const DecodeBuffers *buffers;
  DecodeTeam *team;
  float *base;
  int64_t index, size;
};

}  // namespace cpu
}  // namespace hfp
