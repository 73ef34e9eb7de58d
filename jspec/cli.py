"""The command `jspec`: one verb a task.

    jspec generate "Why is the sky blue?"
    jspec bench --dataset-name gsm8k --dataset-path $DATA/eval --num-prompts 16
    jspec doctor

A table or text for people comes first; the last line of `bench`, `convert` and `doctor` is one JSON document
for programs. Wrong input ends with a message in three parts and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jspec.errors import JspecError
from jspec.startup import CompileCounter, configure_cache

DEFAULT_SETS = ("builtin_math", "builtin_code", "builtin_chat")
REFERENCE_SETS = ("math500", "gsm8k", "humaneval", "mbpp", "mt_bench", "ultrachat")
DEFAULT_RUNS = ("baseline", "baseline_native", "ngram_k3", "ngram_k7")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and runs the verb; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        configure_cache(options.cache_dir)
        code: int = options.run(options)
        return code
    except JspecError as error:
        print(f"jspec: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jspec: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe has left; Python would complain once more while flushing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jspec", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--model",
        metavar="TARGET",
        help="a Hugging Face folder or hub id, a GGUF file, or a name of configs/targets.toml; "
        "default: the embedded SmolLM2-135M-Instruct",
    )
    common.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub id")
    common.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float32"), help="of the weights (default: the checkpoint's own)"
    )
    common.add_argument("--cache-dir", metavar="DIR", help="folder for compiled programs")
    common.add_argument("--rows", type=int, default=8, metavar="N", help="rows of a verify block (default: 8)")

    choice = argparse.ArgumentParser(add_help=False)
    choice.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    choice.add_argument("--top-k", type=int, default=0)
    choice.add_argument("--top-p", type=float, default=1.0)
    choice.add_argument("--min-p", type=float, default=0.0)
    choice.add_argument(
        "--enable-thinking",
        action=argparse.BooleanOptionalAction,
        help="switch of the chat template; default: what the template does by itself",
    )
    choice.add_argument(
        "--template-switch", action="append", default=[], metavar="NAME=JSON", help="another one; may be repeated"
    )

    bench = verbs.add_parser("bench", parents=[common, choice], help="time plain against speculative decoding")
    bench.set_defaults(run=_bench)
    bench.add_argument("--dataset-name", nargs="+", metavar="NAME", help="data sets (default: built-in prompts)")
    bench.add_argument("--dataset-path", metavar="PATH", help="file, or folder of NAME.jsonl")
    bench.add_argument("--num-prompts", type=int, metavar="N", help="conversations of each set (default: 4)")
    bench.add_argument("--max-concurrency", type=int, default=1, metavar="B", help="slots (default: 1)")
    bench.add_argument("--output-len", type=int, metavar="N", help="most output tokens (default: 64)")
    bench.add_argument("--ignore-eos", action="store_true", help="go on to --output-len behind end tokens")
    bench.add_argument("--seed", type=int, default=0)
    bench.add_argument("--runs", nargs="+", default=list(DEFAULT_RUNS), metavar="RUN")
    bench.add_argument("--full", action="store_true", help="the reference's sets, all prompts, 128 tokens")
    bench.add_argument("--no-exact", action="store_true", help="skip the second process behind `exact`")
    bench.add_argument("--save-result", action="store_true", help="write the JSON and one file a run in vLLM's keys")
    bench.add_argument("--result-dir", default="results", metavar="DIR")

    text = verbs.add_parser("generate", parents=[common, choice], help="continue a prompt, streaming")
    text.set_defaults(run=_generate)
    text.add_argument("prompt", help="a user turn; `-` reads standard input")
    text.add_argument(
        "--drafter",
        default="ngram_k7",
        help="changes the speed, never the text: baseline, ngram_kK, or FOLDER_kK with a trained drafter's folder "
        "(default: ngram_k7)",
    )
    text.add_argument(
        "--draft-model", metavar="TARGET", help="drafts instead of --drafter: a smaller model, same tokens"
    )
    text.add_argument(
        "--num-speculative-tokens", type=int, default=4, metavar="K", help="of --draft-model (default: 4)"
    )
    text.add_argument("--accept", choices=("choice", "rejection"), default="choice", help="rule (default: choice)")
    text.add_argument("--max-tokens", type=int, default=256)
    text.add_argument("--min-tokens", type=int, default=0)
    text.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens behind end tokens")
    text.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the answer; may be repeated")
    text.add_argument("--include-stop", action="store_true", help="print the stop string too")
    text.add_argument("--repetition-penalty", type=float, default=1.0, help="1 is off")
    text.add_argument("--presence-penalty", type=float, default=0.0)
    text.add_argument("--frequency-penalty", type=float, default=0.0)
    text.add_argument("--logit-bias", action="append", default=[], metavar="ID=VALUE", help="may be repeated")
    text.add_argument("-n", type=int, default=1, help="answers, one after another (default: 1)")
    text.add_argument("--echo", action="store_true", help="print the prompt first; with --raw")
    text.add_argument(
        "--logprobs", type=int, metavar="M", help="tokens, log-probabilities and M rivals, a JSON line each"
    )
    text.add_argument("--logprobs-kind", choices=("raw", "processed"), default="raw")
    text.add_argument("--seed", type=int, help="drawn and printed when left out")
    text.add_argument("--raw", action="store_true", help="continue the text itself, without the chat template")
    text.add_argument("--stats", action="store_true", help="print tokens, rounds and speed to stderr")

    write = verbs.add_parser("synthesise", parents=[common], help="let the target write texts to train on, resumably")
    write.set_defaults(run=_synthesise)
    write.add_argument("plan", help="a TOML file, such as those in configs/texts")
    write.add_argument("--out", required=True, metavar="DIR", help="takes the texts and the prompts invented")
    write.add_argument("--tokens", type=int, required=True, metavar="N", help="end after so many answer tokens")
    write.add_argument("--data", metavar="DIR", help="folder of the files that the plan names")
    write.add_argument(
        "--benchmarks", nargs="*", default=[], metavar="PATH", help="files or folders of prompts to stay apart from"
    )

    train = verbs.add_parser("train", parents=[common], help="train a drafter on texts by the target, resumably")
    train.set_defaults(run=_train)
    train.add_argument("recipe", help="a TOML file, such as those in configs/train")
    train.add_argument("--texts", nargs="+", required=True, metavar="DIR", help="folders of texts by this target")
    train.add_argument("--out", required=True, metavar="DIR", help="takes features, saves, metrics and the drafter")
    train.add_argument("--devices", type=int, default=1, metavar="N", help="that share a batch (default: 1)")

    convert = verbs.add_parser("convert", help="rewrite a drafter that others published, or publish one of ours")
    convert.set_defaults(run=_convert)
    convert.add_argument("source", metavar="SOURCE", help="folder of a drafter; its format is told by what it holds")
    convert.add_argument("out", metavar="OUT", help="folder to write, new or empty")
    convert.add_argument(
        "--target", metavar="TARGET", help="the model it drafts for, as --model of other verbs; it is compared with it"
    )
    convert.add_argument(
        "--to", default="jspec", metavar="FORMAT", help="jspec (default), or a published format: see docs/drafters.md"
    )
    convert.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub id")
    convert.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float32"), help="of the drafter's weights (default: the files' own)"
    )
    convert.add_argument("--cache-dir", metavar="DIR", help="folder for compiled programs")

    doctor = verbs.add_parser("doctor", parents=[common], help="say what was understood and what is guaranteed")
    doctor.set_defaults(run=_doctor)
    doctor.add_argument("target", nargs="?", metavar="TARGET", help="as --model")
    doctor.add_argument("--max-concurrency", type=int, default=1, metavar="B", help="slots (default: 1)")
    return parser


def _bench(options: argparse.Namespace) -> int:
    from jspec.measure import bench, hardware, report, suites
    from jspec.measure.conversations import Settings
    from jspec.target import loading

    names = options.dataset_name or (REFERENCE_SETS if options.full else DEFAULT_SETS)
    count = options.num_prompts if options.num_prompts is not None else (None if options.full else 4)
    length = options.output_len if options.output_len is not None else (128 if options.full else 64)
    settings = Settings(
        max_tokens=length,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
        ignore_eos=options.ignore_eos,
        switches=_switches(options),
    )
    if options.save_result:  # before the measurement, which would be lost
        report.prepare(options.result_dir)
    plan = bench.plan_of(
        list(dict.fromkeys(names)),
        list(dict.fromkeys(options.runs)),
        settings,
        path=options.dataset_path,
        num_prompts=count,
        concurrency=options.max_concurrency,
        rows=options.rows,
        target=options.model,
        revision=options.revision,
        check_exact=not options.no_exact,
    )
    begin = time.perf_counter()
    checkpoint = loading.load(options.model, dtype=options.dtype, revision=options.revision)
    print(
        f"{checkpoint.name} ({checkpoint.license or 'licence not stated'}), "
        f"loaded in {time.perf_counter() - begin:.1f} s"
    )
    for name, prompts in plan.datasets:
        print(f"{name}: {suites.describe(prompts)}")
    outcome = bench.run(plan, checkpoint, progress=_progress)
    _progress_end()
    print("\n" + "\n".join(outcome.card.lines(batches=(1, plan.concurrency) if plan.concurrency > 1 else (1,))))
    findings = ", ".join(
        f"{name} {'yes' if f.holds else 'no'}" for name, f in outcome.probe.findings.items() if f.holds is not None
    )
    print(f"probe       {findings}: {'exact' if outcome.probe.exact else 'NOT exact'} within this engine")
    if outcome.interrupted:
        print("\nInterrupted: only prompts that every run has answered are counted.")
    how = "greedy" if settings.temperature == 0 else f"T = {settings.temperature:g}"
    print(
        f"\n{how}, at most {length} output tokens, concurrency {plan.concurrency}, {outcome.card.dtype}, "
        f"{plan.rows} rows, position-keyed choice; runs interleaved\n"
    )
    print(report.table(outcome.rows) + "\n")
    print(report.detail_table(outcome.rows) + "\n")
    for line in (*report.notes(outcome.rows), *outcome.agreement, *report.LEGEND):
        print(line)
    text = report.document(
        device=hardware.device(),
        versions=hardware.versions(),
        engine=outcome.engine,
        probe=outcome.probe.document(),
        runs=outcome.rows,
        extra={
            "card": outcome.card.as_dict(),
            "target": {"name": checkpoint.name, "fingerprint": checkpoint.fingerprint},
            "settings": _recorded(settings),
            "rule": "position-keyed",
            "interrupted": outcome.interrupted,
        },
    )
    if options.save_result:
        for path in report.save_result(options.result_dir, text, _vllm(outcome, plan, checkpoint.name)):
            print(f"wrote {path}")
    print(text)
    return 130 if outcome.interrupted else 0


def _vllm(outcome: Any, plan: Any, model: str) -> list[dict[str, Any]]:
    from jspec.measure import metrics

    results = []
    for dataset, _ in plan.datasets:
        groups = [g for g in outcome.groups if g.dataset == dataset]
        for name in plan.runs if groups else ():
            traces = [t for g in groups for turns in g.traces[name] for t in turns]
            wall = sum(g.wall[name] for g in groups)
            results.append(
                metrics.vllm_result(
                    traces, wall, model_id=model, label=f"{dataset}-{name}", max_concurrency=plan.concurrency
                )
            )
    return results


def _generate(options: argparse.Namespace) -> int:
    from jspec import api
    from jspec.decoding.request import Request
    from jspec.drafters import named
    from jspec.drafters.draft_model import draft_model
    from jspec.drafters.modes import mode_for
    from jspec.measure.document import plain
    from jspec.target import loading

    prompt = _standard_input() if options.prompt == "-" else options.prompt
    checkpoint = loading.load(options.model, dtype=options.dtype, revision=options.revision)
    seed = options.seed
    if seed is None:
        seed = Request(prompt=(0,)).with_seed().seed
        if options.temperature > 0:
            print(f"jspec: seed {seed}", file=sys.stderr)
    begin = time.perf_counter()
    if options.draft_model is not None:
        drafter: Any = draft_model(
            loading.load(options.draft_model, dtype=options.dtype),
            checkpoint,
            proposals=options.num_speculative_tokens,
            mode=mode_for(options.accept),
        )
    else:
        drafter = named.drafter(options.drafter, checkpoint, options.accept)
    chunks = api.stream_batch(
        checkpoint,
        prompt,
        drafter=drafter,
        accept=options.accept,
        chat=not options.raw,
        n=options.n,
        echo=options.echo,
        config=api.engine(checkpoint, rows=options.rows, taps=drafter[0].taps),
        switches=_switches(options),
        max_tokens=options.max_tokens,
        min_tokens=options.min_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=_bias(options.logit_bias),
        ignore_eos=options.ignore_eos,
        stop=options.stop,
        include_stop=options.include_stop,
        logprobs=options.logprobs,
        logprobs_kind=options.logprobs_kind,
        seed=seed,
    )
    first = None
    done: list[Any] = []
    with CompileCounter() as counter:
        # One slot, so answers come one after another.
        for chunk in chunks:
            if chunk.text:
                first = first or time.perf_counter()
                print(chunk.text, end="", flush=True)
            if chunk.answer is not None:
                done.append(chunk.answer)
                print()
    for answer in done:
        for entry in answer.logprobs or ():
            # A token that a filter removed has -inf, for which JSON has no word: null.
            print(json.dumps(plain({"choice": answer.choice} | vars(entry)), allow_nan=False))
        if answer.error is not None:
            print(f"jspec: the answer broke off: {answer.error}", file=sys.stderr)
    if options.stats:
        ready = (first or begin) - begin
        print(
            f"jspec: first text after {ready:.2f} s, all after {time.perf_counter() - begin:.2f} s; {counter}",
            file=sys.stderr,
        )
        for answer in done:
            use, took = answer.usage, answer.acceptance
            print(
                f"jspec: answer {answer.choice}: {use.prompt_tokens} prompt and {use.completion_tokens} output tokens "
                f"in {took.rounds} rounds, {took.accepted} of {took.proposed} drafted accepted; {answer.finish_reason}",
                file=sys.stderr,
            )
    return 1 if any(answer.error is not None for answer in done) else 0


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise JspecError(
            f"standard input is not {error.encoding} (byte {error.start} is `0x{error.object[error.start]:02x}`).",
            "text in the encoding of the terminal.",
            "convert it, for instance with `iconv -t utf-8`.",
        ) from None


def _recorded(settings: Any) -> dict[str, Any]:
    """Settings as the document states them: a switch that nobody set is the template's own choice."""
    return vars(settings) | {"switches": settings.switches or "template default"}


