#!/usr/bin/env bash
# Load exports of the demo with the real trainers. Nothing is skipped: what cannot be installed or imported fails.
#   TRAINERS_HOME  the environment of the trainers  (default: $HOME/.cache/tokenhaul/trainers)
#   TRAINERS_DEMO  rows of a demo to take           (default: the demo is run)
#   TORCH_SPEC     what to give pip for torch       (default: torch==2.11.0; on Linux that is a CUDA build, 2 to 5 GB)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=${TRAINERS_HOME:-$HOME/.cache/tokenhaul/trainers}
py=$venv/bin/python
[ -x "$py" ] || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$py" -m pip --disable-pip-version-check --quiet "$@"; }

# 1. The trainers, without what only training needs (SGLang, wandb, CUDA kernels): their loaders import none of it.
#    torch 2.11.0 and transformers 5.8.1 are what specforge 0.2.0 asks for, and within what speculators 0.9.0 allows.
read -ra torch <<<"${TORCH_SPEC:-torch==2.11.0}"
"$py" -c 'import torch' 2>/dev/null || pip install "${torch[@]}"
# shellcheck disable=SC2102
pip install 'transformers==5.8.1' 'datasets>=4,<=5.1.0' tqdm numpy pydantic pydantic-settings pyyaml safetensors \
  aiohttp httpx 'openai>=2' 'loguru>=0.7.2,<=0.7.3' protobuf psutil rich typer click pytest
pip install --no-deps specforge==0.2.0 speculators==0.9.0 hs-connectors==0.9.0

# 2. tokenhaul beside them, for the files only PyTorch writes. Its transformers is newer than the trainers': export
#    does without.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$py" - "$root/pyproject.toml" >"$work/needs.txt" <<'PY'
import sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
wanted = project["dependencies"] + project["optional-dependencies"]["export"]
print(*(name for name in wanted if not name.startswith(("transformers", "tokenizers"))), sep="\n")
PY
grep -vE '^(transformers|datasets|huggingface_hub|tokenizers|typer|tqdm)==' "$root/constraints.txt" >"$work/constraints.txt"
pip install -c "$work/constraints.txt" -r "$work/needs.txt"
pip install --no-deps -e "$root"

# 3. The demo: real prompts, a real model, a real Kafka. Then its exports, and the trainers' loaders on them.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_HOME=$work/hf PYTHONPATH=$root
if [ -z "${TRAINERS_DEMO:-}" ]; then
  export TRAINERS_DEMO=$work/demo
  python -m services.cli demo --out "$TRAINERS_DEMO" --max-new-tokens 64
fi
cd "$work"
"$py" -m pytest -q -c /dev/null --noconftest -p no:cacheprovider "$here/loaders.py"
