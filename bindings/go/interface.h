/* What the functions in shims.h are made of. */
#ifndef HFPATCH_GO_INTERFACE_H_
#define HFPATCH_GO_INTERFACE_H_

#include <stdlib.h>
#include <string.h>

#include "hfpatch.h"

#define HFP_GO_MESSAGE 1024

/* `view`: device type and id, dtype code and bits, ndim, sizes, strides; NULL: no tensor. */
static inline int hfp_go_tensor(DLTensor *t, const int64_t *view, void *data) {
  if (!view) return 0;
  memset(t, 0, sizeof *t);
  t->data = data;
  t->device.device_type = (int32_t)view[0];
  t->device.device_id = (int32_t)view[1];
  t->dtype.code = (uint8_t)view[2];
  t->dtype.bits = (uint8_t)view[3];
  t->dtype.lanes = 1;
  t->ndim = (int32_t)view[4];
  t->shape = (int64_t *)view + 5;
  t->strides = t->shape + t->ndim;
  return 1;
}

/* The message belongs to this thread, and a goroutine may go on in another one. */
static inline int32_t hfp_go_status(char *message, int32_t status) {
  if (status != HFP_OK) {
    strncpy(message, hfp_last_error(), HFP_GO_MESSAGE - 1);
    message[HFP_GO_MESSAGE - 1] = '\0';
  }
  return status;
}

static inline int64_t hfp_go_size(char *message, int64_t found) {
  if (found < 0) hfp_go_status(message, (int32_t)found);
  return found;
}

#include "shims.h"

#endif
