"""The tokenizer: literal text, chats, decoding in one go and in pieces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.errors import JspecError
from jspec.target import gguf
from jspec.target.tokenizer import CONTROL, USER_DEFINED, Tokenizer

# GPT-2's alphabet, spelled out: printable characters stand for themselves, the others count up from U+0100.
PRINTABLE = [b for b in range(256) if 0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC or b >= 0xAE]
OTHERS = [b for b in range(256) if b not in PRINTABLE]
ALPHABET = {b: chr(b) for b in PRINTABLE} | {b: chr(256 + i) for i, b in enumerate(OTHERS)}

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
FIRST_BYTE = len(SPECIAL)  # byte b has id FIRST_BYTE + b
MERGES = ["h e", "l l", "he ll", "hell o", "1 2"]  # ids 259 to 263; the last can never apply
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def fields(**changes: Any) -> dict[str, Any]:
    """Metadata of a tokenizer of 264 tokens; `changes` are keys under `tokenizer.ggml.`, None removes."""
    tokens = [*SPECIAL, *(ALPHABET[b] for b in range(256)), *(m.replace(" ", "") for m in MERGES)]
    table = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "merges": MERGES,
        "token_type": [CONTROL] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": False,
    }
    table = {f"tokenizer.ggml.{key}": value for key, value in (table | changes).items() if value is not None}
    return {"tokenizer.chat_template": TEMPLATE} | table


def tiny(**changes: Any) -> Tokenizer:
    return Tokenizer.from_gguf(fields(**changes))


def with_template(template: str) -> Tokenizer:
    return Tokenizer.from_gguf(fields() | {"tokenizer.chat_template": template})


def literal(text: str) -> list[int]:
    """Ids of `text` where no merge applies."""
    return [FIRST_BYTE + b for b in text.encode()]


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


# --- Text ----------------------------------------------------------------------------------------


def test_encode_by_hand() -> None:
    # "hello" merges: h e, l l, he ll, hell o (id 262). The space goes with the next word.
    assert tiny().encode("hello hex") == [262, *literal(" "), 259, *literal("x")]


def test_digits_stand_alone() -> None:
    """`1 2` is a merge, but digits are cut one by one before merging."""
    assert tiny().encode("12") == literal("12")
    assert tiny(pre="gpt-2").encode("12") == [263]


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_round_trip(text: str) -> None:
    assert TINY.decode(TINY.encode(text)) == text


TINY = tiny()


def test_text_cannot_forge_special_tokens() -> None:
    assert tiny().encode("<|im_end|>") == literal("<|im_end|>")


def test_user_defined_tokens_are_text() -> None:
    """A token that the checkpoint's author added for text is found in plain text too, digits inside or not."""
    tokens = [*fields()["tokenizer.ggml.tokens"], "<x12>"]
    types = [*fields()["tokenizer.ggml.token_type"], USER_DEFINED]
    tokenizer = tiny(tokens=tokens, token_type=types)
    assert tokenizer.encode("a<x12>b") == [*literal("a"), 264, *literal("b")]
    assert tokenizer.decode([264]) == "<x12>"


def test_start_token() -> None:
    assert tiny(add_bos_token=True).encode("a") == [1, *literal("a")]
    assert tiny(add_bos_token=True).render_chat(user("a"))[:2] == [1, *literal("u")]  # only the template's


def test_half_a_surrogate_pair() -> None:
    with pytest.raises(JspecError, match="surrogate"):
        tiny().encode("a\ud83d")


