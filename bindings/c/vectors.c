/*
 * Goes through a file of calls and what must come of them (tests/clib/vectors.py):
 *
 *     vectors FILE            every case with the linked library
 *     vectors FILE stub       every case answers that the stub is linked
 *
 * Prints the cases that fail and how many there are. A call that is refused must not have written
 * anything. Compiled with HFP_COUNT_ALLOCATIONS, every call is made twice, and the second one must
 * not allocate (but those over lists, once, 64 bytes for each tensor of the call); what OpenMP's runtime allocates
 * for its threads it does in the first one. Compiled with HFP_CUDA, every tensor is one of cuda:0, in
 * memory that the host reads too.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hfpatch.h"
#include "place.h"

#define MAX_TENSORS 256
#define MAX_VALUES 32

struct value {
  DLTensor *tensor;
  HfpTensorList list;
  double number;
  int64_t integer;
};

struct call {
  struct value value[MAX_VALUES];
  int count;
  void *stream;
};

#include "dispatch.h"

#if defined(HFP_COUNT_ALLOCATIONS)
/* Those of glibc; a program's own functions stand before them, also for its libraries. */
extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *old, size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);
static volatile int counting;
static volatile long long allocations, allocated;

static void counted(size_t size) {
  if (!counting) return;
  ++allocations;
  allocated += (long long)size;
}
void *malloc(size_t size) {
  counted(size);
  return __libc_malloc(size);
}
void *calloc(size_t count, size_t size) {
  counted(count * size);
  return __libc_calloc(count, size);
}
void *realloc(void *old, size_t size) {
  counted(size);
  return __libc_realloc(old, size);
}
void *aligned_alloc(size_t alignment, size_t size) {
  counted(size);
  return __libc_memalign(alignment, size);
}
int posix_memalign(void **out, size_t alignment, size_t size) {
  counted(size);
  *out = __libc_memalign(alignment, size);
  return *out ? 0 : 12;
}
#endif

struct expectation {
  int tensor;
  double tolerance;
  double *values;
  int64_t count;
};

static char name[256], function[128], message[2048];
static int status;
static struct call call;
static DLTensor tensors[MAX_TENSORS];
static void *memory[MAX_TENSORS];
static size_t memory_size[MAX_TENSORS];
static int tensor_count;
static struct expectation expected[MAX_TENSORS];
static int expected_count;

static void *get(size_t bytes) {
  void *found = malloc(bytes ? bytes : 1);
  if (!found) {
    fprintf(stderr, "out of memory\n");
    exit(2);
  }
  return found;
}

static int digit(char c) { return c <= '9' ? c - '0' : c - 'a' + 10; }

/* Bytes of hexadecimal digits; how many. */
static int64_t bytes_of(const char *hex, unsigned char *out) {
  int64_t count = 0;
  if (*hex == '-') return 0;
  for (; hex[0] && hex[1]; hex += 2) out[count++] = (unsigned char)(digit(hex[0]) * 16 + digit(hex[1]));
  return count;
}

static double number_of(const unsigned char *big_endian) {
  uint64_t bits = 0;
  double found;
  for (int i = 0; i < 8; ++i) bits = bits << 8 | big_endian[i];
  memcpy(&found, &bits, sizeof found);
  return found;
}

static double number_of_hex(const char *hex) {
  unsigned char bytes[8] = {0};
  bytes_of(hex, bytes);
  return number_of(bytes);
}

static int64_t *integers(const char *text, int count) {
  int64_t *found = get(sizeof(int64_t) * (size_t)count);
  char *at = (char *)text;
  for (int i = 0; i < count; ++i) found[i] = strtoll(at, &at, 10);
  return found;
}

/* "ndim sizes | strides | offset | ..."; the parts are cut in place. */
static void view(char *parts, void *data, DLDataType dtype) {
  DLTensor *t = &tensors[tensor_count];
  char *strides = strstr(parts, " | ") + 3;
  char *offset = strstr(strides, " | ") + 3;
  char *sizes;
  memset(t, 0, sizeof *t);
  t->ndim = (int32_t)strtol(parts, &sizes, 10);
  t->shape = integers(sizes, t->ndim);
  t->strides = integers(strides, t->ndim);
  t->dtype = dtype;
  t->device.device_type = PLACE;
  t->data = (char *)data + strtoll(offset, NULL, 10) * (dtype.bits / 8);
  memory[tensor_count++] = data;
}

