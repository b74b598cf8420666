#!/usr/bin/env bash
# Run one SGLang server in the foreground; SIGTERM drains and stops it. Extra arguments go to sglang.launch_server.
#   SGLANG_CPU_HOME  as in install.sh
#   MODEL            smollm2-135m (default), tiny-llama, or a path
#   PORT             default 30000
set -euo pipefail

home=${SGLANG_CPU_HOME:-$HOME/.cache/sglang-cpu}
model=${MODEL:-smollm2-135m}
case $model in */*) ;; *) model=$home/models/$model ;; esac

export SGLANG_USE_CPU_ENGINE=1                    # turns on SGLang's is_cpu() paths
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}      # more threads than free cores: 28 tok/s falls to 0.5-5
export HF_HUB_OFFLINE=1                           # everything is local; do not wait for a hub

# torch_native and pytorch: attention and sampling in plain PyTorch instead of GPU kernels.
# --disable-overlap-schedule belongs to the set of flags that was seen running; other sets were not explored.
# --grammar-backend none: json_schema and regex requests get a 400 here.
# --log-requests-level 3: every answer with its ids, which tests hold rows against.
# --mem-fraction-static, --max-total-tokens: keep the KV pool small (about 2.9 GB summed RSS with SmolLM2).
exec "$home/venv/bin/python" -m sglang.launch_server --model-path "$model" \
  --device cpu --attention-backend torch_native --sampling-backend pytorch \
  --disable-overlap-schedule --grammar-backend none \
  --host 127.0.0.1 --port "${PORT:-30000}" --log-requests --log-requests-level 3 \
  --mem-fraction-static 0.3 --max-total-tokens 32768 --max-running-requests 8 --enable-metrics "$@"
