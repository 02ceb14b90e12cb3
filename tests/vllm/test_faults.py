"""A fault between trainer and server ends in the right completions or in a named error, never in a hang."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from prefrl.errors import GenerationError, WeightSyncError
from prefrl.generation.base import SamplingParams
from prefrl.generation.local.generator import LocalGenerator
from prefrl.generation.server import INFO_PATH
from prefrl.http import Http
from prefrl.models.export import PolicyWeights
from prefrl.types import Completion
from tests.assets import tiny_tokenizer
from tests.launch import run_module
from tests.patience import PATIENCE
from tests.vllm.client import PROMPTS, SEEDS, MakeGenerator, generators, policy
from tests.vllm.faults import (
    GENERATE,
    Fault,
    Proxy,
    change,
    dribble,
    drop,
    hang,
    only_for,
    proxy_of,
    second_door,
    status,
    vanish,
)
from tests.vllm.server import START_SECONDS, Server, free_port

pytestmark = pytest.mark.vllm

GREEDY = SamplingParams(num_samples=1, max_tokens=8, temperature=0)
DRAWN = SamplingParams(num_samples=2, max_tokens=8)
# What must not wait for a server would wait so many seconds for it.
LONG = 600.0


@pytest.fixture
def proxy(server: Server) -> Generator[Proxy, None, None]:
    with proxy_of(server.url) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> list[list[Completion]]:
    local = LocalGenerator(model, tokenizer=tiny_tokenizer())
    local.sync(PolicyWeights(model), version=1)
    return local.generate(PROMPTS, GREEDY, seeds=SEEDS)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """The block takes that long, on a busy machine longer, and far less than `LONG`."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds + PATIENCE, "later than its deadline"


def give_up_after(seconds: float, generator: Any, url: str) -> None:
    """Shorten the deadline of requests to one server, which hangs, and not of those that another one has to answer."""
    send = generator._http.send

    async def sent(method: str, target: str, *, timeout: float, **options: Any) -> Any:
        is_short = target == url + GENERATE
        return await send(method, target, timeout=min(timeout, seconds) if is_short else timeout, **options)

    generator._http.send = sent


def test_an_absent_server_is_an_error_that_says_what_to_start(model: PreTrainedModel, make: MakeGenerator) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    command = re.escape(f"prefrl vllm-serve --model {model.name_or_path} --port {url.rpartition(':')[2]}")
    generator = make([url], server_timeout=1.0)
    with within(1.0), pytest.raises(GenerationError, match=f"{url} did not answer within 1 s .*{command}"):
        generator.sync(PolicyWeights(model), version=1)


@pytest.mark.parametrize(
    ("path", "fault", "seconds"),
    [
        ("/health", hang, 2.0),
        ("/health", status(503, "starting"), 2.0),
        (INFO_PATH, hang, 20.0),  # that it is healthy has to come before the deadline
        ("/health", drop, 2.0),
    ],
    ids=["health hangs", "health is 503 for ever", "info hangs", "connections break"],
)
def test_a_server_that_never_gets_ready_is_an_error_at_the_deadline(
    path: str, fault: Fault, seconds: float, proxy: Proxy, model: PreTrainedModel, make: MakeGenerator
) -> None:
    proxy.fail(path, fault)
    generator = make([proxy.url], server_timeout=seconds)
    words = f"{proxy.url} did not answer within {seconds:g} s .*{path}"
    with within(seconds), pytest.raises(GenerationError, match=words):
        generator.sync(PolicyWeights(model), version=1)


def test_a_server_that_starts_late_is_waited_for(proxy: Proxy, model: PreTrainedModel, make: MakeGenerator) -> None:
    proxy.fail("/health", status(503, "starting"), times=3)
    generator = make([proxy.url])
    generator.sync(PolicyWeights(model), version=1)
    assert proxy.requests["/health"] == 4
    assert generator.stats().wait_s > 0.5


