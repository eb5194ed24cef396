#!/bin/sh
# All that needs a GPU, in one command: kernels built for it, tests, benchmarks, compute-sanitizer.
#
#   tests/gpu/all.sh OUT                everything (about 40 minutes on an H100)
#   tests/gpu/all.sh OUT tests models   these steps only: build, tests, hub, models, ops, sanitize
#
# The step `hub` builds our kernels and a scaffold as kernel projects, publishes the kernels to a Hub
# on the loopback interface, and runs the tests with what `kernels.get_kernel` downloads from it.
#
# OUT gets build.log, tests.log, hub.log, failures.txt (written as tests fail, so that a run that is
# cut off keeps them), ops-*.json, host-*.json, models.json, sanitize.log.
#
# PYTHON        the interpreter with torch and hfpatch's requirements
# JOBS          processes of tests (default 8)
# PYTEST_ARGS   more arguments of pytest, such as -k rope
# MODELS_ARGS   of benchmarks/models.py, such as --compile blocks --only 'sdxl-unet'
# OPS_ARGS      of `hfpatch bench`, such as --op rms_norm
set -u
cd "$(dirname "$0")/../.."
if [ $# -lt 1 ]; then
  echo "all.sh: expected a folder for the results, got nothing; call tests/gpu/all.sh OUT" >&2
  exit 2
fi
out=$1
shift
steps=${*:-build tests hub models ops sanitize}
python=${PYTHON:-python3}
mkdir -p "$out"
failed=
run() { # a step's name, its log, its command
  name=$1
  log=$out/$2
  shift 2
  start=$(date +%s)
  "$@" >"$log" 2>&1
  status=$?
  echo "$name: exit status $status, $(($(date +%s) - start)) s, $log"
  [ $status -eq 0 ] || failed="$failed $name"
}
for step in $steps; do
  case $step in
  build) run build build.log "$python" hfpatch/kernel_build.py --out hfpatch/_kernels --archs native ;;
  tests)
    # shellcheck disable=SC2086
    run tests tests.log "$python" -m pytest tests/gpu -q -n "${JOBS:-8}" -p no:cacheprovider \
      --failures "$out/failures.txt" ${PYTEST_ARGS:-}
    tail -n 3 "$out/tests.log"
    ;;
  hub)
    run hub hub.log "$python" -m pytest tests/hub/test_own_kernels.py tests/hub/test_kernel_new.py \
      -q -n 2 -p no:cacheprovider
    tail -n 3 "$out/hub.log"
    ;;
  models)
    eval "set -- ${MODELS_ARGS:-}"
    run models models.log "$python" benchmarks/models.py --output "$out/models.json" "$@"
    ;;
  ops)
    eval "set -- ${OPS_ARGS:-}"
    run ops ops.log "$python" -m hfpatch bench --device cuda --output "$out" "$@"
    ;;
  sanitize) PYTHON=$python run sanitize sanitize.log tests/gpu/sanitize.sh ;;
  *)
    echo "all.sh: expected build, tests, hub, models, ops or sanitize, got \`$step\`" >&2
    exit 2
    ;;
  esac
done
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
