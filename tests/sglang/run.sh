#!/usr/bin/env bash
# Install and start a real SGLang, run what needs one, stop it.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export SGLANG_CPU_HOME=${SGLANG_CPU_HOME:-$HOME/.cache/sglang-cpu} OMP_NUM_THREADS=1 PORT=${PORT:-30555}
"$here/lab/install.sh"
log=$(mktemp)
"$here/lab/start.sh" >"$log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null; wait $server 2>/dev/null; rm -f "$log"' EXIT
for _ in $(seq 150); do
  curl -sf "http://127.0.0.1:$PORT/ready" >/dev/null && break
  kill -0 $server || { tail -20 "$log"; exit 1; }
  sleep 2
done
export SGLANG_TEST_URL=http://127.0.0.1:$PORT SGLANG_TEST_LOG=$log
python -m pytest -q "$here/../contract" -k sglang --timeout 300
python -m pytest -q -s "$here/real_sglang.py" --timeout 3600
