"""Calls that cannot be honoured, and what each must say: `python -m tests.hostile` prints the messages."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

import jspec
from jspec.errors import JspecError
from jspec.target.checkpoint import Checkpoint
from tests import tiny
from tests.words import tokenizer

LETTERS = [chr(48 + i) for i in range(62)] + ["<end>", "<pad>"]


@functools.cache
def checkpoint(chat: bool = True) -> Checkpoint:
    """The tiny target with a tokenizer of one character a token."""
    return Checkpoint(
        config=tiny.T,
        params=tiny.params(),
        tokenizer=tokenizer(LETTERS, end_ids=(62,), chat=chat),
        end_ids=(62,),
        name="tiny",
        fingerprint="0",
        license=None,
        source="tests",
        dtype_rule="made so",
    )


def _settings(**how):
    return lambda: jspec.generate(checkpoint(), "abc", config=engine(), **how)


def _prompt(prompt, **how):
    return lambda: jspec.generate(checkpoint(), prompt, config=engine(), **how)


def engine():
    return tiny.engine(3)


class Odd:
    """Of no use to anybody."""


def other():
    small = tokenizer([*LETTERS[:9], "é", *LETTERS[10:]])
    return dataclasses.replace(checkpoint(), tokenizer=small, name="other")


# What is called, and a piece of what the message must hold.
CASES = {
    # Numbers out of range, of the wrong type, or not numbers.
    "temperature negative": (_settings(temperature=-0.1), "`temperature` is `-0.1`"),
    "temperature text": (_settings(temperature="hot"), "`temperature` is `'hot'`"),
    "temperature nan": (_settings(temperature=float("nan")), "`temperature` is `nan`"),
    "temperature inf": (_settings(temperature=float("inf")), "`temperature` is `inf`"),
    "temperature bool": (_settings(temperature=True), "`temperature` is `True`"),
    "temperature list": (_settings(temperature=[1.0]), "`temperature` is `[1.0]`"),
    "temperature immense": (_settings(temperature=10**400), "`temperature` is `1000"),
    "top_k negative": (_settings(top_k=-1), "`top_k` is `-1`"),
    "top_k fraction": (_settings(top_k=1.5), "`top_k` is `1.5`"),
    "top_k huge": (_settings(top_k=2**31), "`top_k` is `2147483648`"),
    "top_p above one": (_settings(top_p=1.01), "`top_p` is `1.01`"),
    "top_p negative": (_settings(top_p=-1), "`top_p` is `-1`"),
    "min_p above one": (_settings(min_p=2), "`min_p` is `2`"),
    "min_p text": (_settings(min_p="0.1"), "`min_p` is `'0.1'`"),
    "max_tokens zero": (_settings(max_tokens=0), "`max_tokens` is `0`"),
    "max_tokens negative": (_settings(max_tokens=-1), "`max_tokens` is `-1`"),
    "max_tokens text": (_settings(max_tokens="5"), "`max_tokens` is `'5'`"),
    "max_tokens float": (_settings(max_tokens=1e9), "`max_tokens` is `1000000000.0`"),
    "min_tokens negative": (_settings(min_tokens=-1), "`min_tokens` is `-1`"),
    "min_tokens above max": (_settings(min_tokens=9, max_tokens=8), "`min_tokens` is `9` and `max_tokens` is `8`"),
    "min_tokens above room": (_settings(min_tokens=63, max_tokens=99), "`min_tokens` is `63` behind a prompt of"),
    "repetition zero": (_settings(repetition_penalty=0), "`repetition_penalty` is `0`"),
    "repetition negative": (_settings(repetition_penalty=-1.2), "`repetition_penalty` is `-1.2`"),
    "presence too large": (_settings(presence_penalty=2.5), "`presence_penalty` is `2.5`"),
    "presence nan": (_settings(presence_penalty=np.nan), "`presence_penalty` is `nan`"),
    "frequency too small": (_settings(frequency_penalty=-2.1), "`frequency_penalty` is `-2.1`"),
    "frequency list": (_settings(frequency_penalty=[1]), "`frequency_penalty` is `[1]`"),
    "seed negative": (_settings(seed=-1), "`seed` is `-1`"),
    "seed too large": (_settings(seed=2**64), "`seed` is `18446744073709551616`"),
    "seed text": (_settings(seed="7"), "`seed` is `'7'`"),
    "n zero": (_settings(n=0), "`n` is `0`"),
    "n bool": (_settings(n=True), "`n` is `True`"),
    "n huge": (_settings(n=10**6), "`n` is `1000000`"),
    "logprobs too many": (_settings(logprobs=21), "`logprobs` is `21`"),
    "logprobs bool": (_settings(logprobs=True), "`logprobs` is `True`"),
    "logprobs kind": (_settings(logprobs_kind="cooked"), "`logprobs_kind` is `'cooked'`"),
    # Collections.
    "bias list": (_settings(logit_bias=[(1, 2.0)]), "`logit_bias` is `[(1, 2.0)]`"),
    "bias too strong": (_settings(logit_bias={5: 101}), "`logit_bias[5]` is `101`"),
    "bias immense": (_settings(logit_bias={5: -(10**400)}), "`logit_bias[5]` is `-1000"),
    "bias not a number": (_settings(logit_bias={5: None}), "`logit_bias[5]` is `None`"),
    "bias of an unknown token": (_settings(logit_bias={64: 1.0}), "`logit_bias` names `64`"),
    "bias of a negative token": (_settings(logit_bias={-1: 1.0}), "`logit_bias` names `-1`"),
    "bias of a word": (_settings(logit_bias={"a": 1.0}), "`logit_bias` names `'a'`"),
    "bias of too many": (_settings(logit_bias=dict.fromkeys(range(257), 1.0)), "`logit_bias` has `257` entries"),
    "end ids too many": (_settings(end_ids=range(9)), "`end_ids` is `range(0, 9)`"),
    "end ids nine": (_settings(end_ids=tuple(range(9))), "`end_ids` has `9` entries"),
    "end id unknown": (_settings(end_ids=(64,)), "`end_ids[0]` is `64`"),
    "end ids a number": (_settings(end_ids=62), "`end_ids` is `62`"),
    "stop empty": (_settings(stop=""), "`stop[0]` is `''`"),
    "stop not text": (_settings(stop=["a", 5]), "`stop[1]` is `5`"),
    "stop a number": (_settings(stop=5), "`stop` is `5`"),
    "stop too many": (_settings(stop=["a"] * 65), "`stop` has `65` entries"),
    "stop too long": (_settings(stop="a" * 1025), "`stop[0]` is"),
    "ignore_eos text": (_settings(ignore_eos="no"), "`ignore_eos` is `'no'`"),
    "include_stop number": (_settings(include_stop=1), "`include_stop` is `1`"),
    # Asked for, and not there.
    "grammar": (_settings(grammar="root ::= x"), "`grammar` was asked for; grammars are not supported"),  # VS-11
    "response format": (_settings(response_format={"type": "json_object"}), "`response_format` was asked for"),
    "processors": (_settings(logits_processors=[len]), "`logits_processors` was asked for; processors of"),  # VS-10
    "beams": (_settings(num_beams=4), "`num_beams` was asked for; there is no beam search"),
    "prompt logprobs": (_settings(prompt_logprobs=1), "`prompt_logprobs` was asked for"),
    "bad words": (_settings(bad_words=["x"]), "`bad_words` was asked for"),
    "misspelt": (_settings(temprature=0.5), "did you mean `temperature`?"),
    "unknown": (_settings(zeal=3), "`zeal` is no setting"),
    # Prompts.
    "no ids": (_prompt([[]]), "the prompt has no token"),
    "no text": (_prompt("", chat=False), "the prompt has no token"),
    "no messages": (_prompt([[{"role": "nobody", "content": "x"}]]), "unknown role"),
    "prompt of bytes": (_prompt(b"abc"), "the prompt is `b'abc'`"),
    "prompt of None": (_prompt(None), "the prompt is `None`"),
    "prompt of a mapping": (_prompt({"role": "user", "content": "x"}), "of type `dict`"),
    "prompt of fractions": (_prompt([1.5, 2.0]), "item 0 of the prompt is `'1.5'`"),
    "prompts mixed inside": (_prompt([["a", 1]]), "item 0 of the prompt is `'a'`"),
    "prompt of an unknown id": (_prompt([[1, 2], [3, 64]]), "`prompts[1]`: `prompt[1]` is `64`"),
    "prompt of a negative id": (_prompt([-1]), "`prompt[0]` is `-1`"),
    "prompt too long": (_prompt([1] * 64), "the prompt has `64` tokens"),  # SV-8
    "one prompt far too long": (_prompt([[1], [1] * 10_000]), "`prompts[1]`: the prompt has `10000` tokens"),
    "half a character": (_prompt("\ud800"), "surrogate"),
    "switch the template ignores": (_prompt("a", switches={"think": True}), "does not read `think`"),
    "switch in place of the messages": (_prompt("a", switches={"messages": 1}), "does not read `messages`"),
    "switch of Python's": (_prompt("a", switches={"self": 1}), "does not read `self`"),
    "switch without a chat": (_prompt([1, 2], switches={"loud": True}), "the prompt is no chat"),
    "echo of a chat": (_prompt("a", echo=True), "`echo` was asked for with a chat"),
    "echo with logprobs": (_prompt([1], echo=True, logprobs=1), "`echo` and `logprobs`"),
    "chat of None": (_prompt("a", chat=None), "`chat` is `None`"),
    # Drafters, rules, engines, targets.
    "drafter unknown": (_settings(drafter="oracle_k3"), "`oracle_k3` is no drafter"),
    "drafter without K": (_settings(drafter="ngram"), "`ngram` is no drafter"),
    "drafter of nothing": (_settings(drafter="ngram_k0"), "asked for 0 proposals"),
    "drafter too long": (_settings(drafter="ngram_k8"), "`ngram_k8` proposes `8` tokens"),
    "drafter an object": (_settings(drafter=Odd()), "`drafter` is of type `Odd`"),
    "drafter of another vocabulary": (lambda: jspec.generate(checkpoint(), "a", drafter=other()), "another vocabulary"),
    "accept unknown": (_settings(accept="typical"), "`accept` is `'typical'`"),
    "target a path": (lambda: jspec.generate("model.gguf", "a"), "the target is of type `str`"),
    "config of another target": (
        lambda: jspec.generate(checkpoint(), "a", config="fast"),
        "`config` is no engine of this target",
    ),
    "engine without slots": (lambda: jspec.engine(checkpoint(), slots=0), "`slots` of the engine is `0`"),
    "engine of an unknown shape": (lambda: jspec.engine(checkpoint(), lanes=2), "`lanes` is no setting of an engine"),
    "stream of two": (lambda: jspec.stream(checkpoint(), ["a", "b"]), "`stream` was given 2 answers"),
    "load of nothing": (lambda: jspec.load("no-such-model.bin"), "no-such-model.bin"),
}


def main() -> None:
    for name, (call, _) in CASES.items():
        try:
            call()
            print(f"## {name}\n(no error)\n")
        except JspecError as error:
            print(f"## {name}\n{error}\n")
    print(f"{len(CASES)} calls")


if __name__ == "__main__":
    main()
