"""The sources file says what is wrong with it, and finds the files it names."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from services.ingest.asks import Tags
from services.ingest.places import find
from services.ingest.sampling import Sampling
from services.ingest.sources import Source, load
from services.kernel.errors import SettingsError

SCHEMAS = Path(__file__).parents[2] / "schemas" / "json"
FULL = """
sources:
  - name: chats
    files: [chats]
    max_new_tokens: 128
  - name: tools
    files: [tools.jsonl]
    max_new_tokens: 64
    format: messages
    samples: 3
    sampling: {temperature: 1, top_p: null, stop: [END]}
    chat_template_kwargs: {thinking: false}
    reasoning: {open: <t>, close: [5, 6]}
    tools: ignore
    revision: 2
"""


def declare(folder: Path, text: str) -> str:
    (folder / "chats").mkdir(exist_ok=True)
    (folder / "tools.jsonl").touch()
    path = folder / "sources.yaml"
    path.write_text(text)
    return str(path)


def test_every_key_arrives(tmp_path: Path) -> None:
    declared = load(declare(tmp_path, FULL))
    assert declared.folder == tmp_path
    assert declared.sources == [
        Source(name="chats", files=["chats"], max_new_tokens=128),
        Source(
            name="tools",
            files=["tools.jsonl"],
            max_new_tokens=64,
            format="messages",
            samples=3,
            sampling=Sampling(temperature=1.0, stop=["END"]),
            chat_template_kwargs={"thinking": False},
            reasoning=Tags("<t>", [5, 6]),
            tools="ignore",
            revision=2,
        ),
    ]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("max_tokens: 5", "unknown key 'max_tokens'; allowed are name, max_new_tokens, format, turns, samples"),
        ("sampling: {max_tokens: 5}", "unknown sampling parameter 'max_tokens'; allowed are temperature, top_p, top_k"),
        ("sampling: {n: 2}", "sampling.n cannot be set: use `samples`"),
        ("sampling: {sampling_seed: 2}", "sampling.sampling_seed cannot be set: it is derived from the record id"),
        ("sampling: {max_new_tokens: 2}", "sampling.max_new_tokens cannot be set: it is a key of the source itself"),
        ("sampling: {temperature: hot}", "`$.sampling.temperature`"),
        ("sampling: {top_p: 0}", "Expected `float` > 0"),
        ("sampling: {min_new_tokens: 11}", "sampling.min_new_tokens is above max_new_tokens"),
        ("sampling: greedy", "`$.sampling`"),
        ("samples: 0", "Expected `int` >= 1 - at `$.samples`"),
        ("turns: all", "Invalid enum value 'all' - at `$.turns`"),
        ("sampling: [{weight: 0}]", "Expected `float` > 0.0 - at `$.sampling[0].weight`"),
        ("sampling: []", "Expected `array` of length >= 1 - at `$.sampling`"),
        ("sampling: [{temperatur: 1}]", "unknown sampling parameter 'temperatur'; allowed are temperature"),
        ("sampling: [{n: 1}]", "sampling.n cannot be set"),
        ("sampling: [{min_new_tokens: 11}]", "sampling.min_new_tokens is above max_new_tokens"),
        ("control_tokens: maybe", "Invalid enum value 'maybe' - at `$.control_tokens`"),
        ("max_prompt_tokens: 0", "Expected `int` >= 1 - at `$.max_prompt_tokens`"),
        ("min_room: 0", "Expected `int` >= 1 - at `$.min_room`"),
        ("exclude: {a: b}", "at `$.exclude`"),
        ("exclude_words: 4", "Expected `int` >= 5 - at `$.exclude_words`"),
        ("metadata: some", "at `$.metadata`"),
        ("format: csv", "Invalid enum value 'csv' - at `$.format`"),
        ("reasoning: {open: x}", "missing required field `close`"),
        ("reasoning: {open: ' ', close: x}", "`$.reasoning.open`"),
        ("reasoning: {open: x, close: y, tag: z}", "unknown key of reasoning 'tag'; allowed are open, close"),
        ("max_new_tokens: null", "missing required field `max_new_tokens`"),
        ("name: a/b", "`$.name`"),
        ("files: [data.csv]", "'data.csv' is no folder and does not end in .jsonl, .json or .parquet"),
        ("files: ['data/*']", "'data/*' is no folder"),
        ("files: [missing.jsonl]", "there is no "),
        ("files: []", "it has neither `files` nor `http: true`"),
    ],
)
def test_a_wrong_key_is_named(tmp_path: Path, keys: str, message: str) -> None:
    fields = {"name": "s", "files": "[tools.jsonl]", "max_new_tokens": "10"}
    key, value = keys.split(": ", 1)
    fields[key] = value
    body = "\n    ".join(f"{key}: {value}" for key, value in fields.items())
    path = declare(tmp_path, f"sources:\n  - {body}\n")
    with pytest.raises(SettingsError) as caught:
        load(path)
    assert str(caught.value).startswith(f"TOKENHAUL_INGEST_SOURCES_FILE {path}: source ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must hold one key, `sources`"),
        ("sources: []", "declares no source"),
        ("sources: [a]", "source 1: must be a mapping of keys, not 'a'"),
        ("sources: []\nsource: []", "must hold one key, `sources`"),
        ("sources: [", "is not YAML"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load(declare(tmp_path, text))


def test_dates_and_numbers_as_keys_are_taken_as_they_are_written(tmp_path: Path) -> None:
    text = FULL.replace("{thinking: false}", "{date: 2026-07-26}").replace("temperature: 1", "logit_bias: {5: 1}")
    source = load(declare(tmp_path, text)).sources[1]
    assert source.chat_template_kwargs == {"date": "2026-07-26"}
    assert source.samplings == [(1.0, Sampling(temperature=None, top_p=None, stop=["END"], logit_bias={"5": 1.0}))]


def test_two_sources_of_one_name_and_a_missing_file(tmp_path: Path) -> None:
    twice = FULL.replace("name: tools", "name: chats")
    with pytest.raises(SettingsError, match="source 'chats': another source has this name"):
        load(declare(tmp_path, twice))
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        load(str(tmp_path / "nowhere.yaml"))


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    text = FULL.replace("samples: 3", "samples: 0").replace("max_new_tokens: 128", "max_tokens: 128")
    with pytest.raises(SettingsError) as caught:
        load(declare(tmp_path, text))
    assert len(str(caught.value).splitlines()) == 2


def test_files_are_found_once_in_the_order_of_the_patterns(tmp_path: Path) -> None:
    for name in (
        "b.jsonl",
        "a.jsonl",
        "in/c.jsonl",
        "in/deep/d.jsonl",
        "in/note.txt",
        "in/\udcff.jsonl",
        "in/.hidden/e.jsonl",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = find(["b.jsonl", "*.jsonl", "in", "**/d.jsonl", str(tmp_path / "a.jsonl")], tmp_path, [])
    assert list(found.entries) == ["b.jsonl", "a.jsonl", "in/c.jsonl", "in/deep/d.jsonl"]
    assert list(found.passed_over) == ["in/note.txt", "in/\udcff.jsonl"]


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "part[1].jsonl").touch()
    assert list(find(["part[1].jsonl"], tmp_path, []).entries) == ["part[1].jsonl"]


def test_nothing_outside_the_roots_is_read_wherever_links_lead(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "a.jsonl").touch()
    (inside / "link.jsonl").symlink_to(outside / "a.jsonl")
    (inside / "folder").symlink_to(outside)
    found = find(["in/**/*.jsonl"], tmp_path, [str(inside)])
    assert list(found.entries) == ["in/a.jsonl"]
    assert set(found.passed_over.values()) == {"it leaves TOKENHAUL_INGEST_ROOTS"}
    for pattern in ("out/*.jsonl", "in/../out/a.jsonl", str(outside), "in/folder/*.jsonl", "**/*.jsonl"):
        path = declare(tmp_path, f"sources: [{{name: s, files: ['{pattern}'], max_new_tokens: 1}}]")
        with pytest.raises(SettingsError, match="leaves TOKENHAUL_INGEST_ROOTS"):
            load(path, [str(inside)])


def test_a_source_that_is_not_enabled_is_checked_but_not_read(tmp_path: Path) -> None:
    off = "{name: unread, files: [later.jsonl], max_new_tokens: 1, enabled: false}"
    path = declare(tmp_path, f"sources: [{off}, {{name: read, files: [tools.jsonl], max_new_tokens: 1}}]")
    assert [source.name for source in load(path).sources] == ["read"]


def test_the_json_schema_of_the_file_accepts_and_refuses_as_we_do(tmp_path: Path) -> None:
    schema = json.loads((SCHEMAS / "sources.schema.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(yaml.safe_load(FULL.replace("top_p: null, ", "")))
    for wrong in ("max_tokens: 5", "samples: 0", "weight: -1", "sample: {seed: 1}", "sampling: {top_p: 2}"):
        text = f"sources: [{{name: s, files: [a.jsonl], max_new_tokens: 1, {wrong}}}]"
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(yaml.safe_load(text))
