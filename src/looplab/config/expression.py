"""Small safe expressions over configs and metrics: `vec.num_envs % vec.num_workers == 0`.

An expression is parsed as Python, walked once and compiled to closures. Anything not on the list below is rejected at
compile time, with its name and position. Nothing of Python is reachable: a dot is a dictionary key, never an attribute,
and the only calls are those of `operations.FUNCTIONS`. Time and memory are bounded (length, depth, size of integers,
number of loop steps), so expressions written by an agent can be evaluated safely in the engine.

    train.batch_size, features.3.weight, features[3].weight, config["a b"], `train/loss`, `train/loss`.last
    'eval-logloss' < 0.4, 'Test Loss'.best: where only a number makes sense, a text in quotes is a name
    numbers, texts, lists, true false null (and True False None), + - * / // % **, comparisons, in, is null,
    and or not, `a if c else b`, the functions, and `all(f.weight > 0 for f in features)` inside
    any all sum min max len; loops and these functions iterate over the values of a dictionary.
"""

from __future__ import annotations

import ast
import difflib
import keyword
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from looplab.config.operations import (
    ARITHMETIC_ERRORS,
    BINARY,
    COMPARE,
    FUNCTIONS,
    LOOPING,
    MAX_BITS,
    OperationError,
    show,
)
from looplab.config.paths import nearest
from looplab.errors import LabError

MAX_LENGTH = 2_000
"""Maximum number of characters of an expression."""
MAX_DEPTH = 100
"""Maximum nesting depth; a sum of 100 terms is that deep."""
MAX_STEPS = 100_000
"""Maximum number of loop steps of one evaluation, over all loops."""

Names = Mapping[str, Any] | Callable[[str], Any]
"""Where names are looked up: a (nested) mapping, or a function of the dotted name that may raise KeyError."""


class ExpressionError(LabError):
    """An expression that cannot be parsed, or cannot be evaluated with the given values."""


class MissingName(ExpressionError):
    """A name that does not exist: `name` is the dotted name, `nearest` the most similar names."""

    def __init__(self, name: str, nearest: tuple[str, ...] = ()) -> None:
        self.name = name
        self.nearest = nearest
        super().__init__(f"{name} is missing", hint=f"nearest: {', '.join(nearest)}" if nearest else None)


@dataclass(frozen=True, slots=True)
class Expression:
    """A compiled expression."""

    text: str
    """Its source text."""
    names: frozenset[str]
    """The dotted names that it reads, including those only tested with `defined`; no loop variables."""
    _run: Callable[[_Scope], Any] = field(repr=False, compare=False)
    _readers: Mapping[str, Callable[[_Scope], Any]] = field(repr=False, compare=False)

    def evaluate(self, names: Names) -> Any:
        """Return its value.

        Raises:
            MissingName: A name does not exist.
            ExpressionError: The values do not fit. Nothing else is raised.
        """
        try:
            return self._run(_Scope(names, {}, [MAX_STEPS]))
        except _Absent as absent:
            # In an expression, a key that contains a dot needs no escape.
            close = (path.replace("\\", "") for path in nearest(absent.owner, absent.asked))
            raise MissingName(absent.name, tuple(close)) from None

    def values(self, names: Names) -> dict[str, Any]:
        """Return the values of the names that it reads, without the missing ones."""
        scope = _Scope(names, {}, [MAX_STEPS])
        values = {}
        for name, read in self._readers.items():
            with suppress(_Absent):
                values[name] = read(scope)
        return values

    def __str__(self) -> str:
        return self.text


