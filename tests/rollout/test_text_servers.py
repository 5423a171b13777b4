from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fake_server import serving
from hypothesis import given
from hypothesis import strategies as st
from rollout_folders import CONTROL, TRUTH, run_settings, write_folder, write_model, write_truth

import chatmill.rollout.server
from chatmill.errors import DataError, UsageError
from chatmill.records import Message, Record
from chatmill.rollout import COORDINATES, RolloutConfig, open_task, prompt_lists, read_truth, task_prompts
from chatmill.rollout.files import GroundTruth
from chatmill.rollout.generators import TextServer, chat_request, encode_answers, generator_of
from chatmill.rollout.loop import train_rollouts
from chatmill.rollout.server import Server, read_answer

PROMPT = "<|im_start|>user\nscene<|im_end|>\n<|im_start|>assistant\n"
BOX = '{"object_1": {"desc": "cat", "bbox_2d": ["<|coord_0|>", "<|coord_7|>", "<|coord_70|>", "<|coord_999|>"]}}'


@cache
def task():
    with TemporaryDirectory() as place:
        return open_task(str(write_folder(Path(place), "chatml", special_coordinates=False)), None)


def question(*messages: Message, **fields) -> tuple[list[list[int]], list[Record]]:
    record = Record([Message("system", "Look."), *(messages or [Message("user", "scene")])], "a", **fields)
    return prompt_lists(task_prompts([GroundTruth(record, TRUTH)], task())), [record]


def text_server(url: str, api: str = "completions", **fields) -> TextServer:
    return TextServer(url, "m", 99, **{"attempts": 2, "pause": 0.0, "task": task(), "api": api, **fields})


def completion(text: str, reason: str | None = "stop", **usage) -> dict:
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}], "usage": usage or None}


def chat(content, reason: str | None = "stop", **message) -> dict:
    message = {"role": "assistant", "content": content, **message}
    return {"choices": [{"index": 0, "message": message, "finish_reason": reason}]}


# Requests.


def test_completions_send_the_prompt_as_text_and_standard_fields_only():
    prompts, records = question()
    with serving(lambda request: (200, completion("{}"))) as (url, asked):
        text_server(url, temperature=0.7, top_p=0.9)(prompts, step=0, records=records)
    [(path, _, request)] = asked
    assert path == "/v1/completions"
    seed = request.pop("seed")
    assert 0 <= seed < 2**31
    assert request == {
        "model": "m",
        "prompt": "<|im_start|>system\nLook.<|im_end|>\n" + PROMPT,
        "max_tokens": 99,
        "temperature": 0.7,
        "top_p": 0.9,
        "stop": ["<|im_end|>"],
        "stream": False,
    }


def test_chat_sends_the_messages_of_the_record():
    prompts, records = question()
    with serving(lambda request: (200, chat("{}"))) as (url, asked):
        text_server(url, "chat")(prompts, step=0, records=records)
        with pytest.raises(UsageError, match="pass one record per prompt"):
            text_server(url, "chat")(prompts, step=0)
    [(path, _, request)] = asked
    assert path == "/v1/chat/completions"
    assert request["messages"] == [{"role": "system", "content": "Look."}, {"role": "user", "content": "scene"}]
    assert request.keys() == {"model", "messages", "max_tokens", "temperature", "top_p", "seed", "stop", "stream"}