def _switches(options: argparse.Namespace) -> dict[str, Any]:
    """Variables of the chat template, from their flags."""
    out: dict[str, Any] = {}
    for entry in options.template_switch:
        name, _, value = entry.partition("=")
        try:
            out[name] = json.loads(value)
        except ValueError:
            raise JspecError(
                f"`--template-switch` is `{entry}`.", "NAME=JSON.", "write for instance reasoning_effort='\"low\"'."
            ) from None
    if options.enable_thinking is not None:
        out["enable_thinking"] = options.enable_thinking
    return out


def _bias(entries: Sequence[str]) -> dict[int, float]:
    """`ID=VALUE` each."""
    out = {}
    for entry in entries:
        name, _, value = entry.partition("=")
        try:
            out[int(name)] = float(value)
        except ValueError:
            raise JspecError(
                f"`--logit-bias` is `{entry}`.", "ID=VALUE with a token id and a number.", "write for instance 9=-100."
            ) from None
    return out


def _synthesise(options: argparse.Namespace) -> int:
    from jspec.target import loading
    from jspec.training import plan, signals

    read = plan.read(Path(options.plan))
    if options.tokens < 1:
        raise JspecError(f"`--tokens` is `{options.tokens}`.", "at least 1.", "correct it.")
    found = [Path(name) for name in options.benchmarks]
    files = [file for path in found for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    target = loading.load(options.model, dtype=options.dtype, revision=options.revision)
    with signals.on_signal() as stop:
        ended = plan.run(
            read,
            target,
            Path(options.out),
            data=Path(options.data) if options.data else None,
            benchmarks=files,
            tokens=options.tokens,
            tell=lambda line: print(line, file=sys.stderr, flush=True),
            stop=stop,
        )
    print(Path(options.out) / "texts" if ended else "stopped; the same command goes on")
    return 0 if ended else 130


def _train(options: argparse.Namespace) -> int:
    try:
        from jspec.training import recipe, signals
    except ImportError as error:
        raise JspecError(
            f"training needs a package that is not installed ({error}).", "the extra `train`.", "install jspec[train]."
        ) from None
    import jax

    from jspec.target import loading

    read = recipe.read(Path(options.recipe))
    if not 1 <= options.devices <= len(jax.devices()):
        raise JspecError(
            f"`--devices` is `{options.devices}`.", f"1 to {len(jax.devices())}, what there is.", "correct it."
        )
    target = loading.load(options.model, dtype=options.dtype, revision=options.revision)
    with signals.on_signal() as stop:
        made = recipe.run(
            read,
            target,
            [Path(folder) for folder in options.texts],
            Path(options.out),
            tell=lambda line: print(line, file=sys.stderr, flush=True),
            stop=stop,
            devices=jax.devices()[: options.devices],
        )
    print("stopped; the same command goes on" if made is None else made)
    return 0 if made is not None else 130


def _convert(options: argparse.Namespace) -> int:
    from jspec.drafters.formats import convert
    from jspec.target import loading

    target = loading.load(options.target, revision=options.revision)
    told = convert.convert(Path(options.source), Path(options.out), target, options.to, options.dtype)
    print("\n".join(told.lines))
    print(json.dumps(told.facts))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from jspec import api
    from jspec.decoding import probe
    from jspec.measure import hardware
    from jspec.target import describe, loading

    if options.target and options.model:
        raise JspecError(
            f"two targets were given, `{options.target}` and `--model {options.model}`.", "one.", "leave one out."
        )
    checkpoint = loading.load(options.target or options.model, dtype=options.dtype, revision=options.revision)
    config = api.engine(checkpoint, slots=options.max_concurrency, rows=options.rows, max_length=1024)
    found = probe.probe(config, checkpoint.params, between=True)
    device = hardware.device()
    print("\n".join(describe.describe(checkpoint)))
    print(f"\nengine  {config.slots} slots, {config.rows} rows, {config.capacity} columns")
    attention = config.check_runs(checkpoint.params.dtype)
    print(f"attention {attention.name}" + "".join(f"; not {reason}" for reason in attention.reasons))
    for name, finding in found.findings.items():
        held = {True: "yes", False: "no", None: "?"}[finding.holds]
        print(f"{name:9} {held:4} {finding.reason}")
    print(
        "Within this engine the text depends on prompt, settings and seed alone (rerun, content, row, slot)."
        if found.exact
        else "Within this engine the text may depend on drafter and batch mates: a needed property does not hold."
    )
    print("Between engines equality is claimed only where batch, width or capacity say yes.")
    body = {"schema": 1, "device": device, "versions": hardware.versions(), "probe": found.document()}
    print(json.dumps(body, default=str))
    return 0 if found.exact else 1


def _progress(done: int, total: int, what: str) -> None:
    """A bar on stderr, rewritten in place on a terminal, silent elsewhere."""
    if sys.stderr.isatty():
        filled = 24 * done // max(total, 1)
        print(
            f"\r\033[K[{'#' * filled}{'.' * (24 - filled)}] {done}/{total} {what}", end="", file=sys.stderr, flush=True
        )


def _progress_end() -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