/* A copy of all memory, one behind the other. */
static char *copied(void) {
  size_t size = 0, used = 0;
  for (int i = 0; i < tensor_count; ++i) size += memory_size[i];
  char *found = get(size);
  for (int i = 0; i < tensor_count; ++i) {
    memcpy(found + used, memory[i], memory_size[i]);
    used += memory_size[i];
  }
  return found;
}

static int changed(const char *before) {
  for (int i = 0; i < tensor_count; ++i) {
    if (memcmp(before, memory[i], memory_size[i]) != 0) return 1;
    before += memory_size[i];
  }
  return 0;
}

static void tensor(char *rest) {
  char *at = rest;
  DLDataType dtype = {0, 0, 1};
  long long size;
  void *data;
  strtol(at, &at, 10);
  dtype.code = (uint8_t)strtol(at, &at, 10);
  dtype.bits = (uint8_t)strtol(at, &at, 10);
  size = strtoll(at, &at, 10);
  data = get_shared((size_t)size);
  at = strrchr(rest, ' ') + 1;
  if (strcmp(at, "zeros") == 0) {
    memset(data, 0, (size_t)size);
  } else {
    bytes_of(at, data);
  }
  memory_size[tensor_count] = (size_t)size;
  view(strchr(rest, '|') + 2, data, dtype);
}

static double element(int index, int64_t i) {
  const DLDataType dtype = tensors[index].dtype;
  const char *data = memory[index];
  if (dtype.code == kDLFloat && dtype.bits == 32) return ((const float *)data)[i];
  if (dtype.bits == 8) return ((const uint8_t *)data)[i];
  if (dtype.code == kDLInt) return (double)((const int64_t *)data)[i];
  uint16_t half;
  memcpy(&half, data + 2 * i, sizeof half);
  if (dtype.code == kDLBfloat) {
    const uint32_t bits = (uint32_t)half << 16;
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
  }
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  double found = exponent == 31  ? (fraction ? NAN : INFINITY)
                 : exponent == 0 ? ldexp(fraction, -24)
                                 : ldexp(1024 + fraction, exponent - 25);
  return half >> 15 ? -found : found;
}

#if defined(HFP_COUNT_ALLOCATIONS)
static int allocates(void) {
  int listed = 0, given = 0;
  for (int i = 0; i < call.count; ++i) {
    listed += (int)call.value[i].list.count;
    given += call.value[i].tensor != NULL;
  }
  allocations = allocated = 0;
  counting = 1;
  dispatch(function, &call);
  counting = 0;
  if (allocations <= (listed > 0) && allocated <= (listed > 0) * 64LL * (listed + given)) return 0;
  printf("FAIL %s: %lld allocations, %lld bytes\n", name, allocations, allocated);
  return 1;
}
#endif

static int wrong(int stub) {
  char *before = copied();
  const int got = dispatch(function, &call);
  finish(call.stream);
  const int wrote = got != HFP_OK && changed(before);
  free(before);
  if (wrote) {
    printf("FAIL %s: refused, and memory was written\n", name);
    return 1;
  }
  const char *said = got ? hfp_last_error() : "";
  if (stub) {
    char right[256];
    snprintf(right, sizeof right, "%s: this is the stub of libhfpatch, ", function);
    if (got == HFP_NOT_AVAILABLE && strncmp(said, right, strlen(right)) == 0) return 0;
    printf("FAIL %s: %d `%s`\n", name, got, said);
    return 1;
  }
  if (got != status || strcmp(said, message) != 0) {
    printf("FAIL %s: expected %d `%s`, got %d `%s`\n", name, status, message, got, said);
    return 1;
  }
  for (int e = 0; e < expected_count; ++e) {
    for (int64_t i = 0; i < expected[e].count; ++i) {
      const double value = element(expected[e].tensor, i), right = expected[e].values[i];
      if ((isnan(value) && isnan(right)) || value == right) continue;
      if (fabs(value - right) <= expected[e].tolerance) continue;
      printf("FAIL %s: tensor %d[%lld]: expected %g, got %g\n", name, expected[e].tensor,
             (long long)i, right, value);
      return 1;
    }
  }
  return 0;
}