def test_tools_calls_and_variables_are_sent_in_openai_format():
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": [1, 2]}'}}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    messages = [
        {"role": "user", "content": "scene", "name": "Ada"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "a cat", "tool_call_id": "c1"},
    ]
    record = Record(messages, "a", tools=[tool], template_kwargs='{"enable_thinking":false}')
    messages[1]["content"] = ""
    assert chat_request(record) == {
        "messages": messages,
        "tools": [tool],
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_the_seed_of_a_request_depends_only_on_seed_step_and_row():
    server = Server("http://x/v1", "m", 1, seed=3)
    seeds = [
        each.sampled(step, row)["seed"]
        for each, step, row in ((server, 0, 0), (server, 0, 1), (server, 1, 0), (replace(server, seed=4), 0, 0))
    ]
    assert len(set(seeds)) == 4 and server.sampled(0, 1)["seed"] == seeds[1]


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_a_finished_answer_gets_an_end_of_turn_and_a_truncated_one_does_not(api):
    reply = completion if api == "completions" else chat
    texts = [("stop", BOX), ("stop", BOX + "<|im_end|>"), ("length", BOX), ("length", BOX + "<|im_end|>"), ("stop", "")]
    prompts, records = question()
    with serving(lambda request, number: (200, reply(*reversed(texts[number - 1])))) as (url, _):
        server = text_server(url, api, concurrency=1)
        answers = server(prompts * 5, step=0, records=records * 5)
    tokens = task().tokenizer
    plain = encode_answers([BOX], task())[0]
    assert answers == [
        [*plain, task().eos_id],
        # Some servers include the stop text in the answer.
        [*plain, task().eos_id],
        plain,
        # Only coordinates become control tokens.
        [*plain, *tokens.encode("<|im_end|>")],
        [task().eos_id],
    ]
    assert [id for id in plain if id in set(tokens.control_ids.values())] == [
        tokens.token_id(f"<|coord_{k}|>") for k in (0, 7, 70, 999)
    ]
    assert server.counts["as_text"] == 5


PIECES = st.sampled_from([*CONTROL, "<|coord_5|>", "<|coord_999|>", "<|coord_1000|>", "<|coord_07|>", "<|coord_", "|>"])
TEXTS = st.lists(st.one_of(PIECES, st.text(st.characters(codec="utf-8"), max_size=8)), max_size=8).map("".join)


@given(st.lists(TEXTS, max_size=4))
def test_tokens_of_an_answer_decode_to_it_and_only_coordinates_are_control_tokens(texts):
    tokens = task().tokenizer
    names = {id: token for token, id in tokens.control_ids.items()}
    for text, ids in zip(texts, encode_answers(texts, task()), strict=True):
        assert b"".join(tokens.piece(id) for id in ids) == text.encode()
        control = [names[id] for id in ids if id in names]
        assert control == [match[0] for match in re.finditer(r"<\|coord_(0|[1-9]\d?\d?)\|>", text, re.ASCII)]
        assert set(control) <= set(COORDINATES)


def test_coordinate_names_are_text_if_the_schema_has_no_coordinates(tmp_path):
    plain = open_task(str(write_folder(tmp_path / "model", "chatml")), None, fields=("name",))
    [ids] = encode_answers([BOX], plain)
    assert not set(ids) & set(plain.tokenizer.control_ids.values())
    assert plain.tokenizer.decode(ids) == BOX


def test_answers_with_a_different_token_count_on_the_server_are_reported():
    prompts, records = question()
    size = len(encode_answers([BOX], task())[0])
    # Two correct counts (with and without the end of turn), two wrong counts (too large and too small), and no count.
    counts = [size + 1, size, size + 2, size - 1, None]

    def answer(request, number):
        return 200, completion(BOX, completion_tokens=counts[number - 1], prompt_tokens=len(prompts[0]))

    with serving(answer) as (url, _):
        server = text_server(url, concurrency=1)
        server(prompts * 5, step=0, records=records * 5)
    assert server.counts == {"as_text": 5, "retokenized": 2}


# Streams.


def stream(parts: list[dict], *, end: bytes = b"data: [DONE]\n\n", line: bytes = b"\n") -> bytes:
    events = b"".join(b"data: " + json.dumps(part, ensure_ascii=False).encode() + b"\n\n" for part in parts)
    return (b": hello\n\nevent: message\n" + events + end).replace(b"\n", line)


@given(
    st.lists(st.text(st.characters(codec="utf-8"), max_size=9), min_size=1, max_size=9),
    st.sampled_from(["text", "content"]),
    st.booleans(),
    st.sampled_from([b"\n", b"\r\n"]),
    st.sampled_from([b"", b"data: [DONE]\n\n", b"data: [DONE]\n\ndata: no JSON\n\n"]),
)
def test_a_stream_equals_a_single_reply(texts, key, with_usage, line, end):
    def part(text, reason=None):
        held = {"text": text} if key == "text" else {"delta": {"content": text}}
        return {"choices": [{"index": 0, **held, "finish_reason": reason}]}

    usage = {"prompt_tokens": 5, "completion_tokens": 6} if with_usage else None
    parts = [*map(part, texts), part("", "length"), {"choices": [], "usage": usage}]
    held = {"text": "".join(texts)} if key == "text" else {"message": {"content": "".join(texts)}}
    whole = {"choices": [{"index": 0, **held, "finish_reason": "length"}], "usage": usage}
    assert read_answer(stream(parts, end=end, line=line)) == read_answer(json.dumps(whole).encode())


def test_a_stream_of_token_ids_is_concatenated():
    parts = [{"choices": [{"token_ids": [1, 2]}]}, {"choices": [{"token_ids": [3], "finish_reason": "stop"}]}]
    assert read_answer(stream(parts)).token_ids == [1, 2, 3]


def test_a_truncated_stream_is_requested_again():
    whole = stream([completion(BOX, None), completion("", "stop")], end=b"")
    prompts, records = question()
    # Cut the stream at several positions before the end of the event with the finish reason.
    last = whole.index(b"data: ", whole.index(b"object_1"))
    for stop in (1, 30, last, last + 9, len(whole) - 1):

        def answer(request, number, stop=stop):
            return 200, whole[: stop if number == 1 else None], {"Content-Type": "text/event-stream"}

        with serving(answer) as (url, asked):
            answers = text_server(url)(prompts, step=0, records=records)
        assert answers == [[*encode_answers([BOX], task())[0], task().eos_id]] and len(asked) == 2


# Errors.


NOISE = bytes(range(256)) * 12_000
"""3 MB."""


OK = b"HTTP/1.1 200 OK\r\n"


def raw(data: bytes):
    return lambda request: lambda wire: wire.write(data)


def reply(body, status: int = 200, **headers):
    return lambda request: (status, body, headers)


FAULTS = {
    "a status of 500": (reply({"error": "broken"}, 500), "status 500: .*broken"),
    "another model": (reply({"error": {"message": "no model m"}}, 404), "status 404: .*no model m.*serves m"),
    "a redirect": (reply(b"", 307, Location="http://127.0.0.1:9/"), "status 307"),
    "an HTML page": (reply(b"<!doctype html>\n<html><body>Sign in</body></html>"), "not return a JSON object; exp"),
    "a list": (reply([1, 2]), "did not return a JSON object"),
    "nothing": (reply(b""), "did not return a JSON object"),
    "deep nesting": (reply(b'{"choices":' * 100_000), "did not return a JSON object"),
    "an error in a reply": (reply({"error": {"message": "out of memory"}}), "reports an error .*out of memory"),
    "an error in a stream": (reply(stream([completion("a", None), {"error": "gone"}])), "reports an error .*gone"),
    "no choices": (reply({"object": "text_completion"}), "no choices"),
    "empty choices": (reply({"choices": []}), "no choices"),
    "choices of the wrong type": (reply({"choices": "text"}), "no choices"),
    "no text": (reply({"choices": [{"finish_reason": "length"}]}), "no text"),
    "text of the wrong type": (reply({"choices": [{"text": 5, "finish_reason": "stop"}]}), "no text"),
    "no finish_reason": (reply(completion(BOX, None)), "finish_reason null; expected"),
    "a filtered answer": (reply(completion(BOX, "content_filter")), 'finish_reason "content_filter"'),
    "reasoning": (reply(chat(BOX, reasoning_content="hm")), "returned part of the answer as reasoning_content"),
    "a tool call": (reply(chat(None, "tool_calls", tool_calls=[{}])), "returned part of the answer as tool_calls"),
    "another prompt": (
        reply(completion(BOX, prompt_tokens=3)),
        r'3 prompt tokens, but the training prompt has \d+;.*"chat"',
    ),
    "a lone surrogate": (reply(completion("\ud800")), "cannot be encoded"),
    "3 MB of noise as a reply": (reply(NOISE), "did not return a JSON object"),
    "3 MB of noise as a status": (reply(NOISE, 503), "status 503"),
    "3 MB of noise instead of HTTP": (raw(NOISE), "returned no answer"),
    "a closed connection": (raw(b""), "returned no answer"),
    "fewer bytes than announced": (raw(OK + b"Content-Length: 99\r\n\r\n{}"), "returned no answer .*IncompleteRead"),
    "a truncated chunk": (raw(OK + b"Transfer-Encoding: chunked\r\n\r\n9\r\n{"), "returned no answer .*IncompleteRead"),
    "a truncated stream": (reply(stream([completion(BOX, None)], end=b"")), "stream ended before the answer"),
}  # fmt: skip


@pytest.mark.parametrize(("answer", "said"), FAULTS.values(), ids=FAULTS)
def test_an_invalid_reply_is_one_error_line(answer, said):
    prompts, records = question()
    with serving(answer) as (url, _), pytest.raises(DataError, match=said) as caught:
        text_server(url)(prompts * 3, step=0, records=records * 3)
    message = str(caught.value)
    assert message.startswith(url) and message.isprintable() and len(message) < 500


def test_a_server_that_never_replies_or_never_finishes_is_one_error_line():
    prompts, records = question()
    over = threading.Event()

    def silent(request):
        return lambda wire: over.wait(60)

    def endless(request):
        def write(wire):
            wire.write(OK + b"\r\n")
            while not over.wait(0.01):
                wire.write(b" ")
                wire.flush()

        return write

    for answer, said in ((silent, "returned no answer .*timed out"), (endless, "took longer than 0.3 seconds")):
        with serving(answer) as (url, _):
            server = text_server(url, attempts=1, timeout=0.3)
            with pytest.raises(DataError, match=said):
                server(prompts, step=0, records=records)
            over.set()
        over.clear()


def test_an_endless_reply_is_not_kept_in_memory(monkeypatch):
    monkeypatch.setattr(chatmill.rollout.server, "MAX_REPLY_BYTES", 1 << 20)
    prompts, records = question()
    with serving(reply(NOISE)) as (url, _), pytest.raises(DataError, match="longer than 1 MiB"):
        text_server(url)(prompts, step=0, records=records)


def test_special_coordinate_tokens_are_refused_because_servers_omit_them_from_text(tmp_path):
    special = open_task(str(write_folder(tmp_path / "model", "chatml")), None)
    with pytest.raises(UsageError, match=r'<\|coord_0\|> is a special token.*"special": false.*server_api "tokens"'):
        text_server("http://x/v1", task=special)
    plain = open_task(str(tmp_path / "model"), None, fields=("name",))
    assert text_server("http://x/v1", task=plain).api == "completions"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("file:///etc", "is not a server URL"),
        ("localhost:8000/v1", "is not a server URL"),
        ("http://[::1/v1", "is not a server URL"),
        ("http://ada:secret@x/v1", "user name, password or query.*server_key_env"),
        ("http://x/v1?key=secret", "user name, password or query"),
    ],
)
def test_an_invalid_url_or_one_with_a_secret_is_refused(url, said):
    with pytest.raises(UsageError, match=said) as caught:
        text_server(url)
    assert "secret" not in str(caught.value)


