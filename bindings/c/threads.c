/*
 * Calls of eight threads at once:
 *
 *     threads SECONDS
 *
 * Each thread has results of its own and reads inputs that all share; half of its calls are refused.
 * Compiled with HFP_CUDA, each has a stream of cuda:0 too.
 * Every result must have the bits of the first one, made before the threads began, and every message
 * must be of the thread's own call. Prints how many calls were made and how many differed.
 */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "hfpatch.h"
#include "place.h"

#define THREADS 8
#define ROWS 24
#define COLS 129
#define OPS 6

static float *x, *y, *weight; /* [ROWS, COLS] twice, [COLS] */
static int64_t *seeds;        /* [ROWS] */
static double seconds;

struct results {
  float out[ROWS * COLS];
  float sum[ROWS * COLS];
  int64_t index[ROWS];
};

static struct results *right; /* [OPS] */

struct count {
  int number;
  long long calls, differences;
};

static int64_t rows_cols[2] = {ROWS, COLS}, cols[1] = {COLS}, rows[1] = {ROWS};

static DLTensor view(void *data, int32_t ndim, int64_t *shape, uint8_t code, uint8_t bits) {
  DLTensor t = {data, {PLACE, 0}, ndim, {code, bits, 1}, shape, NULL, 0};
  return t;
}

static int32_t compute(int op, struct results *r, int64_t *scratch, void *stream) {
  DLTensor in = view(x, 2, rows_cols, kDLFloat, 32), other = view(y, 2, rows_cols, kDLFloat, 32);
  DLTensor w = view(weight, 1, cols, kDLFloat, 32);
  DLTensor out = view(r->out, 2, rows_cols, kDLFloat, 32);
  DLTensor sum = view(r->sum, 2, rows_cols, kDLFloat, 32);
  DLTensor index = view(r->index, 1, rows, kDLInt, 64), seed = view(seeds, 1, rows, kDLInt, 64);
  int64_t size[1];
  DLTensor workspace;
  size[0] = hfp_row_workspace(ROWS, COLS);
  workspace = view(scratch, 1, size, kDLInt, 64);
  switch (op) {
    case 0: return hfp_rms_norm(&out, &in, &w, NULL, 1e-6, 0, HFP_CAST_INPUT, stream);
    case 1: return hfp_add_layer_norm(&out, &sum, &in, &other, &w, NULL, 1e-5, stream);
    case 2: return hfp_gated(&out, &in, &other, HFP_ACT_SILU, stream);
    case 3: return hfp_softmax(&out, &workspace, &in, NULL, 0.5, stream);
    case 4:
      return hfp_sample(&index, &in, &seed, NULL, NULL, NULL, NULL, NULL, 0.8, 20, 0.9, 0, stream);
    default: return hfp_mul_add(&out, &in, &w, &w, HFP_CAST_NONE, stream);
  }
}

/* A call that names this thread in its message. */
static int refused(int number, struct results *r) {
  DLTensor in = view(x, 2, rows_cols, kDLFloat, 32), out = view(r->out, 2, rows_cols, kDLFloat, 32);
  char expected[64];
  if (hfp_gelu(&out, &in, 100 + number, NULL) != HFP_INVALID_ARGUMENT) return 0;
  snprintf(expected, sizeof expected, "got %d", 100 + number);
  return strstr(hfp_last_error(), expected) != NULL;
}

static int same(const struct results *a, const struct results *b) {
  return memcmp(a->out, b->out, sizeof a->out) == 0 && memcmp(a->sum, b->sum, sizeof a->sum) == 0 &&
         memcmp(a->index, b->index, sizeof a->index) == 0;
}

/* The results and status of one call, when it has ended. */
static int32_t run(int op, struct results *r, void *stream) {
  const int64_t size = hfp_row_workspace(ROWS, COLS);
  int64_t *scratch = get_shared((size_t)(size > 0 ? size : 1) * sizeof(int64_t));
  memset(r, 0, sizeof *r);
  const int32_t status = compute(op, r, scratch, stream);
  finish(stream);
  free_shared(scratch);
  return status;
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *work(void *argument) {
  struct count *c = argument;
  struct results *mine = get_shared(sizeof *mine);
  const double end = now() + seconds;
  void *stream = NULL;
#if defined(HFP_CUDA)
  check_cuda(cudaStreamCreateWithFlags((cudaStream_t *)&stream, cudaStreamNonBlocking));
#endif
  for (int i = c->number; now() < end; ++i) {
    const int op = i % OPS;
    if (run(op, mine, stream) != HFP_OK || !same(mine, &right[op])) ++c->differences;
    if (!refused(c->number, mine)) ++c->differences;
    c->calls += 2;
  }
  free_shared(mine);
  return NULL;
}

int main(int argc, char **argv) {
  pthread_t threads[THREADS];
  struct count counts[THREADS] = {{0, 0, 0}};
  long long calls = 0, differences = 0;
  uint32_t state = 1;
  seconds = argc > 1 ? atof(argv[1]) : 1;
  x = get_shared(ROWS * COLS * sizeof *x);
  y = get_shared(ROWS * COLS * sizeof *y);
  weight = get_shared(COLS * sizeof *weight);
  seeds = get_shared(ROWS * sizeof *seeds);
  right = get_shared(OPS * sizeof *right);
  for (int i = 0; i < ROWS * COLS; ++i) {
    state = state * 1664525u + 1013904223u;
    x[i] = (float)(state >> 8) / 8388608.0f - 1.0f;
    state = state * 1664525u + 1013904223u;
    y[i] = (float)(state >> 8) / 8388608.0f - 1.0f;
  }
  for (int i = 0; i < COLS; ++i) weight[i] = 0.5f + 0.01f * (float)i;
  for (int i = 0; i < ROWS; ++i) seeds[i] = i;
  for (int op = 0; op < OPS; ++op) {
    if (run(op, &right[op], NULL) != HFP_OK) {
      printf("%s\n", hfp_last_error());
      return 2;
    }
  }
  for (int i = 0; i < THREADS; ++i) {
    counts[i].number = i;
    if (pthread_create(&threads[i], NULL, work, &counts[i]) != 0) return 2;
  }
  for (int i = 0; i < THREADS; ++i) {
    pthread_join(threads[i], NULL);
    calls += counts[i].calls;
    differences += counts[i].differences;
  }
  free_shared(right);
  free_shared(seeds);
  free_shared(weight);
  free_shared(y);
  free_shared(x);
  printf("%lld calls, %lld differences\n", calls, differences);
  return differences > 0 || calls == 0;
}
