"""Small tokenizers, made of the pieces that a test wants."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import models, pre_tokenizers

from jspec.target.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('unknown role') }}{% endif %}{{ m['content'] }}\n{% endfor %}"
    "{% if loud %}!{% endif %}{% if add_generation_prompt %}>{% endif %}"
)


def tokenizer(pieces: Sequence[str | bytes], end_ids: Sequence[int] = (), chat: bool = False) -> Tokenizer:
    """A tokenizer of which id i stands for `pieces[i]`; pieces like `<end>` are special.

    Text is encoded one character a token, by the pieces of one character; others are unknown and dropped.
    """
    special = {p: i for i, p in enumerate(pieces) if isinstance(p, str) and p.startswith("<") and len(p) > 1}
    single = {p: i for i, p in enumerate(pieces) if isinstance(p, str) and len(p) == 1}
    backends = []
    for _ in range(2):
        backend = tokenizers.Tokenizer(models.BPE(dict(single), []))
        backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
        backends.append(backend)
    return Tokenizer(
        plain=backends[0],
        marked=backends[1],
        pieces=[p if isinstance(p, bytes) else p.encode() for p in pieces],
        special=special,
        end_ids=end_ids,
        template=TEMPLATE if chat else None,
    )
