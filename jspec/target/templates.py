"""Chat templates: Jinja programs from foreign files, compiled into a sandbox.

The sandbox keeps a template away from everything but its variables. What it does not bound is time and
memory: a loop inside a loop, a macro that calls itself twice, or a text multiplied by a billion would
hold the process for good. So turns of loops, calls of macros and printed characters are counted, and no
number may make a text much longer at once.
"""

from __future__ import annotations

import contextvars
import dataclasses
import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor

from jspec.errors import JspecError

STEPS = 250_000  # of one rendering: about a second; templates take some for each message
CALL = 10  # steps of a macro, which takes that many times as long as a turn of a loop
LONGEST = 1 << 24  # characters of a text, items of a list
MOST = 1_000_000  # the largest number that a filter or method is called with


@dataclasses.dataclass
class _Spent:
    """What one rendering has used up."""

    steps: int = 0
    characters: int = 0

    def add(self, steps: int, characters: int) -> None:
        self.steps += steps
        self.characters += characters
        if self.steps > STEPS:
            raise _TooMuch(f"it goes on for more than {STEPS:,} steps")
        _check_length(self.characters)


_spent: contextvars.ContextVar[_Spent] = contextvars.ContextVar("_spent")

_WIDTH = re.compile(r"\d{7}|\*")  # in a format: a width or precision of millions, or one given elsewhere

# What a template can fail by once it runs: Jinja's own errors and those of Python's operators.
_FAULTS = (
    *(jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError),
    *(RecursionError, MemoryError),
)


class Template:
    """A compiled template.

    Attributes:
      reads: the variables that it reads and does not set.
      globals: names that are there without being given.
    """

    def __init__(self, source: str) -> None:
        """Compiles.

        Raises:
          JspecError: it is not Jinja.
        """
        env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        try:
            self.reads = jinja2.meta.find_undeclared_variables(env.parse(source))
            self._template = env.from_string(source)
        except (jinja2.TemplateError, RecursionError, MemoryError) as error:
            raise JspecError(
                f"the model's chat template is not valid Jinja ({_told(error)}).",
                "a template that compiles.",
                "get the checkpoint again, or encode the prompt as plain text.",
            ) from None
        self.globals = frozenset(self._template.globals)

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text of a chat.

        Raises:
          JspecError: the template refuses the messages, fails, or does not come to an end.
        """
        token = _spent.set(_Spent())
        try:
            return self._template.render(variables)
        except _FAULTS as error:
            raise JspecError(
                f"the chat template refuses these messages: {_told(error)}.",
                "messages of the roles, in the order and with the fields that the model was trained on.",
                "check `role` and `content` of each message.",
            ) from None
        finally:
            _spent.reset(token)


def _told(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:300].rstrip(".")


# --- Limits --------------------------------------------------------------------------------------


class _TooMuch(jinja2.TemplateError):
    """A limit of this module was reached."""


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The settings of transformers, for which templates are written, and the limits above."""

    intercepted_binops = frozenset(["+", "*", "%", "**"])

    def __init__(self, **settings: Any) -> None:
        super().__init__(finalize=_printed, **settings)
        self.filters = {name: _bounded(call) for name, call in {**self.filters, "tojson": _tojson}.items()}
        self.filters |= {_STEP: _step, _JOIN: _join}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        del self.globals["lipsum"]  # of no use in a chat

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        return _Counting().visit(super()._parse(source, name, filename))

    def call(self, context: jinja2.runtime.Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(obj, "__wrapped__", obj)  # the sandbox puts its own `format` around a text's
        _check_call(getattr(method, "__name__", ""), getattr(method, "__self__", None), args, kwargs)
        return _checked(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, str | list | tuple) and isinstance(times, int):
                    _check_length(len(text) * times)
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _check_length(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        numbers = isinstance(left, int) and isinstance(right, int)
        if numbers and operator in ("*", "**"):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > 4096:
                raise _TooMuch("a number has more than 4,096 bits")
        return super().call_binop(context, operator, left, right)


_STEP, _JOIN = "jspec step", "jspec join"  # no template can spell these


class _Counting(jinja2.visitor.NodeTransformer):
    """Puts a step at the head of every loop and macro, and bounds what `~` joins."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        return self._counted(node, 1)

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Node:
        return self._counted(node, CALL)

    def visit_CallBlock(self, node: jinja2.nodes.CallBlock) -> jinja2.nodes.Node:
        return self._counted(node, CALL)

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        items = jinja2.nodes.List(node.nodes, lineno=node.lineno)
        return jinja2.nodes.Filter(items, _JOIN, [], [], None, None, lineno=node.lineno)

    def visit_Output(self, node: jinja2.nodes.Output) -> list[jinja2.nodes.Node]:
        self.generic_visit(node)
        # What stands in the template as it is does not pass `_printed`.
        length = sum(len(part.data) for part in node.nodes if isinstance(part, jinja2.nodes.TemplateData))
        return [_counter(node, 0, length), node] if length else [node]

    def _counted(self, node: Any, steps: int) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _counter(node, steps, 0))
        return node


def _counter(node: jinja2.nodes.Node, steps: int, characters: int) -> jinja2.nodes.Node:
    """A statement that adds to what is spent."""
    values = [jinja2.nodes.Const(value, lineno=node.lineno) for value in (steps, characters)]
    step = jinja2.nodes.Filter(values[0], _STEP, [values[1]], [], None, None, lineno=node.lineno)
    return jinja2.nodes.ExprStmt(step, lineno=node.lineno)


@jinja2.pass_context  # so that it is not taken for a constant
def _step(context: jinja2.runtime.Context, steps: int, characters: int) -> None:
    _spent.get().add(steps, characters)


@jinja2.pass_context
def _printed(context: jinja2.runtime.Context, value: Any) -> Any:
    text = str(value)
    _spent.get().add(0, len(text))
    return text


def _join(items: list[Any]) -> str:
    return str(_checked("".join(str(item) for item in items)))


def _bounded(call: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is checked as a method of that name is."""

    @functools.wraps(call)  # keeps the marks by which Jinja knows what to pass
    def checked(*args: Any, **kwargs: Any) -> Any:
        # Some filters get the environment or a context first.
        at = 1 if hasattr(call, "jinja_pass_arg") else 0
        _check_call(call.__name__.removeprefix("do_"), args[at] if len(args) > at else None, args[at + 1 :], kwargs)
        return _checked(call(*args, **kwargs))

    return checked


def _check_call(name: str, owner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Before a method or filter runs: `owner` is what it is called on."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MOST:
            raise _TooMuch(f"a number is beyond {MOST:,}")
    if name in ("format", "format_map") and isinstance(owner, str):
        _check_format(owner)
    if name == "replace" and isinstance(owner, str) and len(args) >= 2:
        old, new = str(args[0]), str(args[1])
        _check_length(len(owner) + owner.count(old) * len(new))
    if name == "join":
        text, items = (owner, args[0] if args else None) if isinstance(owner, str) and args else (args[:1], owner)
        if isinstance(items, list | tuple):
            _check_length(sum(len(str(item)) for item in items) + len(items) * len(str(text)))


def _checked(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        _check_length(len(value))
    return value


def _check_format(text: str) -> None:
    if _WIDTH.search(text):
        raise _TooMuch("a format asks for a width of millions")


def _check_length(length: int) -> None:
    if length > LONGEST:
        raise _TooMuch(f"a text or list is longer than {LONGEST:,}")


# --- What templates may call ---------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` ... `{% endgeneration %}`: marks the assistant's part, prints it unchanged."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.datetime.now().strftime(format_)
