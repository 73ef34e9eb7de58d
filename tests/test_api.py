"""The public way: what may be given, what comes back, and what is refused.

Known failures covered: VS-6, VS-10 and VS-11 (refused by name), DT-1, SV-6, SV-8, SV-9, BM-8's switches.
"""

import asyncio
import itertools

import numpy as np
import pytest

import jspec
from jspec.errors import JspecError
from jspec.startup import CompileCounter
from tests import tiny
from tests.hostile import CASES, checkpoint, engine

IDS = [5, 9, 12]


def ask(prompts=IDS, **how):
    return jspec.generate(checkpoint(), prompts, **{"config": engine(), "max_tokens": 12, "seed": 1} | how)


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_honoured_is_refused_in_three_parts(name):
    call, piece = CASES[name]
    with pytest.raises(JspecError) as caught:
        call()
    error = caught.value
    assert piece in str(error)
    assert error.given and error.allowed and error.action
    assert str(error).count("\n") == 2


def test_there_are_eighty_of_them():
    assert len(CASES) >= 80


def test_an_answer_tells_all():
    answer = ask(temperature=0.7, top_k=9, stop="@@@", ignore_eos=True, n=1)[0]
    assert answer.text == checkpoint().tokenizer.decode(answer.ids)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, len(answer.ids))
    assert answer.usage.total_tokens == 3 + len(answer.ids)
    assert answer.finish_reason == "length" and answer.error is None and answer.stop is None
    assert answer.acceptance.rounds >= 1 and answer.acceptance.length >= 1
    assert (answer.prompt, answer.choice, answer.seed) == (0, 0, 1)
    told = answer.settings
    assert (told["temperature"], told["top_k"], told["top_p"], told["stop"]) == (0.7, 9, 1.0, ("@@@",))
    assert (told["max_tokens"], told["seed"], told["drafter"], told["accept"]) == (12, 1, "ngram_k7", "choice")
    assert told["end_ids"] == (62,)


def test_unset_temperature_is_one_and_told():
    # VS-6.
    assert ask()[0].settings["temperature"] == 1.0
    assert ask()[0].ids == ask(temperature=1.0)[0].ids == ask(temperature=None)[0].ids
    assert ask()[0].ids != ask(temperature=0.0)[0].ids


def test_unseeded_answers_differ_and_can_be_had_again():
    # DT-1.
    answers = [ask(seed=None)[0] for _ in range(4)]
    assert len({a.seed for a in answers}) == len({a.ids for a in answers}) == 4
    assert ask(seed=answers[2].seed)[0].ids == answers[2].ids


def test_prompts_of_every_kind():
    chat = [{"role": "user", "content": "abc"}]
    text = ask("abc", chat=False)[0]
    assert ask("abc")[0].ids == ask(chat)[0].ids != text.ids
    ids = checkpoint().tokenizer.encode("abc")
    assert ask(ids)[0].ids == ask(np.array(ids))[0].ids == ask(tuple(ids))[0].ids == text.ids
    together = ask(["abc", ids, chat, np.array(ids)])
    assert [a.prompt for a in together] == [0, 1, 2, 3]
    assert together[1].ids == together[3].ids == text.ids
    assert together[0].ids == together[2].ids == ask("abc")[0].ids
    assert ask([]) == []
    loud = ask(chat, switches={"loud": True})[0]
    assert loud.usage.prompt_tokens == ask(chat)[0].usage.prompt_tokens  # "!" is no piece of this tokenizer
    assert ask("abc", chat=True, config=engine())[0].settings["chat"] is True


def test_choices_share_a_seed_and_differ():
    answers = ask([IDS, [7]], n=3, seed=None)
    assert [(a.prompt, a.choice) for a in answers] == list(itertools.product(range(2), range(3)))
    assert len({a.ids for a in answers}) == 6
    assert {len({a.seed for a in answers if a.prompt == p}) for p in range(2)} == {1}
    assert ask(n=3)[0].ids == ask()[0].ids
    greedy = ask(n=2, temperature=0.0)
    assert greedy[0].ids == greedy[1].ids


def test_max_tokens_is_capped_and_told():
    # SV-9.
    assert ask(max_tokens=10**9, ignore_eos=True)[0].usage.completion_tokens == 61
    assert ask(max_tokens=10**9)[0].settings["max_tokens"] == 61
    assert ask(max_tokens=None)[0].settings["max_tokens"] == 61  # the default, 256, capped


def test_echo_puts_the_prompt_first():
    plain = ask()[0]
    echoed = ask(echo=True)[0]
    assert echoed.text == checkpoint().tokenizer.decode(IDS) + plain.text and echoed.ids == plain.ids
    text = ask("fgh", chat=False, echo=True)[0].text
    assert text.startswith("fgh")
    # A stop string of the prompt stops nothing.
    assert ask("fgh", chat=False, echo=True, stop="fgh")[0].text == text


