#!/usr/bin/env bash
# Every measurement that needs one GPU, in one call: speed, a warm-started small base, verl.
#
#   benchmarks/one_gpu.sh DATA GGUF TOKENIZER OUT
#
# DATA: questions.jsonl.gz and corpus.jsonl.gz; GGUF: a small instruct model; TOKENIZER: a
# transformers tokenizer folder; OUT: logs, reports (JSON) and the times of the parts. PYTHON must
# import torch, sglang and verl (docs/offline-host.md). A part that fails leaves its log, the next
# one runs, and the exit status is 1. Nothing else may run on that GPU.
set -euo pipefail
[ $# -eq 4 ] || { sed -n 2,9p "$0"; exit 2; }
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
DATA=$(realpath "$1") GGUF=$(realpath "$2") TOKENIZER=$(realpath "$3")
mkdir -p "$4"
OUT=$(realpath "$4")
status=0

# Containers like to set it; every process of verl would then compile the same thousands of modules.
unset PYTHONDONTWRITEBYTECODE

"$PYTHON" -c "import torch, sglang, verl; assert torch.cuda.is_available(), 'torch sees no GPU'"

part() {  # part NAME SECONDS COMMAND...
  local name=$1 limit=$2 began=$SECONDS code=0
  shift 2
  echo "$name: started" | tee -a "$OUT/times.log"
  timeout "$limit" "$@" > "$OUT/$name.log" 2>&1 || code=$?
  echo "$name: $((SECONDS - began)) s, exit $code" | tee -a "$OUT/times.log"
  [ "$code" -eq 0 ] || status=1
}

part gpu 540 "$PYTHON" -m benchmarks.gpu --data "$DATA" --tokenizer "$TOKENIZER" \
  --live 160 --out "$OUT/gpu.json"
part base 240 "$PYTHON" -m flows.cli --home "$OUT/home" run --scale small \
  --set data.path="$DATA" --set model.path="$GGUF" --only prepare --only index --only base
bases=("$OUT"/home/artifacts/base/*/policy)
if [ -d "${bases[0]}" ]; then
  part verl 2700 "$PYTHON" -m benchmarks.verl_gpu --phase stages shape torch \
    --work "$OUT/verl" --out "$OUT" --model "${bases[0]}"
else
  echo "verl: not run, no base was trained ($OUT/base.log)" | tee -a "$OUT/times.log"
fi
exit "$status"
