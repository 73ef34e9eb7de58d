"""The same engine without a drafter, in a process of its own: what `exact_match` compares with.

`tokens` starts this module as a command, hands it the job as JSON on standard input, and reads the
token ids from its standard output. A process of its own, so that nothing a drafter did to the first
one can hide in both sides of the comparison.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence

import jax

from jspec.drafters.base import Plain
from jspec.engine.config import EngineConfig
from jspec.errors import JspecError
from jspec.measure.conversations import Contender, Settings, answer
from jspec.measure.suites import Prompt
from jspec.startup import configure_cache
from jspec.target import loading


def tokens(
    target: dict[str, str | None], engine: EngineConfig, groups: Sequence[Sequence[Prompt]], settings: Settings
) -> list[list[list[list[int]]]]:
    """Token ids per group, conversation and turn, decoded plainly in another process.

    Args:
      target: arguments of `loading.load`.
    """
    shape = {f.name: getattr(engine, f.name) for f in dataclasses.fields(engine) if f.name != "target"}
    job = {
        "cache": jax.config.values["jax_compilation_cache_dir"],
        "target": target,
        "engine": shape,
        "settings": dataclasses.asdict(settings),
        "groups": [[dataclasses.asdict(p) for p in group] for group in groups],
    }
    done = subprocess.run(
        [sys.executable, "-m", "jspec.measure.reference"], input=json.dumps(job), capture_output=True, text=True
    )
    if done.returncode != 0:
        raise JspecError(
            f"the process without a drafter ended with code {done.returncode}: {done.stderr[-500:].strip()}",
            "a process that decodes the same prompts.",
            "run it again with `--no-exact`, or free memory for a second copy of the weights.",
        )
    answers: list[list[list[list[int]]]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def main() -> None:
    """Reads a job from standard input and prints the token ids as one line of JSON."""
    job = json.load(sys.stdin)
    configure_cache(job["cache"])
    checkpoint = loading.load(**job["target"])
    shape = job["engine"] | {"taps": tuple(job["engine"]["taps"])}
    engine = EngineConfig(target=checkpoint.config, **shape)
    plain = Contender(name="baseline", engine=engine, drafter=Plain(), weights=None)
    settings = Settings(**job["settings"])
    out = []
    for group in job["groups"]:
        prompts = [Prompt(**(p | {"turns": tuple(p["turns"])})) for p in group]
        traces, _ = answer(plain, checkpoint, prompts, settings)
        out.append([[list(t.tokens) for t in turns] for turns in traces])
    print(json.dumps(out))


if __name__ == "__main__":
    main()
