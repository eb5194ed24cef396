/*
 * One row of a tiny language model with libhfpatch: the token's embedding, an RMSNorm, a gated MLP
 * with a residual, the logits, and five tokens drawn from them.
 *
 *     cc row.c $(pkg-config --cflags --libs hfpatch) -o row
 *     ./row ../row.safetensors 7
 *
 * It prints what examples/row_pytorch.py prints. The products of matrices and the row are loops here.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hfpatch.h"

#define SEEDS 5

typedef struct {
  float *data;
  int64_t shape[2];
} Matrix;

static char *file_text; /* the header, then the data */
static char *file_data;

static void fail(const char *why, const char *what) {
  fprintf(stderr, "row: %s%s%s\n", why, *what ? ": " : "", what);
  exit(1);
}

/* safetensors: 8 bytes with the size of the header, the header as JSON, the data. */
static void open_file(const char *path) {
  FILE *file = fopen(path, "rb");
  unsigned char size[8];
  uint64_t header = 0;
  long total;
  if (!file) fail("no such file", path);
  fseek(file, 0, SEEK_END);
  total = ftell(file);
  rewind(file);
  if (total < 8 || fread(size, 1, 8, file) != 8) fail("not a safetensors file", path);
  for (int i = 7; i >= 0; --i) header = header << 8 | size[i];
  if (header > (uint64_t)total - 8) fail("not a safetensors file", path);
  file_text = malloc((size_t)total);
  if (!file_text || fread(file_text, 1, (size_t)total - 8, file) != (size_t)total - 8) {
    fail("could not be read", path);
  }
  fclose(file);
  file_data = malloc((size_t)total); /* aligned, which it need not be behind the header */
  if (!file_data) fail("out of memory", "");
  memcpy(file_data, file_text + header, (size_t)total - 8 - header);
  file_text[header] = '\0';
}

/* An fp32 tensor of the file, such as {"dtype":"F32","shape":[40,32],"data_offsets":[0,5120]}. */
static Matrix tensor(const char *name) {
  char key[64];
  char *at, *shape, *offsets;
  Matrix m = {NULL, {1, 1}};
  snprintf(key, sizeof key, "\"%s\":{", name);
  at = strstr(file_text, key);
  if (!at) fail("the file has no tensor", name);
  if (!strstr(at, "\"dtype\":\"F32\"")) fail("expected fp32", name);
  shape = strstr(at, "\"shape\":[");
  offsets = strstr(at, "\"data_offsets\":[");
  if (!shape || !offsets) fail("the header lacks the shape or the offsets of", name);
  m.shape[0] = strtoll(shape + 9, &at, 10);
  if (*at == ',') m.shape[1] = strtoll(at + 1, NULL, 10);
  m.data = (float *)(file_data + strtoll(offsets + 16, NULL, 10));
  return m;
}

static DLTensor view(void *data, int32_t ndim, int64_t *shape, uint8_t code, uint8_t bits) {
  DLTensor t = {data, {kDLCPU, 0}, ndim, {code, bits, 1}, shape, NULL, 0};
  return t;
}

static void check(int32_t status) {
  if (status != HFP_OK) fail(hfp_last_error(), "");
}

static float *product(Matrix m, const float *x) {
  float *out = malloc(sizeof(float) * (size_t)m.shape[0]);
  if (!out) fail("out of memory", "");
  for (int64_t i = 0; i < m.shape[0]; ++i) {
    float sum = 0;
    for (int64_t k = 0; k < m.shape[1]; ++k) sum += m.data[i * m.shape[1] + k] * x[k];
    out[i] = sum;
  }
  return out;
}

int main(int argc, char **argv) {
  if (argc != 3) fail("usage: row FILE TOKEN", "");
  open_file(argv[1]);
  Matrix embed = tensor("embed"), norm = tensor("norm"), gate = tensor("gate"), up = tensor("up");
  Matrix down = tensor("down"), head = tensor("head");
  const int64_t token = atoll(argv[2]);
  if (token < 0 || token >= embed.shape[0]) fail("no such token", argv[2]);
  int64_t width[1] = {embed.shape[1]}, hidden[1] = {gate.shape[0]};

  /* normed = rms_norm(x) * weight */
  float *x = embed.data + token * width[0];
  float *normed = malloc(sizeof(float) * (size_t)width[0]);
  if (!normed) fail("out of memory", "");
  DLTensor in = view(x, 1, width, kDLFloat, 32), weight = view(norm.data, 1, width, kDLFloat, 32);
  DLTensor out = view(normed, 1, width, kDLFloat, 32);
  check(hfp_rms_norm(&out, &in, &weight, NULL, 1e-6, 0, HFP_CAST_INPUT, NULL));

  /* inner = silu(gate normed) * (up normed), in the place of the first */
  float *gated = product(gate, normed), *upper = product(up, normed);
  DLTensor a = view(gated, 1, hidden, kDLFloat, 32), b = view(upper, 1, hidden, kDLFloat, 32);
  check(hfp_gated(&a, &a, &b, HFP_ACT_SILU, NULL));

  float *y = product(down, gated);
  for (int64_t i = 0; i < width[0]; ++i) y[i] += x[i];
  float *logits = product(head, y);

  /* Five rows with the same logits: the stride of the rows is 0. */
  int64_t rows[2] = {SEEDS, head.shape[0]}, strides[2] = {0, 1}, seeds[SEEDS], tokens[SEEDS];
  for (int i = 0; i < SEEDS; ++i) seeds[i] = i;
  DLTensor z = view(logits, 2, rows, kDLFloat, 32);
  z.strides = strides;
  DLTensor s = view(seeds, 1, rows, kDLInt, 64), drawn = view(tokens, 1, rows, kDLInt, 64);
  check(hfp_sample(&drawn, &z, &s, NULL, NULL, NULL, NULL, NULL, 0.8, 10, 0.95, 0, NULL));

  printf("y       %.4f %.4f %.4f %.4f\n", y[0], y[1], y[2], y[3]);
  printf("logits  %.4f %.4f %.4f %.4f\n", logits[0], logits[1], logits[2], logits[3]);
  printf("tokens ");
  for (int i = 0; i < SEEDS; ++i) printf(" %lld", (long long)tokens[i]);
  printf("\n");
  free(normed);
  free(gated);
  free(upper);
  free(y);
  free(logits);
  free(file_text);
  free(file_data);
  return 0;
}
