"""What ingest proves before its first prompt, and what it says when it cannot; `tokenhaul check` shows it."""

from __future__ import annotations

import datetime
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from schemas.control import Dataset
from schemas.prompts import Prompt
from services import cli
from services.ingest import preflight, probes, sources, tokenizer_files
from services.ingest.declaration import Declaration
from services.ingest.prompts import PromptMaker
from services.ingest.settings import IngestSettings
from services.ingest.settings import check as check_settings
from services.ingest.workshop import Workshop
from services.kernel.codec import Decoder
from services.kernel.errors import Fatal, SettingsError
from services.kernel.settings import Secret
from services.sink.rerender import Rerender, load_tokenizer
from tests.support.ingest import DAY, KIMI, SMOLLM2, chat, lines, maker, tokenizer, with_template

DATED = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ strftime_now('%d %b %Y') }}:{% endif %}"
)


def declared(folder: Path, keys: str = "", *records: Any) -> sources.Sources:
    (folder / "s.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "sources.yaml").write_text(f"sources: [{{name: s, files: [s.jsonl], max_new_tokens: 9{keys}}}]")
    return sources.load(str(folder / "sources.yaml"))


def settings(directory: Path | str = SMOLLM2, **more: Any) -> IngestSettings:
    return IngestSettings(sources_file="", tokenizer=str(directory), **more)


def prepare(used: IngestSettings, from_: sources.Sources) -> dict[str, PromptMaker]:
    return preflight.prepare(Workshop(used, "m", DAY), from_)


@contextmanager
def engine(answer: Any, status: int = 200) -> Iterator[str]:
    """A server that answers every text of /v1/tokenize with `answer(text)`; it keeps the authorization it was sent."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            sent.append((self.path, body["add_special_tokens"], self.headers.get("authorization")))
            data = json.dumps({"tokens": [answer(text) for text in body["prompt"]]}).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    sent: list[Any] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
        assert all(path == "/v1/tokenize" and special is False for path, special, _ in sent)
        assert {who for _, _, who in sent} <= {None, "Bearer secret"}
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_eight_rendered_prompts_are_probes() -> None:
    made = probes.make([maker(KIMI), maker(SMOLLM2)])
    assert len(made.probes) == 8
    assert made.tokenizer_fingerprint == maker(KIMI).request.tokenizer_fingerprint
    for probe in made.probes:
        assert probe.text.startswith("<|im_user|>user<|im_middle|>")
        assert probe.ids == tokenizer(KIMI).plain_text(probe.text)
    with pytest.raises(Fatal, match="no source"):
        probes.make([])


def test_an_engine_that_agrees_lets_ingest_start(tmp_path: Path) -> None:
    with engine(tokenizer(SMOLLM2).plain_text) as url:
        used = settings(engine=url + "/", engine_api_key=Secret("secret"))
        assert list(prepare(used, declared(tmp_path))) == ["s"]


def test_an_engine_that_makes_other_ids_stops_the_start(tmp_path: Path) -> None:
    with (
        engine(lambda text: [*tokenizer(SMOLLM2).plain_text(text)[:-1], 7]) as url,
        pytest.raises(Fatal, match=rf"TOKENHAUL_INGEST_ENGINE {url}: its tokenizer is not the one of the prompts"),
    ):
        prepare(settings(engine=url), declared(tmp_path))


def test_an_engine_that_does_not_answer_stops_the_start(tmp_path: Path) -> None:
    with engine(lambda text: "x") as url, pytest.raises(Fatal, match="does not say how it tokenizes"):
        prepare(settings(engine=url), declared(tmp_path))
    with pytest.raises(Fatal, match="does not say how it tokenizes"):
        prepare(settings(engine=url), declared(tmp_path))  # nobody listens there any more


def test_two_bos_stop_the_start(tmp_path: Path) -> None:
    turns = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '>' if add_generation_prompt }}"
    template = "{{ bos_token }}{{ bos_token }}" + turns
    directory = with_template(template, tmp_path, SMOLLM2)
    with pytest.raises(Fatal, match=r"source 's': prompts begin with BOS twice \(id 1\): chat template and tokenizer"):
        preflight.prove_template(maker(directory))


def test_ids_beyond_the_vocabulary_stop_the_start() -> None:
    with pytest.raises(Fatal, match=r"gives id \d+, vocab_size is 9000: an engine would die of it"):
        preflight.prove_template(maker(vocab=9000))


def test_the_date_a_template_prints_stays_and_is_recorded(tmp_path: Path) -> None:
    directory = with_template(DATED, tmp_path)
    used = maker(directory)
    (ready,) = used.make("s.jsonl", lines(chat("Hi"))).prompts
    prompt = Decoder(Prompt).decode(ready.value)
    assert used.tokenizer.decode(prompt.prompt_ids) == "Hi26 Jul 2026:"
    assert prompt.chat_template_kwargs == {"strftime_now": DAY}
    tomorrow = maker(directory, chat_template_kwargs=date("2026-07-27"))
    assert prompt.tokenizer_fingerprint != tomorrow.request.tokenizer_fingerprint
    assert maker(KIMI).request.chat_template_kwargs == {}


def test_verify_renders_a_dated_prompt_again(tmp_path: Path) -> None:
    directory = with_template(DATED, tmp_path)
    ids = tokenizer(KIMI).ids("Hi26 Jul 2026:")
    row = {
        "messages": json.dumps(chat("Hi")["messages"]),
        "tools": None,
        "input_ids": [*ids, 5],
        "prompt_length": len(ids),
    }
    rows = [{**row, "chat_template_kwargs": json.dumps(date(day))} for day in (DAY, "2026-07-27")]
    found = Rerender(load_tokenizer(directory, trust_remote_code=False)).check(pa.Table.from_pylist(rows))
    assert [number for number, _ in found] == [1]


def date(day: str) -> dict[str, str]:
    return {"strftime_now": day}


def test_a_source_may_say_another_date(tmp_path: Path) -> None:
    directory = with_template(DATED, tmp_path)
    used = maker(directory, chat_template_kwargs=date("2024-01-02"))
    (item,) = used.render(lines(chat("Hi")))
    assert getattr(item, "text", None) == "Hi02 Jan 2024:"
    with pytest.raises(Fatal, match=r"chat_template_kwargs.strftime_now 'today' is no date like 2026-07-26"):
        maker(directory, chat_template_kwargs=date("today"))
    with pytest.raises(Fatal, match=r"never reads chat_template_kwargs.strftime_now"):
        maker(KIMI, chat_template_kwargs=date(DAY))


def test_the_setting_wins_over_the_day_of_the_dataset(tmp_path: Path) -> None:
    directory = with_template(DATED, tmp_path)
    (used,) = prepare(settings(directory, date="2025-05-05"), declared(tmp_path)).values()
    assert used.request.chat_template_kwargs == {"strftime_now": "2025-05-05"}


def test_a_dataset_keeps_the_day_it_was_created_on_and_its_tokenizer(tmp_path: Path) -> None:
    directory = with_template(DATED, tmp_path)
    created = datetime.datetime(2026, 3, 4, 23, 59, tzinfo=datetime.UTC).timestamp()
    dataset = Dataset(name="d", model="m", partitions=1, created_at=created)
    now = Declaration.prepare(settings(directory), declared(tmp_path), dataset)
    assert now.requests["s"].chat_template_kwargs == {"strftime_now": "2026-03-04"}
    assert len(now.probes.probes) == 8
    edited = Declaration.prepare(settings(directory), declared(tmp_path), dataset, now.workshop)
    assert edited.makers["s"].tokenizer is now.makers["s"].tokenizer


def test_benchmarks_are_kept_out_from_the_file_beside_the_sources(tmp_path: Path) -> None:
    (tmp_path / "bench.txt").write_text("Hi there\n")
    made = declared(tmp_path, ", exclude: bench.txt", chat("hi THERE"), chat("Ho"))
    (used,) = prepare(settings(), made).values()
    assert used.make("s.jsonl", lines(chat("hi THERE"))).refused == {"excluded": 1}
    with pytest.raises(SettingsError, match=r"source 's': exclude: .*missing\.txt cannot be read"):
        prepare(settings(), declared(tmp_path, ", exclude: missing.txt"))


@pytest.mark.parametrize(
    ("tokenizer", "revision", "message"),
    [
        ("/no/such/place", "", "is no directory, and no id of a model on the hub"),
        ("org/model", "", "set TOKENHAUL_INGEST_TOKENIZER_REVISION to the commit you mean"),
    ],
)
def test_a_tokenizer_that_is_nowhere_is_told_before_a_start(tokenizer: str, revision: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check_settings(settings(tokenizer, tokenizer_revision=revision))


def test_a_tokenizer_comes_from_the_hubs_cache(tmp_path: Path) -> None:
    """As the hub's client lays it out; the network is not asked for a commit that is there."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(SMOLLM2, tmp_path / "models--org--model" / "snapshots" / commit)
    used = settings("org/model", tokenizer_revision=commit, tokenizer_cache=str(tmp_path))
    (made,) = prepare(used, declared(tmp_path, "", chat("Hi"))).values()
    assert made.request.tokenizer_fingerprint == maker(SMOLLM2).request.tokenizer_fingerprint
    with pytest.raises(Fatal, match=r"org/other at 0123.* cannot be had from the hub"):
        tokenizer_files.locate(settings("org/other", tokenizer_revision=commit, tokenizer_cache=str(tmp_path)))


def check(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str, tokenizer: Path = KIMI) -> int:
    monkeypatch.setenv("TOKENHAUL_INGEST_SOURCES_FILE", str(folder / "sources.yaml"))
    monkeypatch.setenv("TOKENHAUL_INGEST_TOKENIZER", str(tokenizer))
    return cli.main(["check", *arguments])


def test_check_shows_a_prompt_of_each_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    declared(tmp_path, "", {"broken": 1}, {"id": "q", **chat("Hi")})
    assert check(tmp_path, monkeypatch) == 0
    shown = capsys.readouterr().out
    assert "source s\n  line 2, turn 0, conversation q\n" in shown
    assert "  | <|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|><think>\n" in shown
    assert "163588 '<|im_assistant|>' 69702 'assistant' 163601 '<|im_middle|>' 163606 '<think>'" in shown
    assert "reasoning: opened by the prompt; from [163606] to [163607]" in shown
    assert "'stop_token_ids': [163585, 163586], 'max_new_tokens': 9" in shown


def test_check_of_an_empty_source_shows_a_greeting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    declared(tmp_path)
    assert check(tmp_path, monkeypatch, tokenizer=SMOLLM2) == 0
    shown = capsys.readouterr().out
    assert "holds no record that can be asked yet" in shown
    assert "reasoning: none" in shown


def test_check_says_what_keeps_ingest_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    declared(tmp_path, ", chat_template_kwargs: {enable_thinking: false}")
    assert check(tmp_path, monkeypatch) == 3
    assert "never reads chat_template_kwargs.enable_thinking" in capsys.readouterr().err
    declared(tmp_path)
    with engine(lambda text: [1]) as url:
        assert check(tmp_path, monkeypatch, "--engine", url) == 3
    assert f"TOKENHAUL_INGEST_ENGINE {url}: its tokenizer is not the one" in capsys.readouterr().err
