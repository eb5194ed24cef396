#!/bin/sh
# All that needs a GPU, in one command: kernels built for it, tests, benchmarks, compute-sanitizer.
#
#   tests/gpu/all.sh OUT                everything (about 40 minutes on an H100)
#   tests/gpu/all.sh OUT tests models   these steps only, in this order:
#     build     the kernels for this GPU
#     tests     those that can share the GPU, JOBS at a time; what failed before goes first
#     alone     those that measure time or take most of the memory, one at a time
#     hub       our kernels and a scaffold as kernel projects: built, published to a Hub on the
#               loopback interface, tested as `kernels.get_kernel` downloads them; needs the extra
#               `publish` of pyproject.toml
#     models    benchmarks/models.py
#     ops       `hfpatch bench`
#     sanitize  compute-sanitizer's four tools at once
#     two       sharded models and second devices; for two GPUs, and not among the default steps
#
# Called again with the same OUT it goes on where it was cut off: tests that passed there are left
# out (tests.jsonl), models that were measured too (models.json). Delete a file to begin anew.
# OUT gets, written as things happen: build.log, hub.log, tests.jsonl (a line per test), failures.txt,
# ops-*.json, host-*.json, models.json, sanitize-*.log, steps.jsonl (a line per step).
#
# PYTHON        the interpreter with torch and hfpatch's requirements
# JOBS          processes of tests (default: the cores but two, at most 16)
# LIMIT         seconds for each step, which is then interrupted (default: none)
# FIRST         tests whose ids contain one of these words go first
# PYTEST_ARGS   more arguments of pytest, such as -k rope
# MODELS_ARGS   of benchmarks/models.py, such as --compile blocks --only 'sdxl-unet'
# OPS_ARGS      of `hfpatch bench`, such as --op rms_norm
# SHARDS        processes for each tool of the sanitizer (default 3)
# HFPATCH_TEST_SEED=7   other random numbers (0: those of every run)
# HFPATCH_TEST_BUILD=0  takes hfpatch/_kernels as it is: leave out the step `build` then; the step
#               `hub` publishes that build instead of compiling all of it again, which takes minutes
set -u
cd "$(dirname "$0")/../.."
if [ $# -lt 1 ]; then
  echo "all.sh: expected a folder for the results, got nothing; call tests/gpu/all.sh OUT" >&2
  exit 2
fi
out=$1
shift
steps=${*:-build tests alone hub models ops sanitize}
for step in $steps; do
  case $step in
  build | tests | alone | hub | models | ops | sanitize | two) ;;
  *)
    echo "all.sh: expected build, tests, alone, hub, models, ops, sanitize or two, got \`$step\`" >&2
    exit 2
    ;;
  esac
done
python=${PYTHON:-python3}
first=${FIRST:-cuda_graphs,cuda_compat,single_blocks,joint_blocks,cuda_models,cuda_optim,rowops,backward}
cores=$(nproc 2>/dev/null || echo 4)
jobs=$((cores > 18 ? 16 : cores > 3 ? cores - 2 : 2))
mkdir -p "$out"
failed=
run() { # a step's name, its log, its command
  name=$1
  log=$out/$2
  shift 2
  start=$(date +%s)
  if [ -n "${LIMIT:-}" ]; then
    timeout --signal=INT --kill-after=20 "$LIMIT" "$@" >"$log" 2>&1
  else
    "$@" >"$log" 2>&1
  fi
  status=$?
  seconds=$(($(date +%s) - start))
  echo "$name: exit status $status, $seconds s, $log"
  echo "{\"step\": \"$name\", \"status\": $status, \"seconds\": $seconds}" >>"$out/steps.jsonl"
  [ $status -eq 0 ] || failed="$failed $name"
}
tests() { # a step's name, then arguments of pytest before the user's
  name=$1
  shift
  # one thread each: the references on the CPU would fight for the cores
  # shellcheck disable=SC2086
  run "$name" "$name.log" env OMP_NUM_THREADS=1 "$python" -m pytest -q -p no:cacheprovider \
    --results "$out/tests.jsonl" --failures "$out/failures.txt" --first "$first" "$@" \
    ${PYTEST_ARGS:-}
  tail -n 3 "$out/$name.log"
}
for step in $steps; do
  case $step in
  build) run build build.log "$python" -m hfpatch.kernel_build --out hfpatch/_kernels --archs native ;;
  tests)
    tests tests tests/gpu -n "${JOBS:-$jobs}" --maxschedchunk 4 --max-worker-restart 20 \
      -m "not alone and not slow"
    ;;
  alone) tests alone tests/gpu -m "alone or slow" ;;
  two) tests two tests/gpu -n 1 -k "distributed or second_device or mixed_devices" ;;
  hub)
    run hub hub.log "$python" -m pytest tests/hub/test_own_kernels.py tests/hub/test_kernel_new.py \
      -q -n 2 -p no:cacheprovider
    tail -n 3 "$out/hub.log"
    ;;
  models)
    eval "set -- ${MODELS_ARGS:-}"
    run models models.log "$python" benchmarks/models.py --resume --output "$out/models.json" "$@"
    tail -n 3 "$out/models.log"
    ;;
  ops)
    eval "set -- ${OPS_ARGS:-}"
    run ops ops.log "$python" -m hfpatch bench --device cuda --output "$out" "$@"
    tail -n 3 "$out/ops.log"
    ;;
  sanitize)
    run sanitize sanitize.log \
      env PYTHON="$python" LOGS="$out" SHARDS="${SHARDS:-3}" tests/gpu/sanitize.sh
    tail -n 12 "$out/sanitize.log"
    ;;
  esac
done
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