@pytest.mark.parametrize(
    ("field", "found", "words"),
    [
        ("architecture", "LlamaForCausalLM", "its architecture is 'LlamaForCausalLM', but the policy has 'Qwen2"),
        ("vocab_size", 99, "its size of the vocabulary is 99, but the policy has 128"),
        ("hidden_size", 99, "its hidden size is 99"),
        ("num_hidden_layers", 99, "its number of layers is 99, but the policy has 2"),
        ("tokenizer", "0" * 64, r"its tokenizer \(fingerprint of its vocabulary\) is '000"),
        ("logprobs_mode", "raw_logprobs", "has logprobs_mode 'raw_logprobs', but training needs"),
        ("protocol", 99, "this server was not started with `prefrl vllm-serve` of a compatible version"),
    ],
)
def test_another_server_than_needed_is_refused(
    field: str, found: object, words: str, proxy: Proxy, model: PreTrainedModel, make: MakeGenerator
) -> None:
    proxy.fail(INFO_PATH, change(lambda info: info.__setitem__(field, found)))
    with pytest.raises(GenerationError, match=words) as error:
        make([proxy.url]).sync(PolicyWeights(model), version=1)
    assert proxy.url in str(error.value)
    assert "prefrl" in str(error.value)
    assert proxy.requests["/pause"] == 0, "it was sent weights"


def test_adapters_need_a_server_that_takes_them(proxy: Proxy, model: PreTrainedModel, make: MakeGenerator) -> None:
    proxy.fail(INFO_PATH, change(lambda info: info.__setitem__("max_lora_rank", None)))
    generator = make([proxy.url], requirements={"has_adapters": True})
    with pytest.raises(GenerationError, match=r"takes no adapters.*--max_lora_rank <rank>"):
        generator.sync(PolicyWeights(model), version=1)


def test_a_server_of_somebody_else_is_refused(proxy: Proxy, model: PreTrainedModel, make: MakeGenerator) -> None:
    proxy.fail(INFO_PATH, status(404, "Not Found"))
    with within(0), pytest.raises(GenerationError, match=r"was not started by prefrl: .*404.*prefrl vllm-serve"):
        make([proxy.url], server_timeout=LONG).sync(PolicyWeights(model), version=1)


@pytest.mark.parametrize("key", ["a-wrong-key", None])
def test_a_wrong_or_missing_key_is_refused_at_once(
    key: str | None, server: Server, model: PreTrainedModel, make: MakeGenerator
) -> None:
    generator = make([server.url], key=key, server_timeout=LONG)
    with within(0), pytest.raises(GenerationError, match=f"{server.url} refuses the key: .*401.* VLLM_API_KEY"):
        generator.sync(PolicyWeights(model), version=1)


def test_a_server_that_lets_strangers_in_is_refused(
    server: Server, model: PreTrainedModel, make: MakeGenerator
) -> None:
    words = r"answers without the key.*replace the weights"
    with proxy_of(server.url, key=server.key) as open_door, pytest.raises(GenerationError, match=words):
        make([open_door.url]).sync(PolicyWeights(model), version=1)


@pytest.mark.parametrize("fault", [status(500, "out of luck"), status(429, "later"), drop], ids=["500", "429", "drop"])
def test_what_fails_twice_is_tried_a_third_time(
    fault: Fault, proxy: Proxy, model: PreTrainedModel, make: MakeGenerator, expected: list[list[Completion]]
) -> None:
    generator = synced(make([proxy.url]), model)
    proxy.fail(GENERATE, fault, times=2)
    assert generator.generate(PROMPTS[:1], GREEDY, seeds=SEEDS[:1]) == expected[:1]
    assert proxy.requests[GENERATE] == 3
    stats = generator.stats()
    assert (stats.requests, stats.retries) == (3, 2)


@pytest.mark.parametrize("code", [500, 503])
def test_a_healthy_server_that_always_fails_is_an_error_with_its_words(
    code: int, proxy: Proxy, model: PreTrainedModel, make: MakeGenerator
) -> None:
    generator = synced(make([proxy.url], server_timeout=LONG), model)
    proxy.fail(GENERATE, status(code, "out of luck"))
    words = f"4 prompts were lost 4 times.*{proxy.url}.* answered {code}: .*out of luck"
    with within(6), pytest.raises(GenerationError, match=words):
        generator.generate(PROMPTS, DRAWN, seeds=SEEDS)


