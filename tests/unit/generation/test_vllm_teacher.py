"""What is asked of a teacher's servers, and which answers are taken. The answers are those of a vLLM 0.32 server."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from prefrl.errors import AbsentServerError, ConfigError, GenerationError
from prefrl.generation.vllm import asking
from prefrl.generation.vllm.teacher import TeacherServers, teacher_key
from prefrl.http import HttpError, Overdue, Refused, Unreachable
from prefrl.options.distillation import TeacherServerParams
from prefrl.types import TokenBatch
from tests.patience import PATIENCE
from tests.threads import on_ranks
from tests.unit.generation.scripted import A, B, ScriptedHttp

# Of the prompt 40, 24, 84, 43 with prompt_logprobs=3, without what is not read.
RECORDED = json.loads("""
{"id":"cmpl-a248ca29ba02790b","object":"text_completion","model":"m","choices":[{"index":0,"text":"y","logprobs":null,
"finish_reason":"length","token_ids":[96],"prompt_logprobs":[null,
{"24":{"logprob":-1.5134073495864868,"rank":1,"decoded_token":"1"},
"70":{"logprob":-1.67304527759552,"rank":2,"decoded_token":"_"},
"120":{"logprob":-2.088560104370117,"rank":3,"decoded_token":""}},
{"84":{"logprob":-7.80540132522583,"rank":57,"decoded_token":"m"},
"22":{"logprob":-0.20572763681411743,"rank":1,"decoded_token":"/"},
"15":{"logprob":-3.4887661933898926,"rank":2,"decoded_token":"("},
"82":{"logprob":-3.8357481956481934,"rank":3,"decoded_token":"k"}},
{"43":{"logprob":-1.8183364868164062,"rank":2,"decoded_token":"D"},
"22":{"logprob":-1.7055845260620117,"rank":1,"decoded_token":"/"},
"24":{"logprob":-2.253730297088623,"rank":3,"decoded_token":"1"}}],
"prompt_token_ids":[40,24,84,43]}],"usage":{"prompt_tokens":4,"total_tokens":5,"completion_tokens":1}}
""")
TOO_MANY = "Requested prompt logprobs of 3, which is greater than max allowed: 2 (parameter=prompt_logprobs, value=3)"
CARD = {"id": "m", "object": "model", "max_model_len": 8}


def rows(num_rows: int = 1) -> TokenBatch:
    """Each with the context 40, 24 and the response 84, 43."""
    return TokenBatch(
        prompt_ids=torch.tensor([40, 24]),
        prompt_lengths=(2,),
        prompt_index=(0,) * num_rows,
        response_ids=torch.tensor([84, 43] * num_rows),
        response_lengths=(2,) * num_rows,
        trainable=torch.ones(2 * num_rows, dtype=torch.bool),
        group_index=(0,) * num_rows,
    )


class Servers:
    """Two servers that answer as recorded, but for what a test changes."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {"/v1/models": {"data": [CARD]}, "/tokenize": {"count": 2, "tokens": [5, 6]}}
        self.score: Callable[[], Any] = lambda: RECORDED
        self.gone: set[str] = set()
        self.bodies: list[Any] = []

    def answer(self, url: str, path: str, json: Any) -> Any:
        if url in self.gone:
            raise Unreachable("no connection")
        if path == "/v1/completions":
            self.bodies.append(json)
            return self.score()
        answer = self.answers.get(path)
        if isinstance(answer, HttpError):
            raise answer
        return answer


Make = Callable[..., TeacherServers]


@pytest.fixture
def servers() -> Servers:
    return Servers()


@pytest.fixture
def make(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(asking, "_BACKOFF_SECONDS", 0.01)
    made: list[TeacherServers] = []

    def make(**params: Any) -> TeacherServers:
        given = TeacherServerParams(**{"top_k": 3, "request_timeout": PATIENCE, "server_timeout": PATIENCE} | params)
        made.append(TeacherServers([A, B], given, vocab_size=128, http=ScriptedHttp(servers.answer)))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def teacher(make: Make) -> TeacherServers:
    made = make()
    made.recover()
    return made


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[], Any]:
    """The recorded answer after a change of its only choice."""

    def answer() -> Any:
        other = copy.deepcopy(RECORDED)
        change(other["choices"][0])
        return other

    return answer


def raises(error: Exception) -> Callable[[], Any]:
    def answer() -> Any:
        raise error

    return answer


