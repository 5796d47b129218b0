#!/usr/bin/env bash
# Builds .venv-verl, the environment of the distributed trainer on the CPU. Can be called again.
# verl and the Prefect/MLflow environment disagree on transformers and huggingface_hub, so they
# stay apart and exchange files only (docs/verl.md).
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${MOOPD_VERL_VENV:-.venv-verl}
TORCH=${TORCH:-torch==2.13.0}
STAMP="$VENV/.ready"

if [ -x "$VENV/bin/python" ] && [ "$STAMP" -nt constraints-verl.txt ] \
  && [ "$STAMP" -nt scripts/verl_env.sh ]
then
  echo "verl environment is ready: $VENV"
  exit 0
fi

find_python() {
  local name
  for name in ${PYTHON:-python3.11 python3.12 python3}; do
    if "$name" -c 'import ensurepip, sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
      >/dev/null 2>&1
    then
      command -v "$name"
      return
    fi
  done
  echo "error: found no Python 3.11 or 3.12 that can make a virtual environment (looked for" \
    "${PYTHON:-python3.11 python3.12 python3}); install one or name it: PYTHON=... make verl-env" >&2
  return 1
}

pip() { "$VENV/bin/python" -m pip "$@" --disable-pip-version-check --retries 10; }

# Also made again where an interrupted call left half of one.
if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
  interpreter=$(find_python)
  "$interpreter" -m venv --clear "$VENV"
fi

# torch first and by exact version: a plain requirement would pull a CUDA build of several GB.
pip install -q "$TORCH"
pip install -q -c constraints-verl.txt "$TORCH" "verl[verl-core]==0.9.1" pydantic pyyaml \
  safetensors pytest
pip install -q --no-deps -e .
if "$VENV/bin/python" -m pip list 2>/dev/null | grep -qi '^nvidia-'; then
  echo "error: a CUDA build of torch was pulled into $VENV; expected the CPU build $TORCH." \
    "Remove $VENV and check that constraints-verl.txt pins torch." >&2
  exit 1
fi
"$VENV/bin/python" - <<'PY'
import importlib.metadata as m
for name in ("torch", "verl", "transformers", "tensordict", "TransferQueue", "ray"):
    print(f"{name}=={m.version(name)}")
PY
touch "$STAMP"
