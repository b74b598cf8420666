"""A slow tokenizer with code of its own, in the manner of Kimi's: written for the tests, bytes are its vocabulary.

What it takes over from there: control tokens that transformers is not told of, defaults of apply_chat_template unlike
those of transformers, tools handed to the template as a text of its own making, and an `encode` that is another one as
soon as it is given any keyword.
"""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizer

SPECIAL = {"[BOS]": 256, "[EOS]": 257, "<|im_end|>": 258, "<|im_user|>": 259, "<|im_assistant|>": 260,
           "<|im_system|>": 261, "<|im_middle|>": 262, "<think>": 263, "</think>": 264, "<|reserved_token_265|>": 265}  # fmt: skip
_SPLIT = re.compile("(" + "|".join(map(re.escape, SPECIAL)) + ")")


class SlowKimiTokenizer(PreTrainedTokenizer):
    vocab_files_names = {}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, bos_token="[BOS]", eos_token="[EOS]", added_tokens_decoder=None, **kwargs):
        self.special_tokens = SPECIAL
        super().__init__(bos_token=bos_token, eos_token=eos_token, **kwargs)

    @property
    def vocab_size(self):
        return 256 + len(SPECIAL)

    def get_vocab(self):
        return {chr(byte): byte for byte in range(256)} | SPECIAL

    def encode(self, text, **kwargs):
        if kwargs:
            return [SPECIAL["[BOS]"], *super().encode(text, **kwargs)]
        ids = []
        for part in _SPLIT.split(text):
            ids += [SPECIAL[part]] if part in SPECIAL else list(part.encode())
        return ids

    def decode(self, token_ids, **kwargs):
        if kwargs:
            return super().decode(token_ids, **kwargs)
        names = {id: token.encode() for token, id in SPECIAL.items()}
        return b"".join(names.get(id) or bytes([id]) for id in token_ids).decode(errors="replace")

    def _tokenize(self, text, **kwargs):
        return [chr(byte) for byte in text.encode()]

    def _convert_token_to_id(self, token):
        return SPECIAL[token] if token in SPECIAL else ord(token)

    def _convert_id_to_token(self, index):
        return next((token for token, id in SPECIAL.items() if id == index), None) or chr(index)

    def save_vocabulary(self, save_directory, filename_prefix=None):
        return ()

    def apply_chat_template(
        self, conversation, tools=None, tokenize=False, add_generation_prompt=True, thinking=True, **kwargs
    ):
        if tools:
            names = sorted(tool["function"]["name"] for tool in tools)
            kwargs["tools_ts_str"] = "namespace functions { " + " ".join(f"type {name};" for name in names) + " }"
        return super().apply_chat_template(
            conversation, tools=tools, tokenize=tokenize, add_generation_prompt=add_generation_prompt,
            thinking=thinking, **kwargs,
        )  # fmt: skip
