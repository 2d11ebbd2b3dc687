from __future__ import annotations

import threading
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.recipes.esm.esm.data import Example
from looplab.recipes.esm.esm.grading import boxed, extract, form_of, grade, number, same, written

HEAT = Example("b", "What conducts heat?", "B", "choice", ("a piece of wood", "copper", "wool", "C"))

decimals = st.decimals(min_value=-(10**9), max_value=10**9, places=3, allow_nan=False)
words = st.text(alphabet="abc xyz\n.,;:()", max_size=30)


@given(decimals)
def test_a_number_means_the_same_however_it_is_written(value: object) -> None:
    exact = Fraction(str(value))
    plain, grouped = f"{value}", f"{value:,}"
    sign, bare = ("-", grouped[1:]) if grouped.startswith("-") else ("", grouped)
    for form in (plain, grouped, f"{sign}${bare}", f"${grouped}", f"{grouped}%", f"**{grouped}**", f"{plain}000"):
        for text in (f"#### {form}", f"so it is {form}.", f"\\boxed{{{form}}}", f"1 + 2\nThe answer is {form}"):
            answer = extract(text, "number")
            assert answer is not None, text
            assert number(answer) == exact, text


@given(st.fractions(max_denominator=10**6))
def test_the_written_form_has_the_value(value: Fraction) -> None:
    assert number(written(value)) == value


@given(words, st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6), words)
def test_the_marked_number_wins_over_all_others(before: str, other: int, right: int, after: str) -> None:
    assert extract(f"{before} {other} \n#### {right}\n{after} {other}", "number") == str(right)


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_only_the_right_number_is_right(answer: int, gold: int) -> None:
    assert grade(f"#### {answer}", Example("x", "?", str(gold), "number"))[1] == (answer == gold)


@given(st.text(max_size=200))
def test_no_text_upsets_a_grader(text: str) -> None:
    for kind in ("number", "choice", "yes_no", "math"):
        extract(text, kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("He has 48/2 = 24 clips.", "24"),
        ("#### 48 / 2 = 24", "24"),
        ("#### $1,234.50", "1234.5"),
        ("#### 7\n\nNext problem: 8 + 8", "7"),
        ("##### 12 apples in 3 boxes", "12"),
        ("#### Step 3: add 5\nThe answer is 12.", "12"),
        ("The answer is 3/4.", "0.75"),
        ("\\boxed{\\frac{1}{3}}", "1/3"),
        ("\\boxed{10{,}080}", "10080"),
        ("The answer is: \\$18", "18"),
        ("between 3-5 days", "5"),
        ("- 5 apples", "5"),
        ("it fell to -5", "-5"),
        ("it fell to −5", "-5"),
        ("it is 3, 4", "4"),
        ("1,23", "23"),
        ("1/0", None),
        ("-0", "0"),
        ("none", None),
        ("", None),
        ("9" * 5000, None),
    ],
)
def test_numbers_are_found_where_people_see_them(text: str, answer: str | None) -> None:
    assert extract(text, "number") == answer


@pytest.mark.parametrize(
    "text",
    [
        "#### B", "#### (B)", "#### b", "#### B. copper", "#### Copper", "#### 2", "The answer is B.",
        "The answer is (B) copper", "Answer: **B**", "\\boxed{B}", "\\boxed{\\text{B}}", "B", "(B)", "copper",
        "A piece of wood burns.\n\nB", "Heat flows, so it must be (B), I think", "I would take the copper one.",
        "The answer is copper.", "**B**", "**Answer**: B", "__Answer:__ (B)", "Option B", "The correct option is B.",
        "Therefore, B is correct.", "A is wrong, and (B) is the best answer.", "I choose option B because it is a metal.",
    ],
)  # fmt: skip
def test_a_choice_is_a_letter_or_its_words(text: str) -> None:
    assert grade(text, HEAT) == ("B", True)


def test_a_choice_that_is_itself_a_letter_does_not_catch_that_letter() -> None:
    assert extract("#### C", "choice", HEAT.choices) == "C"


def test_words_that_differ_only_in_case_are_told_apart() -> None:
    assert extract("#### Rr", "choice", ("R", "rr", "Rr", "RR")) == "C"


