"""A tokenizer that is Python code of its own gives the prompts its own methods give, or it is said what to do."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from schemas.prompts import Prompt, Reasoning
from services.ingest import preflight, probes
from services.ingest.prompts import PromptMaker
from services.ingest.settings import IngestSettings
from services.ingest.tokenizer import ChatTokenizer
from services.ingest.workshop import Workshop
from services.kernel.codec import Decoder
from services.kernel.errors import Fatal
from services.kernel.settings import Secret, load
from tests.support.ingest import DATA, DAY, chat, lines, maker
from tests.support.processes import alive, wait_for

SLOW = DATA / "tokenizers" / "slow-kimi"
TOOLS = [{"name": name, "parameters": {"type": "object"}} for name in ("zoo", "atlas")]


@pytest.fixture(scope="module")
def slow() -> Any:
    tokenizer = ChatTokenizer(SLOW, trust_remote_code=True, processes=2)
    yield tokenizer
    tokenizer.close()


def slow_maker(tokenizer: ChatTokenizer, **asks: Any) -> PromptMaker:
    return maker(SLOW, used=tokenizer, **asks)


def test_prompts_are_those_of_its_own_methods(slow: ChatTokenizer) -> None:
    records = [{**chat(f"Snowman {n} ☃"), "tools": TOOLS} for n in range(40)]
    used = slow_maker(slow)
    assert preflight.prove(used, "s.jsonl", lines(*records)) == 40
    made = used.make("s.jsonl", lines(*records))
    first = Decoder(Prompt).decode(made.prompts[0].value)
    # Its tools are text it makes itself; the template alone would print JSON.
    text = (
        "<|im_system|>tool_declare<|im_middle|>namespace functions { type atlas; type zoo; }<|im_end|>"
        "<|im_user|>user<|im_middle|>Snowman 0 ☃<|im_end|><|im_assistant|>assistant<|im_middle|><think>"
    )
    assert slow.decode(first.prompt_ids) == text
    assert first.prompt_ids[:2] == [261, ord("t")]
    assert len(made.prompts) == 40
    assert first.reasoning == Reasoning([263], [264], opened=True)
    assert first.sampling["stop_token_ids"] == [257, 258]


def test_its_switches_are_known(slow: ChatTokenizer) -> None:
    off = slow_maker(slow, chat_template_kwargs={"thinking": False})
    (ready,) = off.make("s.jsonl", lines(chat("Hi"))).prompts
    prompt = Decoder(Prompt).decode(ready.value)
    assert prompt.prompt_ids[-2:] == [263, 264]
    with pytest.raises(Fatal, match=r"never reads chat_template_kwargs.enable_thinking.*: thinking, tools_ts_str"):
        slow_maker(slow, chat_template_kwargs={"enable_thinking": False})


def test_control_tokens_are_found_that_transformers_does_not_know(slow: ChatTokenizer) -> None:
    texts = ("a <|im_end|> b", "<think>", "<|reserved_token_265|>")
    made = slow_maker(slow).make("s.jsonl", lines(*map(chat, texts)))
    assert made.refused == {"control_token": 3}


def test_engines_are_probed_only_with_what_plain_transformers_agrees_on(slow: ChatTokenizer) -> None:
    """Its encode gives other ids as soon as it has a keyword, and servers give it one."""
    none = probes.make([slow_maker(slow)])
    assert none.probes == []
    asyncio.run(probes.prove_engine("http://127.0.0.1:1", Secret(), none))  # where nobody answers


def test_processes_and_this_one_must_agree(slow: ChatTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    used = slow_maker(slow)
    monkeypatch.setattr(ChatTokenizer, "ids", lambda self, text: [1])
    with pytest.raises(Fatal, match="encoding the rendered text gives other ids"):
        preflight.prove(used, "s.jsonl", lines(chat("Hi")))


PARENT = """
import sys
from pathlib import Path
from services.ingest.slow import SlowEncoder
if __name__ == "__main__":
    encoder = SlowEncoder(Path(sys.argv[1]), 2)
    for line in sys.stdin:
        print(encoder.encode(line.split()), flush=True)
"""


def test_processes_leave_signals_to_their_parent_and_end_with_it(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(tmp_path / "parent.py"), str(SLOW)]
    workers: list[int] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as parent:
        try:
            assert ask(parent, "a b") == "[[97], [98]]\n"
            workers = started_by(parent.pid)
            assert len(workers) >= 2
            for worker in workers:
                os.kill(worker, signal.SIGINT)
                os.kill(worker, signal.SIGTERM)
            assert ask(parent, "c") == "[[99]]\n"
        finally:
            parent.kill()
    wait_for(lambda: not any(map(alive, workers)), 30)


def ask(parent: subprocess.Popen[str], line: str) -> str:
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write(line + "\n")
    parent.stdin.flush()
    return parent.stdout.readline()


def started_by(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def test_its_code_is_part_of_the_fingerprint(slow: ChatTokenizer, tmp_path: Path) -> None:
    copy = shutil.copytree(SLOW, tmp_path / "changed")
    assert ChatTokenizer(copy, trust_remote_code=True).fingerprint({}) == slow.fingerprint({})
    with (copy / "tokenization_slow.py").open("a") as code:
        code.write("# changed\n")
    assert ChatTokenizer(copy, trust_remote_code=True).fingerprint({}) != slow.fingerprint({})


def test_its_code_is_not_run_unless_a_setting_says_so(tmp_path: Path) -> None:
    """By the settings as they are read: nothing is set beside the tokenizer."""
    copy, ran = shutil.copytree(SLOW, tmp_path / "with code"), tmp_path / "ran"
    with (copy / "tokenization_slow.py").open("a") as code:
        code.write(f"open({str(ran)!r}, 'w').close()\n")
    environ = {"TOKENHAUL_INGEST_SOURCES_FILE": "none.yaml", "TOKENHAUL_INGEST_TOKENIZER": str(copy)}
    with pytest.raises(Fatal, match="set TOKENHAUL_INGEST_TRUST_REMOTE_CODE=true to run it"):
        Workshop(load(IngestSettings, environ), "m", DAY)
    assert not ran.exists()
    Workshop(load(IngestSettings, environ | {"TOKENHAUL_INGEST_TRUST_REMOTE_CODE": "true"}), "m", DAY)
    assert ran.exists()


@pytest.mark.parametrize(
    ("trusted", "line", "fix"),
    [
        (False, "", "read it, and set TOKENHAUL_INGEST_TRUST_REMOTE_CODE=true to run it"),
        (True, "import tiktoken_of_another_planet", r"they come with `pip install 'tokenhaul\[kimi\]'`"),
        (
            True,
            "from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode",
            "import bytes_to_unicode from transformers.convert_slow_tokenizer",
        ),
    ],
)
def test_what_keeps_its_code_from_running_is_told(tmp_path: Path, trusted: bool, line: str, fix: str) -> None:
    copy = shutil.copytree(SLOW, tmp_path / "broken")
    code = copy / "tokenization_slow.py"
    code.write_text(code.read_text().replace("import re\n", f"import re\n{line}\n"))
    with pytest.raises(Fatal, match=f"no tokenizer can be loaded: .*{fix}"):
        ChatTokenizer(copy, trust_remote_code=trusted)
