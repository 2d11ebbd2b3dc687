"""Reports of studies with replicates and verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from looplab.ledger.catalogue import MixEvent
from looplab.report import wording
from looplab.report.facts import StudyFacts, study_facts
from looplab.report.judged import points
from looplab.report.markdown import render
from looplab.report.reports import knob_importance, write_reports

ALIKE = [2.01, 1.99, 2.02, 1.98, 2.0, 2.01, 1.99]
BETTER = [1.51, 1.5, 1.49, 1.52, 1.48, 1.5, 1.51]


def facts_of(maker: Any) -> StudyFacts:
    return study_facts(maker.lab, maker.study, maker.record)


def report_of(maker: Any) -> str:
    facts = facts_of(maker)
    return render(facts, knob_importance(facts)[0])


def promoted(making: Any, maker: Any) -> tuple[Any, Any]:
    """A base and a challenger that is truly better."""
    base = maker.train(losses=[3.0, 2.0], proposer="base")
    maker.repeat(base, ALIKE)
    challenger = maker.train(making.edited(model__width=512), [3.0, 1.4], reason="wider")
    maker.judge()
    maker.repeat(challenger, BETTER)
    maker.judge()
    return base, challenger


def test_replicates_are_folded_into_the_run_they_repeat(making: Any, judged: Any) -> None:
    base, challenger = promoted(making, judged)
    facts = facts_of(judged)
    assert [run.row.id for run in facts.entries] == [base.id, challenger.id]
    assert len(facts.runs) == 16
    assert facts.entries[1].measured == 8
    assert facts.entries[1].mean == pytest.approx((1.4 + sum(BETTER)) / 8)
    assert facts.entries[1].shown == "1.49 ± 0.04 (n 8)"
    assert [run.row.id for runs in facts.rounds().values() for run in runs] == [base.id, challenger.id]
    assert facts.measured == facts.entries


def test_against_the_base_compares_means(making: Any, judged: Any) -> None:
    promoted(making, judged)
    facts = facts_of(judged)
    base, challenger = facts.entries
    assert base.mean is not None
    assert challenger.mean is not None
    assert challenger.against_base == pytest.approx(challenger.mean - base.mean)
    assert challenger.objective == 1.4  # its own first run is still reported


def test_the_champion_is_the_best_even_where_a_single_run_measured_more(making: Any, judged: Any) -> None:
    base, challenger = promoted(making, judged)
    lucky = judged.train(making.edited(model__width=64), [3.0, 1.47])
    judged.judge()
    facts = facts_of(judged)
    assert facts.best is not None
    assert facts.best.row.id == challenger.id
    assert [step.run for step in facts.best_so_far] == [base.id, challenger.id]
    assert facts.best_so_far[-1].objective == facts.best.mean
    assert facts.measured[-1].row.id == lucky.id
    assert facts.measured[-1].mean is not None
    assert facts.best.mean is not None
    assert facts.measured[-1].mean < facts.best.mean


def test_the_headline_says_by_how_much_and_how_sure(making: Any, judged: Any) -> None:
    _, challenger = promoted(making, judged)
    judge = facts_of(judged).judge
    assert judge is not None
    assert judge.headline.startswith(f"Champion {challenger.id} is better than the base by 0.5")
    assert "pairs, p " in judge.headline
    assert judge.gain is not None
    assert judge.gain.low < judge.gain.effect < judge.gain.high
    assert judge.counts == {"keep": 1}
    assert judge.noise_runs == 16
    assert judge.sigma == pytest.approx(0.03, abs=0.02)
    assert judge.held_out == (1, 5)


def test_a_later_champion_is_compared_with_the_base_too(making: Any, judged: Any) -> None:
    promoted(making, judged)
    second = judged.train(making.edited(model__width=1024), [3.0, 0.9])
    judged.judge()
    judged.repeat(second, [loss - 0.5 for loss in BETTER])
    judged.judge()
    judge = facts_of(judged).judge
    assert judge is not None
    assert judge.champion == second.id
    own = judge.of(second.id)
    assert own is not None
    assert own.effect == pytest.approx(0.5, abs=0.02)  # against the champion of its time
    assert judge.gain is not None
    assert judge.gain.effect == pytest.approx(1.0, abs=0.02)
    assert "better than the base by 1.0" in judge.headline


def test_nothing_has_beaten_the_base_is_the_headline(making: Any, judged: Any) -> None:
    base = judged.train(losses=[3.0, 2.0], proposer="base")
    judged.repeat(base, ALIKE)
    judged.train(making.edited(model__width=512), [3.0, 2.3])
    judged.judge()
    facts = facts_of(judged)
    assert facts.judge is not None
    assert facts.judge.headline == "Nothing has beaten the base yet (1 challenger judged)"
    assert facts.best is not None
    assert facts.best.row.id == base.id
    assert facts.judge.headline in report_of(judged)


def test_without_enough_seeds_of_the_base_there_is_no_champion(making: Any, judged: Any) -> None:
    judged.train(losses=[3.0, 2.0], proposer="base")
    facts = facts_of(judged)
    assert facts.judge is not None
    assert facts.best is None
    assert facts.judge.headline == "No champion yet: the noise of the base is being measured (1 of 4 runs)"
    assert "one run is a hint" not in report_of(judged)
    assert len(write_reports(judged.lab, judged.study, judged.record)) == 3


def test_a_ratchet_does_not_pretend_to_be_a_test(making: Any, tmp_path: Path) -> None:
    maker = making.make(tmp_path / "ratchet", making.LAB + "judge: ratchet\n")
    maker.train(losses=[3.0, 2.0], proposer="base")
    better = maker.train(making.edited(model__width=512), [3.0, 1.9])
    maker.judge()
    judge = facts_of(maker).judge
    assert judge is not None
    assert judge.champion == better.id
    assert judge.gain is None
    assert "one run against one run, which may be luck" in judge.headline
    assert "Chance to promote" not in report_of(maker)


def test_the_seed_of_replicates_is_no_knob_and_importance_has_one_value_for_each_config(
    making: Any, judged_full: Any
) -> None:
    facts = facts_of(judged_full)
    assert "seed" not in {knob.key for knob in facts.knobs}
    importance, _ = knob_importance(facts)
    assert importance.runs == len(facts.entries) == 21
    assert len(facts.runs) > 40


def test_the_label_says_how_importance_was_measured(judged_full: Any) -> None:
    pytest.importorskip("optuna")
    pytest.importorskip("sklearn")
    facts = facts_of(judged_full)
    importance, label = knob_importance(facts, thorough=True)
    assert "fANOVA" in label
    assert label in render(facts, importance, label=label)
    assert all(type(share.share) is float and type(share.clear) is bool for share in importance.shares)
    assert "fANOVA" not in knob_importance(facts)[1]


def test_alarms_and_verdicts_stand_in_the_report(making: Any, judged: Any) -> None:
    _, challenger = promoted(making, judged)
    report = report_of(judged)
    assert "- **ALARM:** " in report  # the first run was far beyond the noise
    assert "## Judged" in report
    assert "Noise: runs that differ only in their seed vary by" in report
    row = next(line for line in report.splitlines() if line.startswith(f"| [{challenger.id}]") and "**keep**" in line)
    assert "implausible jump" in row
    assert "(n 8)" in row


def test_proposers_and_watch_rules_are_reported(judged_full: Any) -> None:
    report = report_of(judged_full)
    assert "## Who proposed what" in report
    assert "▅▆██ 90 %" in report
    assert "## Watched" in report
    assert "grad_norm is 12.3 at step 40" in report
    assert "## Reproductions" in report
    assert "Exactly the same" in report


def test_the_share_of_each_proposer_over_time_is_drawn_in_one_line(judged: Any) -> None:
    with judged.ledger.write():
        for name in ("search", "agent"):
            judged.record.propose(name, ["model.width@set=64"], "a try")
        for share in (0.25, 0.5, 0.75):
            weights = {"search": share, "agent": 1 - share}
            judged.ledger.record(MixEvent(weights=weights, chosen={"search": 1}), "tiny")
    facts = facts_of(judged)
    assert facts.mix is not None
    assert [n for n, _ in facts.mix.weights] == [0, 1, 2, 3]
    assert "▃▅▇▇ 75 %" in report_of(judged)


def test_a_reproduction_belongs_to_its_run_and_not_to_the_spread(making: Any, judged: Any) -> None:
    base = judged.train(losses=[3.0, 2.0], proposer="base")
    judged.repeat(base, [2.1])
    judged.train(losses=[3.0, 7.0], twin=base, role="reproduction", proposer="again")
    (point,) = points(judged.record.runs()).values()
    assert point.values == [2.0, 2.1]
    assert len(point.copies) == 1
    assert facts_of(judged).entries[0].measured == 2


def test_a_study_without_a_judge_folds_nothing_and_says_that_one_run_is_a_hint(making: Any, maker: Any) -> None:
    maker.train(proposer="base")
    maker.train(making.edited(model__width=64))
    maker.train(making.edited(model__width=64))
    facts = facts_of(maker)
    assert facts.judge is None
    assert len(facts.entries) == 3
    assert "one run is a hint, not a result" in report_of(maker)


def test_the_summary_has_the_judge_and_the_means(making: Any, judged: Any) -> None:
    base, challenger = promoted(making, judged)
    write_reports(judged.lab, judged.study, judged.record)
    summary = json.loads((judged.outputs / "summary.json").read_text())
    assert summary["best"] == summary["judge"]["champion"] == challenger.id
    assert summary["runs"][challenger.id]["measured"] == 8
    assert [run["repeats"] for run in summary["runs"].values()].count(base.id) == 7


@pytest.mark.parametrize(
    ("effect", "shown"),
    [
        ((0.2087, 0.1751, 0.2493), "0.21 [0.18, 0.25]"),
        ((-0.0171, -0.0742, 0.0399), "-0.02 [-0.07, 0.04]"),
        ((120.4, 80.0, 160.0), "120 [80, 160]"),
        ((-0.001, -0.2, 0.2), "0.0 [-0.2, 0.2]"),
        ((0.5, None, None), "0.5"),
        ((1.0, 1.0, 1.0), "1 [1, 1]"),
    ],
)
def test_an_effect_has_as_many_decimals_as_its_interval_is_worth(effect: tuple[Any, ...], shown: str) -> None:
    assert wording.effect(*effect) == shown


# -- the page


@pytest.fixture(scope="module")
def page(judged_full: Any) -> Path:
    return next(
        path for path in write_reports(judged_full.lab, judged_full.study, judged_full.record) if path.suffix == ".html"
    )


def test_the_page_draws_a_bar_for_each_challenger_that_was_compared(judged_full: Any, page: Path, browser: Any) -> None:
    browser.open(page)
    assert browser.errors == []
    judge = facts_of(judged_full).judge
    assert judge is not None
    compared = [one for one in judge.challengers if one.effect is not None]
    card = "section[aria-label=Judged]"
    assert browser.js(f"document.querySelectorAll('{card} .base .line').length") == len(compared)
    tested = [one for one in compared if one.p is not None and one.n > 1]
    assert browser.js(f"document.querySelectorAll('{card} .base .bar-line').length") == len(tested) < len(compared)
    assert browser.js(f"document.querySelectorAll('{card} .zero').length") == 1
    assert judge.headline in browser.js(f"document.querySelector('{card} .headline').textContent")
    kept = sum(one.verdict == "keep" for one in compared)
    assert kept
    assert browser.js(f"document.querySelectorAll('{card} .base .l-keep').length") == kept
    assert browser.js("document.querySelectorAll('.alarm').length") == len(judge.alarms)


def test_a_bar_that_is_pointed_at_tells_why_and_picks_its_run(page: Path, browser: Any) -> None:
    browser.open(page)
    name = "section[aria-label=Judged] .base path.dot"
    x, y = browser.js(
        f"(() => {{ const box = document.querySelector('{name}').getBoundingClientRect();"
        " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
    )
    browser.click(x, y)
    browser.wait_for("focus.picked !== null && !tip.hidden")
    why = browser.js("DATA.judge.entrants.find((one) => one.run === focus.picked).why")
    assert why in browser.js("tip.textContent")
    assert why in browser.js("document.querySelector('.panel').textContent")


def test_the_page_shows_who_proposed_what_and_how_far_each_is_trusted(page: Path, browser: Any) -> None:
    browser.open(page)
    trusted = "section[aria-label='Credit of each proposer']"
    assert browser.js("trusted.columns.length") == 3
    assert "search 90 %" in browser.js(f'document.querySelector("{trusted}").textContent')
    proposed = browser.js("""document.querySelector("section[aria-label='Who proposed what']").innerText""")
    assert all(name in proposed for name in ("search", "agent", "rules", "kept", "discarded"))
    assert "grad_norm is 12.3" in browser.js("document.querySelector('section[aria-label=Watched]').innerText")


def test_replicates_are_rows_of_the_table_only_when_asked_for(judged_full: Any, page: Path, browser: Any) -> None:
    browser.open(page)
    rows = "table.view.length"
    facts = facts_of(judged_full)
    assert browser.js(rows) == len(facts.entries)
    assert browser.js("order.length") == len(facts.measured)
    browser.js("[...document.querySelectorAll('label')].find((one) => one.textContent === 'replicates').click()")
    assert browser.js(rows) == len(facts.runs)
    assert browser.errors == []


@pytest.mark.parametrize("width", [1280, 800, 420])
def test_the_judged_page_fits_its_window_in_light_and_dark(page: Path, browser: Any, width: int) -> None:
    for dark in (False, True):
        browser.dark(dark)
        browser.open(page, width=width)
        assert browser.errors == []
        assert browser.js("document.documentElement.scrollWidth") <= width
    browser.dark(False)


def test_the_page_of_a_study_that_is_not_judged_yet_has_no_errors(judged: Any, browser: Any) -> None:
    for losses in ([3.0, 2.0], [3.0, 2.1]):
        judged.train(losses=losses, proposer="base")
        paths = write_reports(judged.lab, judged.study, judged.record)
        browser.open(next(path for path in paths if path.suffix == ".html"))
        assert browser.errors == []
        assert "No champion yet" in browser.js("document.querySelector('main').textContent")