def compile_expression(text: str) -> Expression:
    """Compile an expression.

    Raises:
        ExpressionError: The text is not an expression; shows the position of the mistake.
    """
    if not isinstance(text, str):
        raise ExpressionError(f"an expression must be text, not {show(text)}")
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"the expression is too long: {len(text)} characters, at most {MAX_LENGTH} are allowed")
    if not text.strip():
        raise ExpressionError("the expression is empty")
    source = _Source(text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source.python, mode="eval")
    except SyntaxError as error:
        column = (
            error.offset - 1 if error.offset else len(source.python)
        )  # at an unexpected end, Python gives no position
        reason = error.msg.split(". ")[0]  # the second sentence is advice about Python
        source.fail(reason, source.place(error.lineno or 1, column))
    except (RecursionError, MemoryError):
        raise ExpressionError("the expression is nested too deeply") from None
    except ValueError as error:
        raise ExpressionError(f"the expression cannot be parsed: {error}") from None
    builder = _Builder(source)
    run = builder.build(tree.body)
    return Expression(text, frozenset(builder.names), run, builder.names)


def unquoted(expression: Expression, names: Iterable[str]) -> str | None:
    """Return the first of these names that an expression contains but does not read, as in `eval-loss < 3`.

    Such a name needs quotes: without them it is read as a difference, a quotient or several names.
    """
    text = re.sub(r"`[^`]*`|'[^']*'|\"[^\"]*\"", " ", expression.text)
    spoken = (name for name in names if not re.fullmatch(r"[\w.]+", name) and name not in expression.names)
    return next((name for name in spoken if re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w/-])", text)), None)


