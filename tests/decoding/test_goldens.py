"""Processors and filters against transformers' own, on 30 cases of nine rows each (`make_goldens.py`)."""

import jax
import jax.numpy as jnp
import numpy as np

from jspec.decoding import law, processors, sampling, tree
from jspec.decoding.processors import BIASES, Occurrences, Processors
from tests.decoding.make_goldens import CASES, END, HERE, ROWS, V, cases


@jax.jit
def laws(logits, prompts, block, length, ends, settings, s):
    seen = Occurrences(prompt=prompts, output=jnp.zeros(prompts.shape, jnp.int32))
    shaped = processors.apply(logits, block, length, ends, length > 0, settings, seen)
    return law.log_law(shaped, s)


def test_thirty_cases_equal_transformers():
    given = cases()
    column = lambda name, kind=np.float32: np.array([c[name] for c in given], kind)  # noqa: E731
    length = np.array([len(c["prompt"]) for c in given], np.int32)
    prompts, ends = np.zeros((CASES, V), bool), np.full((CASES, 8), -1, np.int32)
    ids, values = np.full((CASES, BIASES), -1, np.int32), np.zeros((CASES, BIASES), np.float32)
    ends[:, 0] = END
    for b, case in enumerate(given):
        prompts[b, case["prompt"]] = True
        ids[b, : len(case["bias"])], values[b, : len(case["bias"])] = list(case["bias"]), list(case["bias"].values())
    settings = Processors(
        repetition=column("repetition_penalty"),
        frequency=np.zeros((CASES,), np.float32),
        presence=np.zeros((CASES,), np.float32),
        min_length=length + column("min_tokens", np.int32),
        bias_ids=ids,
        bias_values=values,
    )
    s = sampling.greedy(CASES).replace(
        temperature=column("temperature"),
        top_k=column("top_k", np.int32),
        top_p=column("top_p"),
        min_p=column("min_p"),
    )
    # One block each: the last prompt token, and the output as its proposals.
    anchor = np.array([c["prompt"][-1] for c in given], np.int32)
    output = np.stack([c["output"] for c in given]).astype(np.int32)
    block = tree.chain(anchor, output, np.full((CASES,), ROWS - 1, np.int32), ROWS)
    ours = np.asarray(laws(np.stack([c["logits"] for c in given]), prompts, block, length, ends, settings, s))
    theirs = np.load(HERE / "goldens.npz")["law"]
    np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs))
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
    assert (
        np.isneginf(theirs).any()
        and (theirs.argmax(axis=-1) != np.stack([c["logits"] for c in given]).argmax(-1)).any()
    )