def test_an_engine_that_dies_at_the_last_try_is_waited_for(
    proxy: Proxy, model: PreTrainedModel, make: MakeGenerator, expected: list[list[Completion]]
) -> None:
    generator = synced(make([proxy.url]), model)
    proxy.requests.clear()

    def dies_third(handler: Any, forward: Any) -> None:
        if proxy.requests["/health"] == 3:
            status(503, "dead")(handler, forward)
        else:
            handler.answer(*forward())

    proxy.fail("/health", dies_third)
    proxy.fail(GENERATE, status(500, "engine trouble"), times=3)
    assert generator.generate(PROMPTS[:1], GREEDY, seeds=SEEDS[:1]) == expected[:1]


def test_connections_that_always_break_are_an_error(proxy: Proxy, model: PreTrainedModel, make: MakeGenerator) -> None:
    generator = synced(make([proxy.url], server_timeout=LONG), model)
    proxy.fail(GENERATE, drop)
    with within(6), pytest.raises(GenerationError, match=f"4 prompts were lost 4 times.*{proxy.url}"):
        generator.generate(PROMPTS, DRAWN, seeds=SEEDS)


def test_prompts_that_wait_do_not_ask_a_server_that_is_gone(
    proxy: Proxy, model: PreTrainedModel, make: MakeGenerator
) -> None:
    generator = synced(make([proxy.url], max_concurrency=1), model)
    generator.fleet.server_timeout = 1.0
    proxy.fail(GENERATE, drop)
    proxy.fail("/health", drop)
    with within(1), pytest.raises(GenerationError, match=f"{proxy.url} did not answer within 1 s"):
        generator.generate(PROMPTS, DRAWN, seeds=SEEDS)
    assert generator.stats().requests == 1, "asked again although it is gone"


def test_a_request_that_is_refused_is_not_tried_again(
    proxy: Proxy, model: PreTrainedModel, make: MakeGenerator
) -> None:
    generator = synced(make([proxy.url]), model)
    with within(0), pytest.raises(GenerationError, match=r"prompt 0 .*refuses: .*400: .*\b128\b"):
        generator.generate([[128]], DRAWN, seeds=[1])  # no token of the model
    assert proxy.requests[GENERATE] == 1


@pytest.mark.parametrize("fault", [hang, dribble], ids=["no answer", "a byte a second"])
def test_an_overdue_answer_is_an_error_after_two_deadlines(
    fault: Fault, proxy: Proxy, model: PreTrainedModel, make: MakeGenerator
) -> None:
    generator = synced(make([proxy.url], request_timeout=1.5), model)
    proxy.fail(GENERATE, fault)
    with within(4), pytest.raises(GenerationError, match=r"no complete answer within [\d.]+ s.*request_timeout"):
        generator.generate(PROMPTS, DRAWN, seeds=SEEDS)
    assert proxy.requests[GENERATE] <= 2 * len(PROMPTS)


@pytest.mark.parametrize("fault", [hang, drop, status(500, "broken"), status(503, "busy")])
def test_what_one_server_fails_at_another_one_does(
    fault: Fault,
    server: Server,
    proxy: Proxy,
    model: PreTrainedModel,
    make: MakeGenerator,
    expected: list[list[Completion]],
) -> None:
    with proxy_of(server.url) as other:
        second_door(other)
        generator = synced(make([proxy.url, other.url]), model)
        give_up_after(2.0, generator, proxy.url)
        proxy.fail(GENERATE, fault)
        assert generator.generate(PROMPTS, GREEDY, seeds=SEEDS) == expected
        assert proxy.requests[GENERATE] > 0
        assert other.requests[GENERATE] >= len(PROMPTS)


def test_a_prompt_that_one_server_cannot_do_goes_to_another_one_although_the_first_does_others(
    server: Server, proxy: Proxy, model: PreTrainedModel, make: MakeGenerator, expected: list[list[Completion]]
) -> None:
    with proxy_of(server.url) as other:
        second_door(other)
        generator = synced(make([proxy.url, other.url], max_concurrency=1), model)
        proxy.fail(GENERATE, only_for(PROMPTS[0], status(500, "not this one")))
        assert generator.generate(PROMPTS, GREEDY, seeds=SEEDS) == expected
        assert generator.stats().retries == 1


def test_prompts_leave_a_server_that_disappears(
    server: Server, proxy: Proxy, model: PreTrainedModel, make: MakeGenerator, expected: list[list[Completion]]
) -> None:
    with proxy_of(server.url) as other:
        second_door(other)
        generator = synced(make([other.url, proxy.url], server_timeout=LONG), model)
        other.stop()
        try:
            with within(0):
                assert generator.generate(PROMPTS * 4, GREEDY, seeds=SEEDS * 4) == expected * 4
        finally:
            other.restart()