# --- Damaged or foreign metadata -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": "llama"}, "`llama`"),
        ({"model": None}, "`None`"),
        ({"pre": "qwen35"}, "`qwen35`"),
        ({"pre": None}, "`None`"),
        ({"add_space_prefix": True}, "`add_space_prefix`"),
        ({"add_eos_token": True}, "`add_eos_token`"),
        ({"add_bos_token": 1}, "`tokenizer.ggml.add_bos_token` as `1`"),
        ({"add_bos_token": True, "bos_token_id": None}, "without a `bos_token_id`"),
        ({"tokens": None}, "no list of tokens"),
        ({"tokens": [1, 2]}, "not text"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "`a` twice"),
        ({"token_type": [1]}, "`1` token types"),
        ({"merges": ["h e", "ll"]}, "the merge `ll`"),
        ({"merges": ["h zz"]}, "zz"),
        ({"eos_token_id": 264}, "`eos_token_id` as `264`"),
        ({"eos_token_id": -1}, "`eos_token_id` as `-1`"),
        ({"eos_token_id": "2"}, "`tokenizer.ggml.eos_token_id` as `2`"),
        ({"padding_token_id": 9999}, "`padding_token_id` as `9999`"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(JspecError) as error:
        tiny(**changes)
    assert told in str(error.value)


def test_every_end_id_counts() -> None:
    """known-failures LD-1."""
    assert tiny().end_ids == (2,)
    assert tiny(eot_token_id=0, eom_token_id=2).end_ids == (0, 2)
    assert tiny(eos_token_id=None).end_ids == ()


# --- Decoding ------------------------------------------------------------------------------------


def test_special_tokens_are_skipped_unless_asked_for() -> None:
    ids = [1, *literal("a"), 2]
    assert tiny().decode(ids) == "a"
    assert tiny().decode(ids, skip_special=False) == "<|im_start|>a<|im_end|>"


@pytest.mark.parametrize("token", [-1, 264])
def test_ids_outside_the_vocabulary(token: int) -> None:
    with pytest.raises(JspecError, match=f"`{token}`"):
        tiny().decode([token])


@given(st.lists(st.lists(st.sampled_from([0x41, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0xC3]), max_size=5)))
def test_stream_equals_decode(pushes: list[list[int]]) -> None:
    """known-failures SV-6, on byte soup and however the ids arrive."""
    stream = TINY.stream()
    ids = [[FIRST_BYTE + b for b in push] for push in pushes]
    parts = [stream.push(push) for push in ids] + [stream.finish()]
    assert "".join(parts) == TINY.decode([token for push in ids for token in push])


def test_stream_holds_back_only_what_is_open() -> None:
    stream = tiny().stream()
    euro = literal("€")  # three bytes
    assert [stream.push([token]) for token in euro] == ["", "", "€"]
    assert stream.push(euro[:2]) == ""
    assert stream.push(literal("a")) == "\ufffda"  # the open character cannot become whole any more
    assert stream.finish() == ""


def test_stream_tail_is_one_mark() -> None:
    """known-failures SV-6: an answer that ends after 2 of 3 bytes."""
    ids = [*literal("ab"), *literal("€")[:2]]
    stream = tiny().stream()
    assert stream.push(ids) == "ab"
    assert stream.finish() == "\ufffd"
    assert tiny().decode(ids) == "ab\ufffd"


def decoded(push, ids, monkeypatch) -> int:
    """Ids turned into bytes while `ids` are pushed one by one."""
    count = 0
    as_it_is = type(TINY)._bytes

    def counting(self, ids, skip):
        nonlocal count
        ids = list(ids)
        count += len(ids)
        return as_it_is(self, ids, skip)

    with monkeypatch.context() as patch:
        patch.setattr(type(TINY), "_bytes", counting)
        shown = [push(number) for number in ids]
    assert shown == ["\ufffd"] * len(ids)
    return count


def test_stream_cost_is_linear(monkeypatch) -> None:
    """known-failures SV-7: a run of invalid bytes is shown as it comes, at a cost that does not grow."""
    stream, ids = TINY.stream(), [FIRST_BYTE + 0xFF] * 300
    assert decoded(lambda number: stream.push([number]), ids, monkeypatch) == 300
    for byte, held in ((0xF0, 1), (0x9F, 2), (0x99, 3)):
        assert stream.push([FIRST_BYTE + byte]) == ""
        assert len(stream._decoder.getstate()[0]) == held
    assert stream.push([FIRST_BYTE + 0x82]) == "\U0001f642"
    assert stream._decoder.getstate()[0] == b""


def test_decoding_the_whole_answer_for_each_token_is_noticed(monkeypatch) -> None:
    held: list[int] = []

    def again(number: int) -> str:
        before = TINY.decode(held)
        held.append(number)
        return TINY.decode(held)[len(before) :]

    assert decoded(again, [FIRST_BYTE + 0xFF] * 30, monkeypatch) > 300


# --- Chats ---------------------------------------------------------------------------------------


def test_chat_by_hand() -> None:
    start = [1, *literal("user\nHi"), 2, *literal("\n")]
    assert tiny().render_chat(user("Hi")) == [*start, 1, *literal("assistant\n")]
    assert tiny().render_chat(user("Hi"), add_generation_prompt=False) == start
    assert tiny().chat_text(user("Hi"), add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_chat_recognises_special_tokens_as_transformers_does() -> None:
    ids = tiny().render_chat(user("a<|im_end|>b"), add_generation_prompt=False)
    assert ids == [1, *literal("user\na"), 2, *literal("b"), 2, *literal("\n")]


@pytest.mark.parametrize("content", ["a<|im_end|>b", "<<|im_end|>>", "<|im_end|><|im_start|>", "no 12 such"])
def test_sanitised_chat(content: str) -> None:
    """A message is what `encode` makes of it; the template's own tokens stay."""
    ids = tiny().render_chat(user(content), add_generation_prompt=False, sanitize_control_tokens=True)
    assert ids == [1, *tiny().encode("user\n" + content), 2, *literal("\n")]


def test_sanitised_chat_survives_a_template_that_cuts() -> None:
    tokenizer = with_template("{% for m in messages %}{{ m.content.split('<|im_start|>')[-1] }}<|im_end|>{% endfor %}")
    assert tokenizer.render_chat(user("a<|im_start|>b"), sanitize_control_tokens=True) == [*literal("b"), 2]


def test_template_settings_of_transformers() -> None:
    """Lines that hold only a block leave nothing; loops can be left; JSON is not escaped for HTML."""
    tokenizer = with_template(
        "{% for m in messages %}\n  {% if loop.index > 1 %}\n{% break %}\n  {% endif %}\n"
        "{% generation %}\n{{ m | tojson }}{% endgeneration %}\n{% endfor %}\n{{ strftime_now('%%') }}{{ eos_token }}"
    )
    text = tokenizer.chat_text([{"role": "user", "content": "<é>", "name": None}, {"role": "user"}])
    assert text == '{"role": "user", "content": "<é>"}%<|im_end|>'


def test_switches_reach_the_template_or_are_refused() -> None:
    tokenizer = with_template("{{ messages[0].content }}{% if think is defined and not think %}!{% endif %}")
    assert tokenizer.chat_text(user("a"), think=False) == "a!"
    with pytest.raises(JspecError, match="`enable_thinking`"):
        tokenizer.chat_text(user("a"), enable_thinking=False)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[5].content }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",  # out of the sandbox
        "{% for m in messages %}",  # does not compile
    ],
)
def test_template_faults_are_told(template: str) -> None:
    with pytest.raises(JspecError, match="chat template"):
        with_template(template).render_chat(user("a"))


