from __future__ import annotations

import pytest
from fake_server import serving

from chatmill.errors import DataError, UsageError
from chatmill.rollout.files import Rollout, RolloutReplay, log_rollouts
from chatmill.rollout.generators import CompletionServer


def completion(request):
    ids = (request["prompt"] * 2)[: request["max_tokens"]]
    return 200, {
        "object": "text_completion",
        "model": request["model"],
        "choices": [{"index": 0, "text": "…", "token_ids": ids, "prompt_token_ids": request["prompt"]}],
    }


def test_a_server_answers_ids_with_ids_in_the_order_of_the_prompts():
    with serving(completion) as (url, asked):
        generate = CompletionServer(
            url, "m", 5, end_ids=(9,), temperature=0.7, top_p=0.9, seed=3, headers={"X-Key": "k"}
        )
        prompts = [[number, number + 1, number + 2] for number in range(40)]
        answers = generate(prompts, step=2, first_row=10)
    assert answers == [(prompt * 2)[:5] for prompt in prompts]
    assert {path for path, _, _ in asked} == {"/v1/completions"}
    assert {headers["X-Key"] for _, headers, _ in asked} == {"k"}
    request = next(request for _, _, request in asked if request["prompt"] == [0, 1, 2])
    seed = request.pop("seed")
    assert request == {
        "model": "m",
        "prompt": [0, 1, 2],
        "max_tokens": 5,
        "temperature": 0.7,
        "top_p": 0.9,
        "stop_token_ids": [9],
        "return_token_ids": True,
        "skip_special_tokens": False,
    }
    assert 0 <= seed < 2**31


def test_the_seed_of_a_request_depends_only_on_seed_step_and_row():
    def seeds(generate, step, first_row, count):
        generate([[7]] * count, step=step, first_row=first_row)
        return sorted(request["seed"] for _, _, request in asked[-count:])

    with serving(completion) as (url, asked):
        one, other = CompletionServer(url, "m", 1, seed=1), CompletionServer(url, "m", 1, seed=2)
        whole = seeds(one, 0, 0, 4)
        assert len(set(whole)) == 4
        assert sorted(seeds(one, 0, 0, 2) + seeds(one, 0, 2, 2)) == whole
        assert not set(seeds(one, 1, 0, 4)) & set(whole)
        assert not set(seeds(other, 0, 0, 4)) & set(whole)


def test_a_transient_fault_is_retried():
    def unsteady(request, number):
        return completion(request) if number > 2 else (503, {"error": "starting"})

    with serving(unsteady) as (url, asked):
        assert CompletionServer(url, "m", 3, pause=0.01)([[1, 2]], step=0) == [[1, 2, 1]]
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda request: (404, {"error": "no model m"}), "status 404: .*no model m.*serves m"),
        (lambda request: (500, {"error": "broken"}), "status 500"),
        (lambda request: (200, b"<html>"), "did not return a JSON object"),
        (lambda request: (200, b"[1]"), "did not return a JSON object"),
        (lambda request: (200, {"choices": []}), "no choices"),
        (
            lambda request: (200, {"choices": [{"text": "only text"}]}),
            'no token ids; .*return_token_ids; .*set server_api to "chat" or "completions"',
        ),
        (lambda request: (400, {"detail": "prompt must be a string"}), 'status 400.*server_api to "chat"'),
        (lambda request: (422, {"detail": "unexpected: return_token_ids"}), 'status 422.*server_api to "chat"'),
        (lambda request: (200, {"choices": [{"token_ids": ["1"]}]}), "no token ids"),
        (
            lambda request: (200, {"choices": [{"token_ids": [1], "prompt_token_ids": [8]}]}),
            "returned a different prompt than it received",
        ),
    ],
)
def test_an_invalid_reply_is_one_error_line(answer, said):
    with serving(answer) as (url, _), pytest.raises(DataError, match=said) as caught:
        CompletionServer(url, "m", 3, attempts=2, pause=0.01)([[1, 2], [3]], step=0)
    assert str(caught.value).startswith(url)
    assert "\n" not in str(caught.value)


def test_an_unreachable_server_is_one_error_line():
    with serving(completion) as (url, _):
        pass
    with pytest.raises(DataError, match="returned no answer"):
        CompletionServer(url, "m", 3, attempts=2, pause=0.01)([[1]], step=0)
    with pytest.raises(UsageError, match="is not a server URL"):
        CompletionServer("file:///etc", "m", 3)


# Logs.


def test_a_logged_run_is_replayed_from_its_log(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    with path.open("ab") as log:
        log_rollouts(log, [Rollout("a", [5, 6], [1], 0, 0), Rollout("b", [], [2], 0, 1)])
        log_rollouts(log, [Rollout("b", [7], [2], 4, 0), Rollout("a", [8], [1], 4, 1)])
    replay = RolloutReplay(path)
    assert replay([[1], [2]], step=0) == [[5, 6], []]
    assert replay([[1]], step=4, first_row=1) == [[8]]
    with pytest.raises(DataError, match="no rollout for step 1, row 0"):
        replay([[1]], step=1)
    with pytest.raises(DataError, match="the prompt of step 0, row 1 is different"):
        replay([[1], [3]], step=0)


def test_rollouts_without_step_and_row_cannot_be_replayed(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"id": "a", "response_token_ids": [1]}\n')
    with pytest.raises(DataError, match=r"rollouts.jsonl:1: the rollout has no step or row"):
        RolloutReplay(path)