def test_the_likeliest_tokens_come_in_order_whether_the_token_itself_is_one_of_them_or_not(
    teacher: TeacherServers, servers: Servers
) -> None:
    top = teacher.top_logprobs(rows(2))
    assert top.ids.tolist() == [[22, 15, 82], [22, 43, 24]] * 2
    expected = torch.tensor(
        [
            [-0.20572763681411743, -3.4887661933898926, -3.8357481956481934],
            [-1.7055845260620117, -1.8183364868164062, -2.253730297088623],
        ]
    )
    assert torch.equal(top.logprobs, expected.repeat(2, 1))
    assert len(servers.bodies) == 2
    assert servers.bodies[0]["prompt"] == [40, 24, 84, 43]
    assert servers.bodies[0]["prompt_logprobs"] == 3
    assert servers.bodies[0]["model"] == "m"


def test_a_process_without_rows_gets_no_log_probs(teacher: TeacherServers, servers: Servers) -> None:
    top = teacher.top_logprobs(rows().select([]))
    assert (top.ids.shape, top.ids.dtype, top.logprobs.shape, servers.bodies) == ((0, 3), torch.int32, (0, 3), [])


def test_every_rank_asks_for_its_own_rows_and_all_fail_with_one(make: Make, servers: Servers) -> None:
    teachers = [make(), make()]

    def work(rank: int) -> tuple[int, ...]:
        teacher = teachers[rank]
        teacher.recover()
        teacher.check_tokenizer({"Is it?": [5, 6]})
        return teacher.top_logprobs(rows(2).select([0] * rank)).ids.shape

    assert on_ranks(2, work) == [(0, 3), (2, 3)]
    servers.score = raises(Refused("no", status=400))
    errors = on_ranks(2, work)
    assert [type(error) for error in errors] == [GenerationError] * 2
    assert str(errors[0]) == str(errors[1])
    assert "refuses: no" in str(errors[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: one["prompt_logprobs"][3].pop("24"), "it has log-probs of 2 likely tokens at token 3, not 3"),
        (lambda one: one["prompt_logprobs"][2].pop("15"), "it has log-probs of 2 likely tokens at token 2, not 3"),
        (lambda one: one["prompt_logprobs"][2].update({"9": {}}), "it has log-probs of 4 likely tokens at token 2"),
        (lambda one: one.update(prompt_token_ids=[40, 24, 84, 42]), "it scores the tokens [40, 24, 84, 42], but"),
        (lambda one: one["prompt_logprobs"].pop(), "it scores 3 tokens, but 4 were sent"),
        (lambda one: one["prompt_logprobs"][3].pop("43"), "it has no log-prob of token 3, which is 43"),
        (lambda one: one.update(prompt_logprobs=None), "a field is missing or malformed"),
        (
            lambda one: one["prompt_logprobs"][2].update({"128": one["prompt_logprobs"][2].pop("15")}),
            "it has the token 128, but the student's vocabulary is 0..127",
        ),
        (lambda one: one["prompt_logprobs"][2]["15"].update(logprob=-9999.0), "it has the log-prob -9999.0"),
        (lambda one: one["prompt_logprobs"][2]["15"].update(logprob=2.0), "it has the log-prob 2.0"),
        (lambda one: one["prompt_logprobs"][2]["15"].update(logprob=float("nan")), "it has the log-prob nan"),
        (
            lambda one: one["prompt_logprobs"][2]["15"].update(logprob=-0.1),
            "the probabilities of a token's likeliest successors add up to 1.74",
        ),
    ],
)
def test_an_answer_that_does_not_fit_the_request_is_refused(
    change: Callable[[dict[str, Any]], object], words: str, teacher: TeacherServers, servers: Servers
) -> None:
    servers.score = changed(change)
    with pytest.raises(GenerationError) as raised:
        teacher.top_logprobs(rows())
    assert f"text 0 of process 0: the teacher's server at {A} answers wrongly: {words}" in str(raised.value)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            Refused(TOO_MANY, status=400),
            f"refuses: {TOO_MANY}. Start the server with `--max-logprobs 3`, or lower top_k in teacher_server_kwargs",
        ),
        (Refused("Token id 420000 is out of vocabulary", status=400), "refuses: Token id 420000"),
        (
            Overdue("late"),
            "is healthy but failed several requests for the log-probs. Last error: late. If log-probs take that long, "
            "raise request_timeout in teacher_server_kwargs.",
        ),
    ],
)
def test_a_request_that_fails_says_which_option_would_help(
    error: Exception, words: str, teacher: TeacherServers, servers: Servers
) -> None:
    servers.score = raises(error)
    with pytest.raises(GenerationError) as raised:
        teacher.top_logprobs(rows())
    assert words in str(raised.value)