# --- from looplab's spelling to Python's ---------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""
      (?P<space>\s+)
    | (?P<string>'''(?:\\.|[^\\])*?''' | \"\"\"(?:\\.|[^\\])*?\"\"\" | '(?:\\.|[^'\\\n])*' | "(?:\\.|[^"\\\n])*")
    | (?P<quoted>`[^`]+`|`)
    | (?P<number>0[xXoObB]\w+ | (?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d[\d_]*)?\w*)
    | (?P<word>[^\W\d]\w*)
    | (?P<other>==|!=|<=|>=|:=|&&|\|\||.)
    """,
    re.VERBOSE | re.DOTALL,
)
_SEGMENT = re.compile(r"`([^`]+)`|(\w+)")
_SEGMENT_NEXT = re.compile(r"\.[^\W\d]")
_MISTAKES = {
    "=": "compare with ==",
    "&&": "write `and`",
    "||": "write `or`",
    "!": "write `not`",
    "?": "write `a if condition else b`",
    "#": "expressions have no comments",
    ";": "write a single expression",
    "$": "write names without a sign",
}
_VALUE_WORDS = {"True", "False", "None"}


class _Source:
    """The text, its translation to Python, and the mapping of positions from the Python back to the text.

    `a.b.3` becomes `a['b'][3]`, so a dot can never become an attribute, and keys that are not Python names
    (`ot.lambda`, digits) work. A name in backquotes becomes a placeholder.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.quoted: dict[str, str] = {}
        """Placeholder → the name in backquotes."""
        self._pieces: list[str] = []
        self._origin: list[int] = []
        mark = "_q"
        while mark in text:
            mark += "q"
        self._rewrite(mark)
        self.python = "".join(self._pieces)
        self._origin.append(len(text))

    def _put(self, piece: str, start: int, *, same: bool = False) -> None:
        self._pieces.append(piece)
        self._origin.extend(range(start, start + len(piece)) if same else [start] * len(piece))

    def _rewrite(self, mark: str) -> None:
        text = self.text
        at = 0
        after_value = False  # a dot begins a key only after a name or a closing bracket
        while at < len(text):
            if after_value and text[at] == "." and (segment := _SEGMENT.match(text, at + 1)):
                literal, word = segment.groups()
                plain = word is not None and word.isascii() and word.isdigit() and (word == "0" or word[0] != "0")
                self._put(f"[{word}]" if plain else f"[{(literal or word)!r}]", at)
                at = segment.end()
                continue
            token = _TOKEN.match(text, at)
            assert token is not None  # the last alternative matches any character
            kind, piece, end = token.lastgroup, token.group(), token.end()
            if kind == "space":
                if at > 0:  # leading space would be an indent
                    self._put(" " * len(piece), at)
            elif kind == "quoted":
                if len(piece) < 3:
                    self.fail("a name in backquotes is empty or not closed", at)
                self._put_quoted(mark, piece[1:-1], at)
                after_value = True
            elif kind == "string" and len(piece) > 2 and "\\" not in piece and _SEGMENT_NEXT.match(text, end):
                self._put_quoted(mark, piece[1:-1], at)
                after_value = True
            else:
                if piece in _MISTAKES:
                    self.fail(f"`{piece}` is not allowed in an expression", at, _MISTAKES[piece])
                if after_value and piece == "." and text[end : end + 1] == "*":
                    self.fail(
                        "`*` is not a name here", end, "write all(f.key > 0 for f in list), or any, sum, min, max"
                    )
                self._put(piece, at, same=True)
                if kind == "word":
                    after_value = piece in _VALUE_WORDS or not keyword.iskeyword(piece)
                else:
                    after_value = kind == "other" and piece in "])"
            at = end

    def _put_quoted(self, mark: str, name: str, at: int) -> None:
        placeholder = f"{mark}{len(self.quoted)}"
        self.quoted[placeholder] = name
        self._put(placeholder, at)

    def place(self, line: int, column: int) -> int:
        """Return the index in the text of a line and column (in characters) of the Python."""
        before = sum(len(part) + 1 for part in self.python.split("\n")[: line - 1])
        return self._origin[max(0, min(before + column, len(self.python)))]

    def start(self, node: ast.expr) -> int:
        return self.place(node.lineno, self._characters(node.lineno, node.col_offset))

    def words(self, node: ast.expr) -> str:
        """Return the part of the text that a node comes from, on one line."""
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
        end = self.place(end_line, self._characters(end_line, end_column))
        return " ".join(self.text[self.start(node) : end].split())

    def _characters(self, line: int, octets: int) -> int:
        """Convert a column in UTF-8 bytes, as the parser counts, to a column in characters."""
        return len(self.python.split("\n")[line - 1].encode()[:octets].decode(errors="ignore"))

    def fail(self, message: str, at: int, hint: str | None = None) -> NoReturn:
        """Raise ExpressionError with the text around the position and a caret under it."""
        begin = max(0, at - 60)
        cut = self.text[begin : at + 40]
        lead, tail = "… " if begin else "", " …" if at + 40 < len(self.text) else ""
        shown = lead + re.sub(r"\s", " ", cut) + tail
        raise ExpressionError(f"{message}\n  {shown}\n  {' ' * (len(lead) + at - begin)}^", hint=hint) from None


# --- names ---------------------------------------------------------------------------------------------------------

_MISSING: Any = object()
_Key = str | int


class _Absent(Exception):
    """A missing name, before the search for similar ones (which `defined` never needs)."""

    def __init__(self, name: str, owner: Any, asked: str) -> None:
        self.name = name
        """The full name, for messages."""
        self.owner = owner
        """The value in which it was looked up."""
        self.asked = asked
        """The name relative to the owner."""


class _Scope:
    """State of one evaluation: the names, the loop variables, and the remaining loop steps."""

    __slots__ = ("local", "names", "steps")

    def __init__(self, names: Names, local: dict[str, tuple[Any, str]], steps: list[int]) -> None:
        self.names = names
        self.local = local
        """Loop variable → its value and the path of that value."""
        self.steps = steps

    def find(self, keys: tuple[_Key, ...], dotted: str) -> Any:
        names = self.names
        if type(names) is not dict and not isinstance(names, Mapping):  # the first test is fast
            return self._call_lookup(names, keys, dotted)
        value: Any = names
        for key in keys:
            value = _step(value, key)
            if value is _MISSING:
                break
        else:
            return value
        if (value := _search(names, keys)) is _MISSING:
            raise _Absent(dotted, names, dotted)
        return value

    def _call_lookup(self, lookup: Callable[[str], Any], keys: tuple[_Key, ...], dotted: str) -> Any:
        """Look up the full name, then shorter ones, following the remaining keys into the value."""
        for cut in range(len(keys), 0, -1):
            try:
                value = lookup(".".join(map(str, keys[:cut])))
            except KeyError:
                continue
            for key in keys[cut:]:
                value = _step(value, key)
            if value is not _MISSING:
                return value
        raise _Absent(dotted, None, dotted)


def _step(value: Any, key: _Key) -> Any:
    """Return the item of a mapping or list at a key; `_MISSING` if there is none."""
    if type(value) is dict or isinstance(value, Mapping):
        if key in value:
            return value[key]
        other: _Key = str(key) if isinstance(key, int) else int(key) if _is_index(key) else key
        return value.get(other, _MISSING)
    if isinstance(value, list | tuple):
        if isinstance(key, str):
            if not _is_index(key):
                return _MISSING
            key = int(key)
        return value[key] if -len(value) <= key < len(value) else _MISSING
    return _MISSING


def _is_index(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) <= 18


def _search(value: Any, keys: tuple[_Key, ...]) -> Any:
    """Follow keys, joining several into one where needed, as in {"train.loss": {"last": 1}}; the shortest join wins."""
    if not keys:
        return value
    for cut in range(1, len(keys) + 1):
        found = _step(value, keys[0] if cut == 1 else ".".join(map(str, keys[:cut])))
        if found is not _MISSING and (found := _search(found, keys[cut:])) is not _MISSING:
            return found
    return _MISSING


# --- from Python's tree to closures --------------------------------------------------------------------------------

_Run = Callable[[_Scope], Any]

_FORBIDDEN: dict[type[ast.AST], str] = {
    ast.Lambda: "lambda",
    ast.NamedExpr: "`:=`",
    ast.JoinedStr: "an f-string",
    ast.Attribute: "an attribute of a value",
    ast.Dict: "a dictionary",
    ast.Set: "a set",
    ast.DictComp: "a dictionary comprehension",
    ast.SetComp: "a set comprehension",
    ast.Slice: "a slice",
    ast.Starred: "`*`",
    ast.Await: "await",
    ast.Yield: "yield",
    ast.YieldFrom: "yield",
    ast.MatMult: "`@`",
    ast.BitAnd: "`&`",
    ast.BitOr: "`|`",
    ast.BitXor: "`^`",
    ast.LShift: "`<<`",
    ast.RShift: "`>>`",
    ast.Invert: "`~`",
}
_INSTEAD: dict[type[ast.AST], str] = {
    ast.BitAnd: "write `and`",
    ast.BitOr: "write `or`",
    ast.BitXor: "a power is **",
    ast.Invert: "write `not`",
    ast.Set: "write a list: [1, 2]",
    ast.Attribute: "a dot names a key of the config, not an attribute of a value",
}
_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_OF_NUMBERS = {"abs", "round", "floor", "ceil", "sqrt", "log", "exp", "isnan", "isfinite"}
_WORDS = {"true": True, "false": False, "null": None}


class _Builder:
    """Compiles the tree to closures in one walk and rejects what is not allowed."""

    def __init__(self, source: _Source) -> None:
        self.source = source
        self.names: dict[str, _Run] = {}
        self._local: list[str] = []
        self._depth = 0

    def build(self, node: ast.expr) -> _Run:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self.source.fail("the expression is nested too deeply", self.source.start(node))
        try:
            return self._build(node)
        finally:
            self._depth -= 1

    def _build(self, node: ast.expr) -> _Run:
        match node:
            case ast.Constant():
                return self._constant(node)
            case ast.Name() | ast.Subscript():
                return self._reference(node)[0]
            case ast.List() | ast.Tuple():
                parts = [self.build(part) for part in node.elts]
                return lambda scope: [part(scope) for part in parts]
            case ast.BinOp():
                return self._binary(node)
            case ast.UnaryOp():
                return self._unary(node)
            case ast.BoolOp():
                return self._boolean(node)
            case ast.Compare():
                return self._compare(node)
            case ast.IfExp():
                test, then, other = self.build(node.test), self.build(node.body), self.build(node.orelse)
                return lambda scope: then(scope) if test(scope) else other(scope)
            case ast.Call():
                return self._call(node)
            case ast.GeneratorExp() | ast.ListComp():
                self.source.fail(
                    "a loop is only allowed inside a function",
                    self.source.start(node),
                    f"one of {' '.join(sorted(LOOPING))}",
                )
            case _:
                self._refuse(node, node)

    def _refuse(self, what: ast.AST, where: ast.expr) -> NoReturn:
        name = _FORBIDDEN.get(type(what), type(what).__name__)
        self.source.fail(f"{name} is not allowed in an expression", self.source.start(where), _INSTEAD.get(type(what)))

    def _constant(self, node: ast.Constant) -> _Run:
        value = node.value
        if value is not None and type(value) not in (int, float, bool, str):
            kind = {"bytes": "bytes", "complex": "a complex number", "ellipsis": "`...`"}[type(value).__name__]
            self.source.fail(f"{kind} is not allowed in an expression", self.source.start(node))
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            self.source.fail(f"the number is too large: more than {MAX_BITS} bits", self.source.start(node))
        return lambda scope: value

    # -- operators --

    def _guarded(self, node: ast.expr, sign: str, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        words = self.source.words(node)

        def run(left: Any, right: Any) -> Any:
            try:
                return function(left, right)
            except (OperationError, *ARITHMETIC_ERRORS) as error:
                raise ExpressionError(f"`{words}`: {error} in {show(left)} {sign} {show(right)}") from None

        return run

    def _binary(self, node: ast.BinOp) -> _Run:
        if type(node.op) not in BINARY:
            self._refuse(node.op, node)
        operation = self._guarded(node, *BINARY[type(node.op)])
        build = self.build if isinstance(node.op, ast.Add) else self._build_number  # texts can be joined
        left, right = build(node.left), build(node.right)
        return lambda scope: operation(left(scope), right(scope))

    def _unary(self, node: ast.UnaryOp) -> _Run:
        operand = self.build(node.operand) if isinstance(node.op, ast.Not) else self._build_number(node.operand)
        if isinstance(node.op, ast.Not):
            return lambda scope: not operand(scope)
        if not isinstance(node.op, ast.USub | ast.UAdd):
            self._refuse(node.op, node)
        sign = -1 if isinstance(node.op, ast.USub) else 1
        words = self.source.words(node)

        def run(scope: _Scope) -> Any:
            value = operand(scope)
            if not isinstance(value, int | float):
                raise ExpressionError(f"`{words}`: {show(value)} is not a number")
            return -value if sign < 0 else +value

        return run

    def _boolean(self, node: ast.BoolOp) -> _Run:
        parts = [self.build(part) for part in node.values]
        stop = isinstance(node.op, ast.Or)

        def run(scope: _Scope) -> Any:
            value: Any = None
            for part in parts:
                value = part(scope)
                if bool(value) is stop:
                    break
            return value

        return run

    def _compare(self, node: ast.Compare) -> _Run:
        ordered = [isinstance(kind, _ORDER) for kind in node.ops]
        first = self._build_number(node.left) if ordered[0] else self.build(node.left)
        steps = []
        for i, (kind, right) in enumerate(zip(node.ops, node.comparators, strict=True)):
            build = self._build_number if any(ordered[i : i + 2]) else self.build
            if isinstance(kind, ast.Is | ast.IsNot) and not self._is_singleton(right):
                self.source.fail(
                    "`is` compares only with null, true or false", self.source.start(right), "compare with =="
                )
            steps.append((self._guarded(node, *COMPARE[type(kind)]), build(right)))

        def run(scope: _Scope) -> bool:
            left = first(scope)
            for operation, right in steps:
                value = right(scope)
                if not operation(left, value):
                    return False
                left = value
            return True

        return run

    def _build_number(self, node: ast.expr) -> _Run:
        """Build an operand that must be a number, so that a text can only be a name in quotes."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value:
            return self._named((node.value,))
        return self.build(node)

    @staticmethod
    def _is_singleton(node: ast.expr) -> bool:
        if isinstance(node, ast.Constant):
            return node.value is None or isinstance(node.value, bool)
        return isinstance(node, ast.Name) and node.id in _WORDS

    # -- names --

    def _reference(self, node: ast.Name | ast.Subscript) -> tuple[_Run, Callable[[_Scope], str]]:
        """Return a closure that reads a name with its keys, and one that returns its full name."""
        keys: list[_Key | _Run] = []
        base: ast.expr = node
        while isinstance(base, ast.Subscript):
            keys.append(self._key(base.slice))
            base = base.value
        keys.reverse()
        if len(keys) > MAX_DEPTH:
            self.source.fail("the name has too many keys", self.source.start(node))
        if not isinstance(base, ast.Name) or base.id in _WORDS:
            words = self.source.words(base)
            value = self.build(base) if not isinstance(base, ast.Name) else self._word(base.id)
            return self._walk(value, keys, lambda scope: words), lambda scope: words
        if base.id in self._local:
            return self._walk_local(base.id, keys)
        static: list[_Key] = [self.source.quoted.get(base.id, base.id)]
        while keys and isinstance(keys[0], str | int):
            static.append(keys.pop(0))  # type: ignore[arg-type]
        dotted = ".".join(map(str, static))
        return self._walk(self._named(tuple(static)), keys, lambda scope: dotted), lambda scope: dotted

    def _named(self, path: tuple[_Key, ...]) -> _Run:
        dotted = ".".join(map(str, path))

        def read(scope: _Scope) -> Any:
            return scope.find(path, dotted)

        self.names[dotted] = read
        return read

    @staticmethod
    def _word(word: str) -> _Run:
        value = _WORDS[word]
        return lambda scope: value

    def _key(self, node: ast.expr) -> _Key | _Run:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            number = node.operand.value
            if type(number) is int:
                return -number
        if isinstance(node, ast.Constant) and type(node.value) in (str, int):
            self._constant(node)
            return node.value  # type: ignore[return-value]
        if isinstance(node, ast.Constant):
            self.source.fail("a key must be text or a whole number", self.source.start(node))
        run = self.build(node)
        words = self.source.words(node)

        def key(scope: _Scope) -> _Key:
            value = run(scope)
            if isinstance(value, bool) or not isinstance(value, str | int):
                raise ExpressionError(f"`{words}`: a key must be text or a whole number, not {show(value)}")
            return value

        return key

    @staticmethod
    def _walk(base: _Run, keys: list[_Key | _Run], name: Callable[[_Scope], str]) -> _Run:
        if not keys:
            return base

        def run(scope: _Scope) -> Any:
            value = base(scope)
            for index, key in enumerate(keys):
                exact = key(scope) if callable(key) else key
                found = _step(value, exact)
                if found is _MISSING:
                    before = [key(scope) if callable(key) else key for key in keys[:index]]
                    raise _Absent(".".join(map(str, (name(scope), *before, exact))), value, str(exact))
                value = found
            return value

        return run

    def _walk_local(self, variable: str, keys: list[_Key | _Run]) -> tuple[_Run, Callable[[_Scope], str]]:
        def origin(scope: _Scope) -> str:
            return scope.local[variable][1]

        def full(scope: _Scope) -> str:
            return ".".join([origin(scope), *(str(key(scope) if callable(key) else key) for key in keys)])

        return self._walk(lambda scope: scope.local[variable][0], keys, origin), full

    # -- calls --

    def _call(self, node: ast.Call) -> _Run:
        at = self.source.start(node)
        if not isinstance(node.func, ast.Name) or node.func.id in self.source.quoted:
            self.source.fail("only the listed functions can be called", at, self._known())
        name = node.func.id
        if name != "defined" and name not in FUNCTIONS:
            close = difflib.get_close_matches(name, [*FUNCTIONS, "defined"], n=2, cutoff=0.5)
            hint = f"did you mean {' or '.join(close)}?" if close else self._known()
            self.source.fail(f"unknown function {name}", at, hint)
        if node.keywords:
            self.source.fail(f"{name} takes no named arguments", self.source.start(node.keywords[0].value))
        if name == "defined":
            return self._defined(node)
        least, most, function = FUNCTIONS[name]
        if not least <= len(node.args) <= most:
            count = str(least) if least == most else f"{least} to {most}"
            self.source.fail(
                f"{name} takes {count} {'argument' if most == 1 else 'arguments'}, not {len(node.args)}", at
            )
        words = self.source.words(node)
        only = node.args[0]
        if name in LOOPING and len(node.args) == 1 and isinstance(only, ast.GeneratorExp | ast.ListComp):
            arguments = [self._loop(only)]
        else:
            build = self._build_number if name in _OF_NUMBERS else self.build
            arguments = [build(argument) for argument in node.args]

        def run(scope: _Scope) -> Any:
            values = [argument(scope) for argument in arguments]
            try:
                return function(*values)
            except (OperationError, *ARITHMETIC_ERRORS) as error:
                shown = ", ".join("…" if isinstance(value, Iterator) else show(value) for value in values)
                raise ExpressionError(f"`{words}`: {error} in {name}({shown})") from None

        return run

    @staticmethod
    def _known() -> str:
        return f"functions: {' '.join([*FUNCTIONS, 'defined'])}"

    def _defined(self, node: ast.Call) -> _Run:
        only = node.args[0] if len(node.args) == 1 else None
        if isinstance(only, ast.Name | ast.Subscript):
            read, _ = self._reference(only)
        elif isinstance(only, ast.Constant) and isinstance(only.value, str):
            read = self._named((only.value,))
        else:
            self.source.fail("defined takes one name", self.source.start(node), "as in defined(train.warmup)")

        def run(scope: _Scope) -> bool:
            try:
                read(scope)
            except _Absent:
                return False
            return True

        return run

    def _loop(self, node: ast.GeneratorExp | ast.ListComp) -> Callable[[_Scope], Iterator[Any]]:
        if len(node.generators) != 1:
            self.source.fail("only one `for` is allowed", self.source.start(node.generators[1].target))
        (loop,) = node.generators
        if loop.is_async:
            self.source.fail("async is not allowed in an expression", self.source.start(loop.target))
        if not isinstance(loop.target, ast.Name) or loop.target.id in self.source.quoted:
            self.source.fail(
                "a loop must have one plain variable", self.source.start(loop.target), "as in `for f in features`"
            )
        variable = loop.target.id
        words = self.source.words(loop.iter)
        if isinstance(loop.iter, ast.Name | ast.Subscript):
            read, origin = self._reference(loop.iter)
        else:
            read, origin = self.build(loop.iter), lambda scope: words
        self._local.append(variable)
        tests = [self.build(test) for test in loop.ifs]
        element = self.build(node.elt)
        self._local.pop()

        def run(scope: _Scope) -> Iterator[Any]:
            value = read(scope)
            if isinstance(value, Mapping):
                pairs: Any = value.items()
            elif isinstance(value, list | tuple):
                pairs = enumerate(value)
            else:
                raise ExpressionError(f"`{words}`: a loop needs a list or a dictionary, not {show(value)}")
            where = origin(scope)
            inner = _Scope(scope.names, dict(scope.local), scope.steps)
            for key, item in pairs:
                inner.steps[0] -= 1
                if inner.steps[0] < 0:
                    raise ExpressionError(f"`{words}`: more than {MAX_STEPS} loop steps")
                inner.local[variable] = (item, f"{where}.{key}")
                if all(test(inner) for test in tests):
                    yield element(inner)

        return run