# Keys.


KEY = "sk-5ecret-k3y"


def test_the_api_key_is_sent_but_neither_shown_nor_stored(tmp_path, monkeypatch):
    monkeypatch.setenv("MILL_KEY", KEY + "\n")
    model = write_model(tmp_path / "model")
    write_folder(model, "thinking", special_coordinates=False)
    write_truth(tmp_path / "truth.jsonl")
    settings = {
        **run_settings(tmp_path, model),
        "server_model": "m",
        "server_api": "chat",
        "server_key_env": "MILL_KEY",
    }

    def answer(request, number):
        return 200, chat(BOX)

    with serving(answer) as (url, asked):
        result = train_rollouts(RolloutConfig.from_mapping({**settings, "server": url}), tmp_path / "run", quiet=True)
    assert result.health.as_text == 12
    assert {headers["Authorization"] for _, headers, _ in asked} == {f"Bearer {KEY}"}
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 5 and not [path for path in files if KEY.encode() in path.read_bytes()]
    logged = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    said = {truth.record.id: truth.record.messages[0].content for truth in read_truth(tmp_path / "truth.jsonl")}
    assert sorted(request["messages"][0]["content"] for _, _, request in asked) == sorted(said[x["id"]] for x in logged)

    def refuse(request):
        return 401, {"error": f"Incorrect API key provided: {KEY}. Header: Bearer {KEY}"}

    with serving(refuse) as (url, _), pytest.raises(DataError, match=r"status 401: .*Incorrect API key") as caught:
        train_rollouts(RolloutConfig.from_mapping({**settings, "server": url}), tmp_path / "refused", quiet=True)
    assert KEY not in str(caught.value)


def test_a_redirect_does_not_carry_the_key_to_another_server(monkeypatch):
    prompts, records = question()
    with serving(lambda request: (200, completion(BOX))) as (other, asked):
        answer = reply(b"", 302, Location=f"{other}/completions")
        with serving(answer) as (url, _), pytest.raises(DataError, match="status 302"):
            text_server(url, headers={"Authorization": f"Bearer {KEY}"})(prompts, step=0, records=records)
    assert asked == []


@pytest.mark.parametrize(("value", "said"), [(None, "is not set"), (" ", "is empty"), ("a\x07b", "is empty")])
def test_a_missing_or_invalid_api_key_variable_is_named(tmp_path, monkeypatch, value, said):
    monkeypatch.delenv("MILL_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("MILL_KEY", value)
    settings = run_settings(tmp_path, tmp_path)
    config = RolloutConfig.from_mapping(
        {**settings, "server": "http://x/v1", "server_model": "m", "server_key_env": "MILL_KEY"}
    )
    with pytest.raises(UsageError, match=f"the environment variable MILL_KEY {said}; set it to the API key"):
        generator_of(config, None, task())