def test_stops_and_usage():
    whole = ask(temperature=0.0, ignore_eos=True)[0]
    stop = whole.text[4:6]
    cut = ask(temperature=0.0, ignore_eos=True, stop=stop)[0]
    end = whole.text.index(stop)
    assert (cut.text, cut.stop, cut.finish_reason) == (whole.text[:end], stop, "stop")
    assert cut.usage.completion_tokens == end + 2
    assert ask(temperature=0.0, ignore_eos=True, stop=[stop], include_stop=True)[0].text == whole.text[: end + 2]


@pytest.mark.parametrize(
    "drafter",
    [None, "baseline", "ngram_k3", jspec.NGram(proposals=2), (jspec.NGram(proposals=2), ()), checkpoint],
    ids=str,
)
def test_the_drafter_changes_no_text(drafter):
    drafter = drafter() if drafter is checkpoint else drafter
    settings = {"repetition_penalty": 1.2, "logprobs": 2, "n": 2}
    assert [(a.ids, a.logprobs) for a in ask(drafter=drafter, **settings)] == [
        (a.ids, a.logprobs) for a in ask(drafter=None, **settings)
    ]


def test_a_checkpoint_drafts_for_itself():
    answers = ask([IDS, [4]], drafter=checkpoint(), ignore_eos=True)
    assert all(a.acceptance.rate == 1 for a in answers)
    sampled = ask([IDS, [4]], drafter=checkpoint(), accept="rejection", ignore_eos=True)
    assert all(a.acceptance.rate == 1 and len(a.ids) == 12 for a in sampled)


def test_streams_hold_what_generate_holds():
    how = {"config": engine(), "max_tokens": 20, "seed": 1, "stop": "zq"}
    whole = jspec.generate(checkpoint(), ["abc", IDS], n=2, **how)
    chunks = list(jspec.stream_batch(checkpoint(), ["abc", IDS], n=2, **how))
    for answer in whole:
        mine = [c for c in chunks if (c.prompt, c.choice) == (answer.prompt, answer.choice)]
        assert "".join(c.text for c in mine) == answer.text
        assert sum((c.ids for c in mine), ()) == answer.ids
        assert [c.answer for c in mine[:-1]] == [None] * (len(mine) - 1) and mine[-1].answer == answer
    assert "".join(jspec.stream(checkpoint(), "abc", **how)) == whole[0].text
    assert (
        "".join(jspec.stream(checkpoint(), IDS, echo=True, **how)) == checkpoint().tokenizer.decode(IDS) + whole[2].text
    )


def test_streaming_while_other_tasks_go_on():
    how = {"config": engine(), "max_tokens": 20, "seed": 1}
    whole = jspec.generate(checkpoint(), ["abc", IDS], **how)

    async def collect():
        return [c async for c in jspec.stream_async(checkpoint(), ["abc", IDS], **how)]

    async def both():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        ticking = asyncio.create_task(tick())
        found = await asyncio.gather(collect(), collect())
        ticking.cancel()
        return found, ticks

    found, ticks = asyncio.run(both())
    for chunks in found:
        assert sorted((c.answer.prompt, c.answer.ids) for c in chunks if c.answer) == [(a.prompt, a.ids) for a in whole]
    assert ticks > 10


def test_a_stream_that_is_left_ends():
    async def leave():
        chunks = jspec.stream_async(checkpoint(), IDS, config=engine(), max_tokens=50, seed=1)
        async for chunk in chunks:
            assert chunk.answer is None
            break
        await chunks.aclose()
        return [c async for c in jspec.stream_async(checkpoint(), IDS, config=engine(), max_tokens=12, seed=1)]

    assert asyncio.run(leave())[-1].answer.ids == ask()[0].ids
    chunks = jspec.stream_batch(checkpoint(), IDS, config=engine(), max_tokens=50)
    next(chunks)
    chunks.close()
    assert list(chunks) == []
    with pytest.raises(JspecError):  # at the call, not at the first piece
        jspec.stream(checkpoint(), IDS, temperature=-1)


@pytest.mark.parametrize("accept", ["choice", "rejection"])
def test_nothing_compiles_after_warm_up(accept):
    drafter = jspec.NGram(proposals=5)
    config = engine()
    jspec.warm_up(config, tiny.params(), drafter=drafter, weights=(), accept=accept)
    rng = np.random.default_rng(0)
    with CompileCounter() as counter:
        for settings in (
            {"repetition_penalty": 1.2, "logprobs": 5, "stop": "ab"},
            {"temperature": 0.0, "min_tokens": 4, "logit_bias": {3: 4.0}},
            {"top_k": 3, "top_p": 0.5, "logprobs": 1, "logprobs_kind": "processed", "n": 4},
            {"frequency_penalty": 1.0, "presence_penalty": -1.0, "ignore_eos": True},
        ):
            prompts = [rng.integers(0, 60, n).tolist() for n in rng.integers(1, 50, 5)]
            ask(prompts, drafter=drafter, accept=accept, **settings)
    assert counter.names == []


def test_no_template_means_plain_text():
    bare = checkpoint(chat=False)
    settings = {"config": engine(), "max_tokens": 6, "seed": 1}
    assert jspec.generate(bare, "abc", **settings)[0].ids == ask("abc", chat=False, max_tokens=6)[0].ids
