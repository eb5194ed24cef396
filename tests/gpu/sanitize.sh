#!/bin/sh
# compute-sanitizer over the tests that visit every kernel: memcheck, racecheck, initcheck, synccheck.
#
#   tests/gpu/sanitize.sh                    all four tools
#   tests/gpu/sanitize.sh memcheck -k rope   one tool, further arguments go to pytest
#
# PYTHON            the interpreter with torch and hfpatch's requirements
# COMPUTE_SANITIZER the tool, where it is neither on PATH nor in CUDA_HOME (CUDA toolkit, or
#                   nvidia-cuda-sanitizer-api)
# LOGS              a folder: all tools run at once, and each writes sanitize-TOOL-SHARD.log there
# SHARDS            with LOGS: processes for each tool, each with a part of the tests (default 1)
set -eu
cd "$(dirname "$0")/../.."
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
python=${PYTHON:-python}
if ! command -v "$sanitizer" >/dev/null && [ -z "${COMPUTE_SANITIZER:-}" ]; then
  sanitizer=${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer
fi
if ! command -v "$sanitizer" >/dev/null; then
  echo "sanitize.sh: expected \`$sanitizer\` on PATH; install the CUDA toolkit, or set" \
    "COMPUTE_SANITIZER" >&2
  exit 2
fi
tools="memcheck racecheck initcheck synccheck"
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
  tools=$1
  shift
fi
# Built before, so that the compiler does not run under the tool.
[ "${HFPATCH_TEST_BUILD:-}" = 0 ] ||
  "$python" -m hfpatch.kernel_build --out hfpatch/_kernels --archs native
# Every tensor is an allocation of its own, so that a byte too far is seen.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 OMP_NUM_THREADS=1
flow=tests/gpu/test_cuda_sanitize.py::test_what_small_shapes_do_not_reach
check() { # a tool, then arguments of pytest
  tool=$1
  shift
  options= left_out=
  # A warp of row_flow.cuh arrives at a barrier by one lane, behind __syncwarp(), of which the machine
  # code keeps a branch alone: racecheck takes the other 31 lanes for unordered, and says so of just
  # their bytes. With a build where every lane arrives it finds nothing in these kernels.
  [ "$tool" != racecheck ] || left_out="--deselect $flow[topk-flow] --deselect $flow[sample-flow] \
    --deselect $flow[sample-greedy]"
  # torch asks the driver for things that it may not have; our own launches are checked by our code
  [ "$tool" != memcheck ] || options="--report-api-errors no"
  # shellcheck disable=SC2086
  HFPATCH_TEST_TOOL=$tool "$sanitizer" --tool "$tool" $options --error-exitcode 99 --target-processes application-only \
    --print-limit 20 "$python" -m pytest tests/gpu/test_cuda_sanitize.py -m sanitize -q \
    -p no:cacheprovider --timeout 600 $left_out "$@"
}
if [ -z "${LOGS:-}" ]; then
  for tool in $tools; do
    echo "== $tool"
    check "$tool" "$@"
  done
  exit
fi
shards=${SHARDS:-1}
started=
for tool in $tools; do
  shard=0
  while [ $shard -lt "$shards" ]; do
    check "$tool" --shard "$shard/$shards" "$@" >"$LOGS/sanitize-$tool-$shard.log" 2>&1 &
    started="$started $tool-$shard:$!"
    shard=$((shard + 1))
  done
done
status=0
for one in $started; do
  if wait "${one#*:}"; then
    echo "${one%:*}: nothing found"
  else
    code=$?
    status=1
    echo "${one%:*}: exit status $code; see $LOGS/sanitize-${one%:*}.log"
  fi
done
exit $status