@pytest.mark.parametrize("text", ["", "It could be A or B", "#### E", "wool or copper"])
def test_no_choice_is_made_up(text: str) -> None:
    assert extract(text, "choice", HEAT.choices) is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### yes", "yes"),
        ("No one knows.\n\n#### Yes, it is", "yes"),
        ("The answer is no. Yes?", "no"),
        ("True, they do. So, no", "no"),
        ("false", "no"),
        ("I know nothing", None),
    ],
)
def test_yes_and_no_are_words(text: str, answer: str | None) -> None:
    assert extract(text, "yes_no") == answer


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("\\frac12", "\\frac{1}{2}"),
        ("0.5", "\\dfrac{1}{2}"),
        ("(3,\\frac{\\pi}{2})", "\\left( 3, \\frac{\\pi}{2} \\right)"),
        ("\\sqrt{12}", "2\\sqrt{3}"),
        ("x=5", "5"),
        ("10080", "10,\\!080"),
        ("evelyn", "\\text{Evelyn}"),
        ("90", "90^\\circ"),
        ("y^2x^2", "x^2y^2"),
    ],
)
def test_formulas_that_mean_the_same_are_the_same(answer: str, gold: str) -> None:
    assert same(answer, gold, "math")


@pytest.mark.parametrize(("answer", "gold"), [("p", "q"), ("\\frac{1}{3}", "0.3"), ("]]{", "1"), ("", "0")])
def test_formulas_that_differ_are_not_the_same(answer: str, gold: str) -> None:
    assert not same(answer, gold, "math")


@pytest.mark.parametrize("answer", ["9^{9^{9^9}}", "9^9^9", "2^{99999999}", "1000000!", "9!!!", "1+" * 5000])
def test_a_monster_is_wrong_and_quickly_so(answer: str) -> None:
    assert not same(answer, "2", "math")


def test_a_comparison_is_limited_by_processor_time_and_not_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    import math_verify

    from looplab.recipes.esm.esm import grading

    parse = math_verify.parse
    monkeypatch.setattr(grading, "_SECONDS", 2.0)
    grading._equal_formulas("1", "2")  # imports what it needs

    def wait(*arguments: object, **named: object) -> object:
        time.sleep(1.1)
        return parse(*arguments, **named)

    monkeypatch.setattr(math_verify, "parse", wait)
    assert same("a^3b^2", "b^2a^3", "math")

    def spin(*arguments: object, **named: object) -> object:
        while True:
            pass

    monkeypatch.setattr(math_verify, "parse", spin)
    assert not same("a^5b^2", "b^2a^5", "math")


def test_formulas_can_be_compared_outside_of_the_main_thread() -> None:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(same("\\frac{3}{7}", "\\frac37", "math")))
    thread.start()
    thread.join()
    assert found == [True]


def test_the_last_whole_box_counts() -> None:
    assert boxed("\\boxed{1} and \\boxed{\\frac{1}{2}} and \\boxed{3") == "\\frac{1}{2}"
    assert boxed("\\boxed{\\{1, 2\\}}") == "\\{1, 2\\}"
    assert boxed("no box") is None


def test_mathematics_is_read_from_the_box_then_from_what_is_said() -> None:
    assert extract("#### 3\n\\boxed{x^2}", "math") == "x^2"
    assert extract("The answer is $x + 1$.", "math") == "x + 1"
    assert extract("So $a$ and then $b$ and 5.", "math") == "b"
    assert extract("It is 5.", "math") == "5"


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("Eva has 35 pens.\n#### 35", "marked"),
        ("Ben has 43 cards. \n#### = 43\nBen has", "marked"),
        ("Ben has 12 cards left.", "one line"),
        ("Ben has 43 - 25 = 18. He has 18.", "one line"),
        ("11 + 28 = 39\nThe answer is 39.", "other"),
        ("Kim has 38 eggs and", "other"),  # truncated
        ("####\n####", "other"),
        ("Sorry.", "other"),
        ("", "other"),
    ],
)
def test_the_form_of_an_answer_is_seen_by_a_program(text: str, form: str) -> None:
    assert form_of(text) == form
