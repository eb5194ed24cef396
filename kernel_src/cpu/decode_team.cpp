// decode_team.cpp: the barrier of a decoding step's threads. Not in decode_step.cpp, whose code is compiled for
// several instruction sets.
#include "decode_team.h"

#if defined(__unix__) || defined(__APPLE__)
#include <sched.h>
#endif

namespace hfp {
namespace cpu {

void wait_for_team(DecodeTeam &team) {
  if (team.size == 1) return;
  const int32_t round = __atomic_load_n(&team.round, __ATOMIC_RELAXED);
  if (__atomic_add_fetch(&team.arrived, 1, __ATOMIC_ACQ_REL) == team.size) {
    __atomic_store_n(&team.arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&team.round, round + 1, __ATOMIC_RELEASE);
    return;
  }
  for (int64_t spins = 0; __atomic_load_n(&team.round, __ATOMIC_ACQUIRE) == round; ++spins) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
#if defined(__unix__) || defined(__APPLE__)
    if (spins > 2000) sched_yield();
#endif
  }
}

}  // namespace cpu
}  // namespace hfp
