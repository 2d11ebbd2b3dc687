"""Expressions: what they may say, what they refuse, and that they mean what Python means."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from looplab.config.expression import (
    FUNCTIONS,
    MAX_DEPTH,
    MAX_LENGTH,
    ExpressionError,
    MissingName,
    compile_expression,
    unquoted,
)
from looplab.errors import LabError

CONFIG: dict[str, Any] = {
    "vec": {"num_envs": 30, "num_workers": 4},
    "env": {"num_envs": 4, "num_drones": 8},
    "train": {"bptt_horizon": 16, "optimizer": "muon", "warmup": None, "compile": False},
    "ot": {
        "lambda": 0.1,
        "loss_config": {
            "features": [
                {"use_learned_embed": True, "weight_label": 0.0, "dim_slice": [0, 8]},
                {"use_learned_embed": False, "weight_label": 5e-4, "dim_slice": [0, 8]},
            ]
        },
    },
    "heads": {"left": {"width": 32}, "right": {"width": 64}},
    "a b": {"c-d": 7},
    "zero": 0,
}


def value(text: str, names: Any = CONFIG) -> Any:
    return compile_expression(text).evaluate(names)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vec.num_envs % vec.num_workers == 0", False),
        ("env.num_envs * env.num_drones * vec.num_envs * train.bptt_horizon", 15360),
        ("ceil_to(vec.num_envs, vec.num_workers)", 32),
        ("floor_to(vec.num_envs, vec.num_workers)", 28),
        ("ceil_to(0.1 * 3, 0.1)", 3 * 0.1),
        ("ceil_to(-30, 4)", -28),
        ("clamp(vec.num_envs, 1, 16)", 16),
        ("clamp(-1, 0, 1) + clamp(0.5, 0, 1)", 0.5),
        ("1 < env.num_envs <= 4 < 5", True),
        ("1 < 2 > 3", False),
        ("train.optimizer in ['adam', 'muon']", True),
        ("train.optimizer not in ('adam', \"adamw\")", True),
        ("train.warmup is None and train.warmup is null", True),
        ("vec.num_envs is not None", True),
        ("train.compile is false", True),
        ("true and not false", True),
        ("True if train.compile else .5", 0.5),
        ("train.warmup or 10", 10),
        ("zero and 1 / zero", 0),
        ("1 if zero == 0 else 1 / zero", 1),
        ("1_000 + 0x10 + 1e-3", 1016.001),
        ("2 ** -1 + 2 ** 0.5", 0.5 + 2**0.5),
        ("0.99 ** 5000", 0.99**5000),
        ("-2 ** 2", -4),
        ("'a' + 'b' == \"ab\"", True),
        ("[1] + [2] == [1, 2]", True),
        ("min(3, 1, 2) + max([4, 9])", 10),
        ("round(2.567, 1) + round(2.5)", 4.6),
        ("int(3.9) + int('4') + float('0.5')", 7.5),
        ("sqrt(16) + log2(8) + log10(100) + log(exp(1)) + log(8, 2)", 13),
        ("abs(-3) + floor(1.5) + ceil(1.5)", 6),
        ("len(train.optimizer) + len(vec)", 6),
        ("isnan(float('nan')) and not isfinite(float('inf'))", True),
        ("bool(zero) == false", True),
        ("any([0, 0, 1]) and all([])", True),
        ("  vec.num_envs\n  + 1  ", 31),
    ],
)
def test_an_expression_has_the_value_one_expects(text: str, expected: Any) -> None:
    assert value(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "ot.loss_config.features.1.weight_label",
        "ot.loss_config.features[1].weight_label",
        "ot.loss_config.features[-1]['weight_label']",
        "ot['loss_config'].features.1.`weight_label`",
        "(ot.loss_config).features[2 - 1].weight_label",
        "ot.loss_config.features[len(ot.loss_config.features) - 1].weight_label",
    ],
)
def test_one_value_has_many_spellings(text: str) -> None:
    assert value(text) == 5e-4


def test_keys_that_python_would_not_take_as_names_are_keys() -> None:
    assert value("ot.lambda") == 0.1
    assert value("`a b`.`c-d`") == 7
    assert value("_x.__class__.1st", {"_x": {"__class__": {"1st": 3}}}) == 3
    assert value("a.3", {"a": {"3": "text key"}}) == "text key"
    assert value("a.3", {"a": {3: "number key"}}) == "number key"
    assert value("a['3']", {"a": [0, 1, 2, 3]}) == 3


def test_a_name_in_backquotes_is_one_name() -> None:
    assert value("`train/ot_pi_sum` < 1e-6", {"train/ot_pi_sum": 1e-9}) is True
    assert value("`train/ot_pi_sum`.last", {"train/ot_pi_sum": {"last": 2}}) == 2
    assert compile_expression("`train/ot_pi_sum`.last + `x.y`").names == {"train/ot_pi_sum.last", "x.y"}


def test_digits_and_dots_inside_texts_stay_as_they_are() -> None:
    assert value("'a.3.b' + \"`x`.1\" + '''it's #1 = a.2'''") == "a.3.b`x`.1it's #1 = a.2"


def test_a_whole_dotted_key_and_a_nested_one_are_both_found() -> None:
    assert value("train.loss.last", {"train.loss.last": 1}) == 1
    assert value("train.loss.last", {"train": {"loss": {"last": 2}}}) == 2
    assert value("train.loss.last", {"train.loss": {"last": 3}}) == 3
    assert value("train.loss.last", {"train": {"loss.last": 4}}) == 4
    assert value("train.loss.last", {"train": {"loss": {"last": 2}}, "train.loss.last": 1}) == 2


def test_names_lists_what_is_read_and_no_loop_variables() -> None:
    text = "all(f.use_learned_embed or f.w > x for f in ot.features if defined(f.w)) and defined(a.b) and c[i].d > g.0"
    assert compile_expression(text).names == {"ot.features", "x", "a.b", "c", "i", "g.0"}
    assert compile_expression("max(1, null, true)").names == frozenset()


def test_a_function_as_namespace_gets_the_dotted_name_whole_first() -> None:
    asked: list[str] = []

    def lookup(name: str) -> Any:
        asked.append(name)
        return {"train.loss": {"last": 5}, "rows": [{"x": 1}, {"x": 2}]}[name]

    assert value("train.loss.last + sum(r.x for r in rows)", lookup) == 8
    assert asked == ["train.loss.last", "train.loss", "rows"]
    with pytest.raises(MissingName) as caught:
        value("train.lost", lookup)
    assert caught.value.name == "train.lost"
    assert caught.value.nearest == ()


def test_a_loop_reads_lists_and_the_values_of_dictionaries() -> None:
    assert value("all(f.use_learned_embed or f.weight_label > 0 for f in ot.loss_config.features)") is True
    assert value("sum(h.width for h in heads)") == 96
    assert value("max([h.width for h in heads])") == 64
    assert value("min(h.width for h in heads if h.width > 40)") == 64
    assert value("len(f for f in ot.loss_config.features if f.use_learned_embed)") == 1
    assert value("sum(sum(x for x in f.dim_slice) for f in ot.loss_config.features)") == 16
    assert value("any(x > limit for x in [1, 2])", {"limit": 1, "x": 0}) is True


def test_a_loop_stops_as_soon_as_the_answer_is_known() -> None:
    assert value("any(f.x > 0 for f in fs)", {"fs": [{"x": 1}, {}]}) is True


def test_a_key_missing_in_a_loop_is_named_in_full_and_defined_asks() -> None:
    with pytest.raises(MissingName) as caught:
        value("all(f.weight_labels > 0 for f in ot.loss_config.features)")
    assert caught.value.name == "ot.loss_config.features.0.weight_labels"
    assert caught.value.nearest == ("weight_label",)
    assert value("any(defined(f.weight_labels) for f in ot.loss_config.features)") is False
    assert value("all(defined(f.weight_label) for f in ot.loss_config.features)") is True
    assert value("defined(vec.num_envs) and not defined(vec.nope.deeper) and not defined(vec.num_envs.x)") is True


def test_a_missing_name_says_which_and_what_is_near() -> None:
    with pytest.raises(MissingName) as caught:
        value("vec.num_env * 2")
    assert caught.value.name == "vec.num_env"
    assert "vec.num_envs" in caught.value.nearest
    assert "vec.num_env is missing" in str(caught.value)
    with pytest.raises(MissingName) as caught:
        value("bptt_horizon")
    assert caught.value.nearest[0] == "train.bptt_horizon"
    assert isinstance(caught.value, LabError)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lambda: 1", "lambda is not allowed"),
        ("(x := 1)", "`:=` is not allowed"),
        ("f'{vec}'", "an f-string is not allowed"),
        ("{1: 2}", "a dictionary is not allowed"),
        ("{1, 2}", "a set is not allowed"),
        ("vec[1:2]", "a slice is not allowed"),
        ("max(*vec)", "`*` is not allowed"),
        ("max(**vec)", "no named arguments"),
        ("1 ^ 2", "a power is **"),
        ("1 & 2", "write `and`"),
        ("~1", "write `not`"),
        ("1 << 4", "`<<` is not allowed"),
        ("b'x'", "bytes is not allowed"),
        ("1j", "a complex number is not allowed"),
        ("...", "`...` is not allowed"),
        ("[x for x in vec]", "a loop is only allowed inside a function"),
        ("sum(1 for a in vec for b in vec)", "only one `for`"),
        ("sum(a for a, b in vec)", "one plain variable"),
        ("int(x for x in vec)", "a loop is only allowed inside a function"),
        ("vec is env", "`is` compares only with null"),
        ("vec[1.5]", "a key must be text or a whole number"),
        ("vec.get('x')", "only the listed functions can be called"),
        ("max(1)(2)", "only the listed functions can be called"),
        ("ceiling(1)", "did you mean ceil"),
        ("__import__('os')", "unknown function __import__"),
        ("clamp(1, 2)", "clamp takes 3 arguments, not 2"),
        ("log(1, 2, 3)", "log takes 1 to 2 arguments, not 3"),
        ("defined(1)", "defined takes one name"),
        ("a = 1", "compare with =="),
        ("a && b", "write `and`"),
        ("!a", "write `not`"),
        ("a ? b : c", "a if condition else b"),
        ("a # b", "no comments"),
        ("ot.features.*.w > 0", "all(f.key > 0 for f in list)"),
        ("`abc", "backquotes"),
        ("``", "backquotes"),
        ("1 +", "invalid syntax"),
        ("(1", "'(' was never closed"),
        ("", "empty"),
        ("a\0b", "null bytes"),
        ("9" * 400, "too large"),
    ],
)
def test_what_is_not_allowed_is_rejected_by_name(text: str, words: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        compile_expression(text)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["vec.num_envs + ceiling(1)", "`a/b` .c.3 + ceiling(1)", "größe.b.c + ceiling(1)"])
def test_a_caret_is_under_the_mistake(text: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        compile_expression(text)
    _, shown, caret = caught.value.message.split("\n")
    assert shown.strip() == text
    assert shown[caret.index("^") :].startswith("ceiling")


def test_a_long_expression_is_shown_around_its_mistake() -> None:
    with pytest.raises(ExpressionError) as caught:
        compile_expression(" + ".join(["aa"] * 50) + " + ceiling(1) + " + "bb * " * 50 + "1")
    _, shown, caret = caught.value.message.split("\n")
    assert len(shown) < 120
    assert shown[caret.index("^") :].startswith("ceiling")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vec.num_envs % zero", "in 30 % 0"),
        ("1 / (2 - 2)", "1 / 0"),
        ("0 ** -1", "0 ** -1"),
        ("log(zero)", "log(0)"),
        ("sqrt(-1)", "sqrt(-1)"),
        ("exp(10000)", "exp(10000)"),
        ("(-8) ** 0.5", "fractional power"),
        ("2 ** 2 ** 100", "too large"),
        ("(10 ** 300) * (10 ** 300)", "too large"),
        ("2.0 ** 100000", "2.0 ** 100000"),
        ("3 * [1]", "not a number"),
        ("'a' + 1", "not a number"),
        ("1 in 2", "not a container to search in"),
        ("train.warmup + 1", "None is not a number"),
        ("round(5, -10 ** 9)", "whole number up to 300"),
        ("int('x')", "int('x')"),
        ("int(float('inf'))", "int(inf)"),
        ("floor(float('nan'))", "floor(nan)"),
        ("ceil_to(3, 0)", "above 0"),
        ("clamp(1, 3, 2)", "above the upper end"),
        ("max([])", "max([])"),
        ("max(1)", "1 is not a list"),
        ("sum(['a'])", "not a number"),
        ("isnan(null)", "None is not a number"),
        ("sum(x for x in train.optimizer)", "a loop needs a list or a dictionary"),
        ("vec[null]", "a key must be text or a whole number, not None"),
        ("len(3)", "has no length"),
    ],
)
def test_values_that_do_not_fit_are_an_error_that_shows_them(text: str, words: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        value(text)
    assert words in str(caught.value)
    assert not isinstance(caught.value, MissingName)


def test_text_depth_and_loops_are_bounded() -> None:
    with pytest.raises(ExpressionError, match="too long"):
        compile_expression("1" + " " * MAX_LENGTH)
    for text in [
        "-" * 1_900 + "1",
        "not " * 400 + "1",
        "(" * 900 + "1" + ")" * 900,
        "+".join("1" * 900),
        "a" + "[0]" * 600,
    ]:
        with pytest.raises(ExpressionError, match=r"deep|nested|too many|complex"):
            compile_expression(text)
    assert value("+".join("1" * (MAX_DEPTH - 1))) == MAX_DEPTH - 1
    with pytest.raises(ExpressionError, match="loop steps"):
        value("sum(sum(sum(1 for a in x) for b in x) for c in x)", {"x": [0] * 200})
    with pytest.raises(ExpressionError, match="too long"):
        value("x + x", {"x": "a" * 9_000})


def test_an_expression_must_be_text() -> None:
    with pytest.raises(ExpressionError, match="must be text"):
        compile_expression(3)  # type: ignore[arg-type]


# --- it means what Python means ---

_NAMES = {"a": 3, "b": -2, "c": 0.5, "d": True, "e": 0}
_ATOMS = st.one_of(
    st.integers(-20, 20).map(str),
    st.floats(-10, 10, allow_nan=False).map(repr),
    st.sampled_from([*_NAMES, "True", "False", "None"]),
)


def _larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    binary = st.sampled_from(["+", "-", "*", "/", "//", "%", "**", "==", "!=", "<", "<=", ">", ">=", "and", "or"])
    return st.one_of(
        st.tuples(inner, binary, inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(inner, binary, inner, binary, inner).map(lambda t: f"({' '.join(t)})"),
        st.tuples(st.sampled_from(["-", "+", "not "]), inner).map(lambda t: f"({t[0]}{t[1]})"),
        st.tuples(inner, inner, inner).map(lambda t: f"({t[0]} if {t[1]} else {t[2]})"),
        st.tuples(st.sampled_from(["abs", "bool", "int", "float", "round"]), inner).map(lambda t: f"{t[0]}({t[1]})"),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(lambda t: f"{t[0]}({t[1]}, {t[2]})"),
        st.tuples(inner, st.lists(inner, max_size=3)).map(lambda t: f"({t[0]} in [{', '.join(t[1])}])"),
    )


def _python(text: str) -> Any:
    try:
        return eval(text, {}, dict(_NAMES))
    except (ArithmeticError, TypeError, ValueError):
        return ExpressionError


@settings(max_examples=400, deadline=None)
@given(st.recursive(_ATOMS, _larger, max_leaves=12))
def test_it_agrees_with_python(text: str) -> None:
    try:
        mine = value(text, _NAMES)
    except ExpressionError as error:
        # Python continues with huge and complex numbers.
        if "too large" in str(error) or "fractional power" in str(error):
            return
        mine = ExpressionError
    theirs = _python(text)
    assert type(mine) is type(theirs)
    assert mine == theirs or (math.isnan(mine) and math.isnan(theirs))


# --- nothing else is reachable ---

_TRICKS = [
    "().__class__.__bases__[0].__subclasses__()",
    "vec.__class__.__mro__",
    "''.__class__",
    "[].__class__.__base__",
    "max.__globals__",
    "__builtins__",
    "__builtins__.eval",
    "__import__('os').system('true')",
    "eval('1')",
    "exec('1')",
    "open('/etc/passwd')",
    "getattr(vec, 'keys')()",
    "vec.keys()",
    "(lambda: 1)()",
    "[x := 3, x]",
    "f'{vec!r:{9**9}}'",
    "'{0.__class__}'.format(vec)",
    "'%s' % vec",
    "'%9999999999d' % 1",
    "9 ** 9 ** 9 ** 9",
    "9999999999 ** 99999999",
    "1e308 * 10 ** 400",
    "'a' * 10 ** 10",
    "[0] * 10 ** 10",
    "round(1, -10 ** 12)",
    "int('9' * 10)",
    "import os",
    "yield 1",
    "await vec",
    "[i async for i in vec]",
    "sum(i async for i in vec)",
    "sum(max(j for j in [i, 0]) for i in [1, 2])",
    "*vec",
    "print(1, file=vec)",
    "sum(__class__ for __class__ in [1])",
    "max(a.b for `a` in vec)",
    "vec[vec]",
    "vec[[1]]",
    "vec[vec.num_envs]",
    "[1, 2][True]",
    "true.real",
    "(1).real.imag",
    "1 .real",
    "vec. num_envs",
    "a.\\u0041",
    "\ud800",
    "ﬁ.x",
    "if",
    "1if 2else 3",
    "'\\d'",
    "not",
    "in in in",
    "\\",
    "\f1",
    "\x85",
    "'''a\nb''' + ceiling(1)",
    "_q0 + `x`",
]
_FRAGMENTS = st.sampled_from(
    [
        *[
            "+",
            "-",
            "*",
            "/",
            "//",
            "%",
            "**",
            "==",
            "!=",
            "<",
            ">",
            "<=",
            ">=",
            "(",
            ")",
            "[",
            "]",
            "{",
            "}",
            ",",
            ".",
            ":",
            ":=",
            "=",
            "@",
            "~",
            "&",
            "|",
            "^",
            "!",
            "?",
            "#",
            ";",
            "`",
            "'",
            '"',
            "\\",
            "$",
            "0",
            "1",
            "2.5",
            "1e9",
            "0x",
            "1j",
        ],
        *[
            "and",
            "or",
            "not",
            "in",
            "is",
            "if",
            "else",
            "for",
            "lambda",
            "yield",
            "await",
            "async",
            "import",
            "from",
            "None",
            "True",
            "null",
            "true",
            "def",
            "class",
            "with",
        ],
        *[
            "vec",
            "vec.num_envs",
            "train",
            "ot.loss_config.features",
            "f",
            "x",
            "__class__",
            "__builtins__",
            "__import__",
            "a.3",
            ".lambda",
            "`a/b`",
        ],
        *["f'", "b'", "r'", "'''", "[0]", "[-1]", "[1:2]", "**", "*", "_q0", "\n", "\t", "é", "²", "ﬁ"],
        *[f"{name}(" for name in FUNCTIONS],
        " ",
        "defined(",
        " for f in ",
        "'text'",
    ]
)
_SCALARS = (int, float, str, list, dict, type(None))


def _attempt(text: str) -> None:
    try:
        result = value(text)
    except ExpressionError as error:
        str(error)
        return
    assert isinstance(result, _SCALARS)


@pytest.mark.parametrize("text", _TRICKS)
def test_a_trick_gets_nowhere(text: str) -> None:
    _attempt(text)


@settings(max_examples=600, deadline=None)
@given(st.lists(_FRAGMENTS, min_size=1, max_size=14).map("".join) | st.lists(_FRAGMENTS, max_size=10).map(" ".join))
@example("0_")
@example("a.b" * 400)
def test_random_source_evaluates_or_is_rejected_and_does_nothing_else(text: str) -> None:
    _attempt(text)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40))
def test_random_text_evaluates_or_is_rejected_and_does_nothing_else(text: str) -> None:
    _attempt(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("'eval-logloss' < 0.4", True),
        ("0.1 < 'eval-logloss' <= 0.3", True),
        ("'Test Loss' > 3 and 'Test Loss'.best < 4", True),
        ("\"Test Loss\".last - 'eval-logloss'", 4.7),
        ("-'eval-logloss' * 10", -3.0),
        ("isnan('eval-logloss')", False),
        ("defined('Test Loss') and not defined('Test Acc')", True),
        ("status == 'ok'", True),
        ("status in ['ok', 'failed']", True),
        ("'eval-logloss' == 0.3", False),  # equality compares with the text itself
    ],
)
def test_where_only_a_number_makes_sense_a_text_is_a_name(text: str, expected: object) -> None:
    values = {"eval-logloss": 0.3, "Test Loss": 5.0, "Test Loss.last": 5.0, "Test Loss.best": 3.5, "status": "ok"}
    assert compile_expression(text).evaluate(lambda name: values[name]) == expected


def test_a_quoted_name_that_is_missing_is_named() -> None:
    with pytest.raises(MissingName, match="eval-logloss is missing"):
        compile_expression("'eval-logloss' < 0.4").evaluate({})
    assert compile_expression("'eval-logloss'.last < 0.4").names == {"eval-logloss.last"}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("eval-logloss < 0.4", "eval-logloss"),
        ("step > 3 and train/loss.best > 2", "train/loss"),
        ("'eval-logloss' < 0.4", None),
        ("`train/loss` < 0.4", None),
        ("eval - logloss < 0.4", None),
        ("pre-eval-logloss < 0.4", None),
    ],
)
def test_a_name_without_its_quotes_is_noticed(text: str, wrong: str | None) -> None:
    assert unquoted(compile_expression(text), ["loss", "eval-logloss", "train/loss"]) == wrong
