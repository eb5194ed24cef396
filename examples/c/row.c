/*
 * One row of a tiny language model with libhfpatch: the token's embedding, an RMSNorm, a gated MLP
 * with a residual, the logits, and five tokens drawn from them; on the CPU, and on a GPU if there is one.
 *
 *     cc row.c $(pkg-config --cflags --libs hfpatch) -ldl -o row
 *     ./row ../row.safetensors 7
 *
 * It prints what examples/row_pytorch.py prints.
 */
#include "device.h"

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
  DLTensor t = {data, device_in_use(), ndim, {code, bits, 1}, shape, NULL, 0};
  return t;
}

static void check(int32_t status) {
  if (status != HFP_OK) fail(hfp_last_error(), "");
}

/* A copy on the device in use. */
static Matrix put(Matrix m) {
  const size_t bytes = sizeof(float) * (size_t)(m.shape[0] * m.shape[1]);
  Matrix found = {device_get(bytes), {m.shape[0], m.shape[1]}};
  device_write(found.data, m.data, bytes);
  return found;
}

/* out = m x + c, where c may be NULL; m is a linear layer's weight, [outputs, inputs]. */
static float *product(Matrix m, float *x, float *c) {
  int64_t in[2] = {1, m.shape[1]}, out[2] = {1, m.shape[0]};
  int64_t scratch[1] = {hfp_gemm_workspace(1, 1, m.shape[0], m.shape[1], device_in_use().device_type)};
  float *result = device_get(sizeof(float) * (size_t)m.shape[0]);
  float *workspace = device_get(sizeof(float) * (size_t)(scratch[0] + 1));
  DLTensor y = view(result, 2, out, kDLFloat, 32), s = view(workspace, 1, scratch, kDLFloat, 32);
  DLTensor a = view(x, 2, in, kDLFloat, 32), b = view(m.data, 2, m.shape, kDLFloat, 32);
  DLTensor added = view(c, 2, out, kDLFloat, 32);
  check(hfp_gemm(&y, &s, &a, &b, c ? &added : NULL, 1, c ? 1 : 0, 0, 1, NULL));
  device_free(workspace);
  return result;
}

static void print(const char *name, const float *data) {
  float v[4];
  device_read(v, data, sizeof v);
  printf("%-7s %.4f %.4f %.4f %.4f\n", name, v[0], v[1], v[2], v[3]);
}

static void run(int64_t token) {
  Matrix embed = put(tensor("embed")), norm = put(tensor("norm")), gate = put(tensor("gate"));
  Matrix up = put(tensor("up")), down = put(tensor("down")), head = put(tensor("head"));
  int64_t width[1] = {embed.shape[1]}, hidden[1] = {gate.shape[0]};

  /* normed = rms_norm(x) * weight */
  float *x = embed.data + token * width[0];
  float *normed = device_get(sizeof(float) * (size_t)width[0]);
  DLTensor in = view(x, 1, width, kDLFloat, 32), weight = view(norm.data, 1, width, kDLFloat, 32);
  DLTensor out = view(normed, 1, width, kDLFloat, 32);
  check(hfp_rms_norm(&out, &in, &weight, NULL, 1e-6, 0, HFP_CAST_INPUT, NULL));

  /* inner = silu(gate normed) * (up normed), in the place of the first */
  float *gated = product(gate, normed, NULL), *upper = product(up, normed, NULL);
  DLTensor a = view(gated, 1, hidden, kDLFloat, 32), b = view(upper, 1, hidden, kDLFloat, 32);
  check(hfp_gated(&a, &a, &b, HFP_ACT_SILU, NULL));

  float *y = product(down, gated, x), *logits = product(head, y, NULL);

  /* Five rows with the same logits: the stride of the rows is 0. */
  int64_t rows[2] = {SEEDS, head.shape[0]}, strides[2] = {0, 1}, numbers[SEEDS];
  int64_t *seeds = device_get(sizeof numbers), *tokens = device_get(sizeof numbers);
  for (int i = 0; i < SEEDS; ++i) numbers[i] = i;
  device_write(seeds, numbers, sizeof numbers);
  DLTensor z = view(logits, 2, rows, kDLFloat, 32);
  z.strides = strides;
  DLTensor s = view(seeds, 1, rows, kDLInt, 64), drawn = view(tokens, 1, rows, kDLInt, 64);
  check(hfp_sample(&drawn, &z, &s, NULL, NULL, NULL, NULL, NULL, 0.8, 10, 0.95, 0, NULL));

  device_read(numbers, tokens, sizeof numbers);
  print("y", y);
  print("logits", logits);
  printf("tokens ");
  for (int i = 0; i < SEEDS; ++i) printf(" %lld", (long long)numbers[i]);
  printf("\n");
  void *used[] = {embed.data, norm.data, gate.data, up.data, down.data, head.data, normed,
                  gated,      upper,     y,         logits,  seeds,     tokens};
  for (size_t i = 0; i < sizeof used / sizeof *used; ++i) device_free(used[i]);
}

int main(int argc, char **argv) {
  if (argc != 3) fail("usage: row FILE TOKEN", "");
  open_file(argv[1]);
  const int64_t token = atoll(argv[2]);
  if (token < 0 || token >= tensor("embed").shape[0]) fail("no such token", argv[2]);
  printf("cpu\n");
  run(token);
  const char *why = device_use_cuda();
  printf("cuda:0%s%s\n", why ? "  not run: " : "", why ? why : "");
  if (!why) run(token);
  free(file_text);
  free(file_data);
  return 0;
}