static void forget(void) {
  for (int i = 0; i < tensor_count; ++i) {
    int shared = 0;
    for (int j = 0; j < i; ++j) shared |= memory[j] == memory[i];
    if (!shared) free_shared(memory[i]);
    free(tensors[i].shape);
    free(tensors[i].strides);
  }
  for (int i = 0; i < expected_count; ++i) free(expected[i].values);
  for (int i = 0; i < call.count; ++i) free((void *)call.value[i].list.tensors);
  tensor_count = expected_count = 0;
  memset(&call, 0, sizeof call);
  memset(memory_size, 0, sizeof memory_size);
}

static void list_of(struct value *v, char *rest) {
  DLTensor **found = get(sizeof(DLTensor *) * MAX_TENSORS);
  for (char *part = strtok(rest, " "); part; part = strtok(NULL, " ")) {
    const int index = atoi(part);
    found[v->list.count++] = index < 0 ? NULL : &tensors[index];
  }
  v->list.tensors = found;
}

static void line(const char *word, char *rest) {
  struct value *v = &call.value[call.count];
  if (strcmp(word, "function") == 0) {
    snprintf(function, sizeof function, "%s", rest);
  } else if (strcmp(word, "tensor") == 0) {
    tensor(rest);
  } else if (strcmp(word, "view") == 0) {
    char *at = rest;
    strtol(at, &at, 10);
    const int of = (int)strtol(at, &at, 10);
    view(at + 3, memory[of], tensors[of].dtype);
  } else if (strcmp(word, "host") == 0) {
    tensors[atoi(rest)].device.device_type = kDLCPU;
  } else if (strcmp(word, "address") == 0) {
    char *at = rest;
    const int table = (int)strtol(at, &at, 10), place = (int)strtol(at, &at, 10);
    ((uint64_t *)memory[table])[place] = (uint64_t)(uintptr_t)tensors[atoi(at)].data;
  } else if (strcmp(word, "null") == 0) {
    ++call.count;
  } else if (strcmp(word, "float") == 0) {
    v->number = number_of_hex(rest);
    ++call.count;
  } else if (strcmp(word, "int") == 0) {
    v->integer = strtoll(rest, NULL, 10);
    ++call.count;
  } else if (strcmp(word, "use") == 0) {
    v->tensor = &tensors[atoi(rest)];
    ++call.count;
  } else if (strcmp(word, "list") == 0) {
    list_of(v, rest);
    ++call.count;
  } else if (strcmp(word, "status") == 0) {
    status = atoi(rest);
  } else if (strcmp(word, "message") == 0) {
    snprintf(message, sizeof message, "%s", rest);
  } else if (strcmp(word, "expect") == 0) {
    struct expectation *e = &expected[expected_count++];
    char *tolerance = strchr(rest, ' ') + 1, *values = strchr(tolerance, ' ') + 1;
    unsigned char *bytes = get(strlen(values));
    e->tensor = atoi(rest);
    values[-1] = '\0';
    e->tolerance = number_of_hex(tolerance);
    e->count = bytes_of(values, bytes) / 8;
    e->values = get(sizeof(double) * (size_t)e->count);
    for (int64_t i = 0; i < e->count; ++i) e->values[i] = number_of(bytes + 8 * i);
    free(bytes);
  }
}

static char *read_all(const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file) {
    perror(path);
    exit(2);
  }
  fseek(file, 0, SEEK_END);
  const long size = ftell(file);
  rewind(file);
  char *text = get((size_t)size + 1);
  if (fread(text, 1, (size_t)size, file) != (size_t)size) exit(2);
  text[size] = '\0';
  fclose(file);
  return text;
}

int main(int argc, char **argv) {
  int count = 0, failed = 0;
  const int stub = argc > 2 && strcmp(argv[2], "stub") == 0;
  if (argc < 2) {
    fprintf(stderr, "usage: vectors FILE [stub]\n");
    return 2;
  }
  char *text = read_all(argv[1]);
  for (char *at = text; *at;) {
    char *end = strchr(at, '\n');
    if (end) *end = '\0';
    char *rest = strchr(at, ' ');
    if (rest) *rest++ = '\0';
    if (strcmp(at, "case") == 0) {
      snprintf(name, sizeof name, "%s", rest);
    } else if (strcmp(at, "end") == 0) {
      ++count;
      failed += wrong(stub);
#if defined(HFP_COUNT_ALLOCATIONS)
      failed += allocates();
#endif
      forget();
    } else {
      line(at, rest ? rest : at + strlen(at));
    }
    if (!end) break;
    at = end + 1;
  }
  free(text);
  printf("%d cases, %d failed\n", count, failed);
  return failed > 0;
}