def test_chat_without_template_or_messages() -> None:
    bare = Tokenizer.from_gguf({key: value for key, value in fields().items() if key != "tokenizer.chat_template"})
    assert not bare.has_template
    with pytest.raises(JspecError, match="no chat template"):
        bare.render_chat(user("a"))
    with pytest.raises(JspecError, match="empty"):
        tiny().render_chat([])
    with pytest.raises(JspecError, match="`object`"):
        tiny().render_chat([{"role": "user", "content": object()}])


# --- The embedded model --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    try:
        path = gguf.find_embedded()
    except JspecError as error:
        pytest.skip(str(error))
    return Tokenizer.from_gguf(gguf.File(path).fields)


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        "  leading,\t tabs\r\n\n and trailing  ",
        "I'll say it's 3.14159, or 1,000,000",
        "漢字 かな 한국어 — ½ ① ٣",
        "😀👩‍👩‍👧‍👦 é e\u0301",
        "def f(x):\n    return x ** 2\n",
        "<|im_end|> is text",
    ],
)
def test_smollm_round_trip(smollm: Tokenizer, text: str) -> None:
    ids = smollm.encode(text)
    assert smollm.decode(ids) == text
    stream = smollm.stream()
    assert "".join(stream.push([token]) for token in ids) + stream.finish() == text


def test_smollm_digits(smollm: Tokenizer) -> None:
    # Ids 32 to 41 are the digits 0 to 9, and 216 is a space.
    assert smollm.encode("Hi 1234") == [26843, 216, 33, 34, 35, 36]
    assert [smollm.token_bytes(token) for token in (26843, 216, 33)] == [b"Hi", b" ", b"1"]


def test_smollm_vocabulary(smollm: Tokenizer) -> None:
    assert (smollm.vocab_size, smollm.end_ids, len(smollm.special)) == (49152, (2,), 17)


def test_smollm_chat(smollm: Tokenizer) -> None:
    """Ids from transformers 5.24, whose template begins with a system prompt of its own."""
    assert smollm.render_chat([{"role": "user", "content": "What is the capital of France?"}]) == [
        *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182),
        *(2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198),
    ]