def edit_choice(number: int, field: str, value: object) -> Callable[[Any], None]:
    def edit(answer: Any) -> None:
        answer["choices"][number][field] = value

    return edit


def edit_logprob(field: str, value: object) -> Callable[[Any], None]:
    def edit(answer: Any) -> None:
        answer["choices"][1]["logprobs"]["content"][0][field] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda answer: answer["choices"].pop(), r"choices \[0\], but each of 0..1"),
        (edit_logprob("logprob", float("nan")), "the log-prob of token 0 is nan. The weights have diverged"),
        (lambda answer: answer.clear(), "a field is missing"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_is_an_error(
    edit: Callable[[Any], None], words: str, proxy: Proxy, model: PreTrainedModel, make: MakeGenerator
) -> None:
    generator = synced(make([proxy.url], stop_ids=[1]), model)
    proxy.fail(GENERATE, change(edit))
    with within(0), pytest.raises(GenerationError, match=f"{proxy.url} answers request [0-9a-f]+ wrongly: .*{words}"):
        generator.generate(PROMPTS[:1], DRAWN, seeds=SEEDS[:1])


def test_a_request_that_the_server_aborted_is_tried_again(
    proxy: Proxy, model: PreTrainedModel, make: MakeGenerator, expected: list[list[Completion]]
) -> None:
    generator = synced(make([proxy.url]), model)
    proxy.fail(GENERATE, change(edit_choice(0, "finish_reason", "abort")), times=1)
    assert generator.generate(PROMPTS[:1], GREEDY, seeds=SEEDS[:1]) == expected[:1]
    assert generator.stats().retries == 1


def test_completions_by_other_weights_are_asked_for_again(
    proxy: Proxy, model: PreTrainedModel, make: MakeGenerator, expected: list[list[Completion]]
) -> None:
    generator = synced(make([proxy.url]), model)
    strange = change(lambda answer: answer["choices"][0]["weight_versions"][0].update(version="default"))
    proxy.fail(GENERATE, strange, times=1)
    assert generator.generate(PROMPTS, GREEDY, seeds=SEEDS) == expected
    assert proxy.requests[GENERATE] >= len(PROMPTS) + 1
    assert generator.stats().retries == 0, "asked again before the server's weights were looked at"


def test_a_server_that_lost_its_weights_gets_them_before_it_is_asked(
    server: Server, http: Http, proxy: Proxy, model: PreTrainedModel, make: MakeGenerator, expected: Any
) -> None:
    generator = synced(make([proxy.url]), model)
    http.request("POST", f"{server.url}/update_weight_version", timeout=PATIENCE, json={"new_version": "default"})
    assert generator.generate(PROMPTS, GREEDY, seeds=SEEDS) == expected
    assert proxy.requests[GENERATE] == len(PROMPTS), "it was asked while it had other weights"
    assert proxy.requests["/update_weights"] == 2
    assert generator.stats().restarts == 1


def test_an_update_that_failed_is_not_taken_for_one(
    proxy: Proxy, model: PreTrainedModel, make: MakeGenerator, expected: list[list[Completion]]
) -> None:
    generator = synced(make([proxy.url]), model)
    proxy.fail("/update_weights", status(500, "no memory"), times=1)
    with within(2), pytest.raises(WeightSyncError, match="no memory"):
        generator.sync(PolicyWeights(model), version=2)
    completions = generator.generate(PROMPTS, GREEDY, seeds=SEEDS)
    assert [group[0].token_ids for group in completions] == [group[0].token_ids for group in expected]
    assert {version for group in completions for version in group[0].policy_versions} == {2}


def test_a_server_that_dies_while_it_is_sent_weights_gets_them_when_it_is_back(
    proxy: Proxy, model: PreTrainedModel, make: MakeGenerator, expected: list[list[Completion]]
) -> None:
    def die(handler: Any, _: Any) -> None:
        vanish(proxy)
        handler.break_off()

    proxy.fail("/update_weights", die, times=1)
    generator = make([proxy.url])
    generator.sync(PolicyWeights(model), version=1)
    assert proxy.requests["/update_weights"] == 2
    assert generator.generate(PROMPTS, GREEDY, seeds=SEEDS) == expected


def test_a_server_that_dies_while_it_is_sent_weights_and_stays_away_is_an_error(
    proxy: Proxy, model: PreTrainedModel, make: MakeGenerator
) -> None:
    generator = synced(make([proxy.url]), model)
    generator.fleet.server_timeout = 2.0
    proxy.fail("/update_weights", drop)
    proxy.fail("/health", drop)
    with within(2), pytest.raises(GenerationError, match=f"{proxy.url} did not answer within 2 s"):
        generator.sync(PolicyWeights(model), version=2)


def test_a_server_that_never_has_the_weights_that_it_was_sent_is_an_error(
    proxy: Proxy, model: PreTrainedModel, make: MakeGenerator
) -> None:
    proxy.fail("/weight_info", change(lambda answer: answer.update(weight_version="another:9")))
    with within(0), pytest.raises(WeightSyncError, match=r"sent 3 times, but the server does not have them"):
        make([proxy.url], server_timeout=LONG).sync(PolicyWeights(model), version=1)


def freeze_after_an_answer(server: Server, generator: Any) -> None:
    """Freeze a server when its first answer to a prompt is there, before the client gets it."""
    send = generator._http.send

    async def sent(method: str, url: str, **options: Any) -> Any:
        answer = await send(method, url, **options)
        if url.endswith(GENERATE) and generator._http.send is sent:
            generator._http.send = send
            server.freeze()
        return answer

    generator._http.send = sent


def test_a_killed_server_that_is_started_again_goes_on_with_the_right_weights(
    second_server: Server, tmp_path: Path
) -> None:
    """Killed while it generates."""
    server, model = second_server, policy(second_server.model_dir)
    local = LocalGenerator(model, tokenizer=tiny_tokenizer())
    local.sync(PolicyWeights(model), version=3)
    how = SamplingParams(num_samples=1, max_tokens=100, temperature=0)
    prompts, seeds = [[number] for number in range(8, 40)], list(range(32))
    with generators(model, tmp_path, key=server.key) as make:
        generator = make([server.url], stop_ids=[1], max_concurrency=4, server_timeout=START_SECONDS)
        model.generation_config.eos_token_id = [1]
        generator.sync(PolicyWeights(model), version=3)
        freeze_after_an_answer(server, generator)  # so that the kill does not come when all is done
        arriving = generator.start(prompts, how, seeds=seeds).as_completed()
        completions = dict([next(arriving)])
        restart = threading.Thread(target=server.restart)
        restart.start()
        completions |= dict(arriving)
        restart.join()
        assert [completions[number] for number in range(32)] == local.generate(prompts, how, seeds=seeds)
        stats = generator.stats()
        assert stats.restarts == 1
        assert stats.requests > len(prompts), "the kill came too late"


def test_processes_recover_and_fail_together(server: Server, proxy: Proxy, tmp_path: Path) -> None:
    """Process 0 has no problem of its own, and needs process 1 to read its weights.

    Process 1 is first taken for a stranger, then loses all its prompts, then has one that is refused.
    """
    with proxy_of(server.url) as other:
        other.fail(INFO_PATH, status(403, "no stranger"), times=1)
        other.fail(GENERATE, drop, times=3 * len(PROMPTS))
        job = {"model_dir": str(server.model_dir), "key": server.key, "folder": str(tmp_path)}
        jobs = [json.dumps(job | {"rank": rank, "url": url}) for rank, url in enumerate([proxy.url, other.url])]
        with ThreadPoolExecutor() as threads:
            outputs = threads.map(partial(run_module, "tests.vllm.client_worker"), jobs)
            results = [json.loads(output.splitlines()[-1]) for output in outputs]
    assert f"{other.url} refuses the key" in results[1]["refusal"]
    assert results[0]["refusal"] == results[1]["refusal"]
    assert results[0]["completions"] == results[1]["completions"]
    assert len(results[0]["completions"]) == len(PROMPTS)
    assert results[1]["retries"] > results[0]["retries"] == 0
    assert "prompt 1 of process 1" in results[1]["error"]
    assert results[0]["error"] == results[1]["error"]


def synced(generator: Any, model: PreTrainedModel) -> Any:
    generator.sync(PolicyWeights(model), version=1)
    return generator
