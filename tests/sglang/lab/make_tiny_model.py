#!/usr/bin/env python3
"""Write a random 2-layer Llama (hidden 64) with SmolLM2's tokenizer: about 350 tokens/s, for protocol tests.

    python make_tiny_model.py OUT_DIR [--tokenizer DIR]

Greedy output is meaningless (mostly newlines), and that is the point: long, cheap, repeatable generations.
"""

import argparse
import os
import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def main(out: Path, tokenizer: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(part)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, part / name)
    os.replace(part, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, default=HERE.parents[2] / "services" / "local" / "data" / "smollm2")
    args = parser.parse_args()
    main(args.out, args.tokenizer)
