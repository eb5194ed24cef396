#!/bin/sh
# compute-sanitizer over the tests that visit every kernel: memcheck, racecheck, initcheck, synccheck.
#
#   tests/gpu/sanitize.sh                    all four tools
#   tests/gpu/sanitize.sh memcheck -k rope   one tool, further arguments go to pytest
#
# PYTHON            the interpreter with torch and hfpatch's requirements
# COMPUTE_SANITIZER the tool, where it is not on PATH (CUDA toolkit, or nvidia-cuda-sanitizer-api)
set -eu
cd "$(dirname "$0")/../.."
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
python=${PYTHON:-python}
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
$python -c "
import pathlib
from hfpatch import kernel_build
root = pathlib.Path.cwd()
kernel_build.build(root, root / 'hfpatch' / '_kernels', ('cuda',), archs='native')"
# Every tensor is an allocation of its own, so that a byte too far is seen.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
for tool in $tools; do
  echo "== $tool"
  "$sanitizer" --tool "$tool" --error-exitcode 99 --target-processes application-only \
    --print-limit 20 "$python" -m pytest tests/gpu/test_cuda_sanitize.py -m sanitize -q \
    -p no:cacheprovider --timeout 600 "$@"
done