def test_a_text_that_is_too_long_for_the_server_is_not_sent(make: Make, servers: Servers) -> None:
    adapter = {"id": "adapter", "object": "model", "max_model_len": None, "parent": "m"}
    servers.answers["/v1/models"] = {"data": [CARD | {"max_model_len": 4}, adapter]}
    teacher = make()
    teacher.recover()
    with pytest.raises(GenerationError, match=r"takes texts of at most 3 tokens, and this one has 4\. Start it with"):
        teacher.top_logprobs(rows())
    assert servers.bodies == []


def test_texts_have_the_length_that_the_smallest_server_takes_but_for_the_token_that_it_adds(
    make: Make, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = {A: 8, B: 4}
    monkeypatch.setattr(servers, "answer", lambda url, *_: {"data": [CARD | {"max_model_len": lengths[url]}]})
    teacher = make()
    teacher.recover()
    assert teacher.longest_text == 3


def test_a_text_that_a_server_cannot_score_now_is_sent_again(teacher: TeacherServers, servers: Servers) -> None:
    answers = iter([raises(Refused("out of memory", status=500))])
    servers.score = lambda: next(answers, lambda: RECORDED)()
    assert teacher.top_logprobs(rows()).ids.shape == (2, 3)


def test_texts_that_are_lost_with_all_servers_are_sent_again_when_these_are_back(
    teacher: TeacherServers, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = teacher._connect
    servers.gone = {A, B}

    def come_back() -> None:
        servers.gone = set()
        connect()

    monkeypatch.setattr(teacher, "_connect", come_back)
    assert teacher.top_logprobs(rows(3)).ids.shape == (6, 3)
    assert servers.gone == set(), "nobody waited for the servers"


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (Refused("no", status=401), GenerationError, "refuses the key: no. Set api_key_env in teacher_server_kwargs"),
        (Refused("Not Found", status=404), GenerationError, "is no vLLM server: Not Found"),
        (Refused("broken", status=500), AbsentServerError, "did not answer within 0.05 s (server_timeout of"),
        ({"data": [CARD | {"id": "other"}]}, GenerationError, "does not serve model='m', but ['other']"),
        ({"data": [{"id": "m"}]}, GenerationError, "unexpected answer (KeyError('max_model_len'))"),
    ],
)
def test_a_server_that_is_not_the_teachers_is_refused_before_anything_is_sampled(
    answer: Any, error: type[Exception], words: str, make: Make, servers: Servers
) -> None:
    servers.answers["/v1/models"] = answer
    with pytest.raises(error) as raised:
        make(server_timeout=0.05, model="m").recover()
    assert words in str(raised.value)


def test_the_first_model_of_a_server_is_asked_unless_another_one_is_named(make: Make, servers: Servers) -> None:
    servers.answers["/v1/models"] = {"data": [CARD, CARD | {"id": "adapter"}]}
    for model, expected in ((None, "m"), ("adapter", "adapter")):
        teacher = make(model=model)
        teacher.recover()
        teacher.top_logprobs(rows())
        assert servers.bodies.pop()["model"] == expected


def test_a_tokenizer_that_makes_other_ids_of_a_text_is_refused(
    teacher: TeacherServers, servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    teacher.check_tokenizer({"Is it?": [5, 6]})
    with pytest.raises(ConfigError, match=r"makes \[5, 6\] of 'Is it\?', and the student's makes \[5, 7\], so"):
        teacher.check_tokenizer({"Is it?": [5, 7]})
    servers.answers["/tokenize"] = Refused("Not Found", status=404)
    with caplog.at_level(logging.WARNING):
        teacher.check_tokenizer({"Is it?": [5, 7]})
    assert "has no /tokenize: its tokenizer is not compared" in caplog.text


@pytest.mark.parametrize(
    ("params", "are_local", "expected"),
    [
        ({}, True, "of-the-student"),
        ({}, False, None),
        ({"api_key_env": "OTHER"}, True, "own"),
        ({"api_key_env": "OTHER"}, False, "own"),
    ],
)
def test_a_key_goes_to_the_machine_of_its_user_or_to_the_servers_that_it_is_named_for(
    params: dict[str, Any], are_local: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "of-the-student")
    monkeypatch.setenv("OTHER", "own")
    assert teacher_key(TeacherServerParams(**params), are_local=are_local) == expected


def test_a_key_that_is_named_and_not_set_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTHER", raising=False)
    with pytest.raises(ConfigError, match="api_key_env='OTHER': this environment variable is not set"):
        teacher_key(TeacherServerParams(api_key_env="OTHER"), are_local=True)
