"""A study: ESM against its rivals and controls, after a plan that is written before the test questions are read.

A plan (studies/*.yaml) names the config, the mining seeds, the methods, and what is tuned on dev. For each seed: mine
other questions, build the memory, choose the settings of every tuned method on dev, write the choice down, then read
the test questions once. Everything is kept in the folder of the study, batch by batch, so that the same command
continues after a kill; the plan is kept there too, and a changed plan is refused.

Voting gets at least as many tokens as ESM: the number of its samples is ESM's budget on dev, divided by the tokens of a
sampled answer, rounded up, and not below three.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, ValidationError

from looplab.errors import LabError

from . import evaluate, files, memory, mine, select, stats, tables
from .backends.base import Backend, make_backend
from .config import ConfigSection, EsmSettings, parse_settings
from .data import Example, splits
from .evaluate import Method
from .tiny.task import group_of

Log = Callable[[str], None]
Row = dict[str, Any]
Correct = dict[str, list[list[bool]]]
MIN_VOTES = 3
"""Fewer samples cannot outvote each other."""
ONCE = ("greedy", "prompt")
"""Methods that no seed changes; they are run with the first seed."""


class StudyPlan(ConfigSection):
    """What will be done, and what is expected, before anything is known."""

    title: str
    expect: str
    """What the authors of the plan expect, and what would count as a failure of ESM."""
    config: dict[str, Any]
    """As a config file, for one seed; `n_train` questions are mined with each seed."""
    seeds: Annotated[list[int], Field(min_length=1, default_factory=lambda: [0])]
    """Mining seeds: other mined questions, other samples, another choice on dev; the same dev and test questions."""
    methods: Annotated[list[str], Field(min_length=1)]
    tune: dict[str, dict[str, list[Any]]] = Field(default_factory=dict)
    """By method: dotted keys of the config, and the values that are tried on dev, in all combinations."""
    like: dict[str, str] = Field(default_factory=dict)
    """Methods that use the settings chosen for another one."""
    quick: dict[str, Any] = Field(default_factory=dict)
    """Changes for a rehearsal: `config.…` by dotted keys, `seeds`, `tune`. It must ask other questions."""

    def rehearsal(self) -> StudyPlan:
        """Return the plan of `--quick`."""
        changes = dict(self.quick)
        config = {key: changes.pop(key) for key in list(changes) if key not in ("seeds", "tune")}
        plain = self.model_dump(mode="json", exclude={"quick"})
        return StudyPlan.model_validate(
            plain | {"config": parse_settings(self.config).changed(config).plain()} | changes
        )


@dataclass(frozen=True)
class Study:
    """A plan with its folder and its model."""

    name: str
    plan: StudyPlan
    settings: EsmSettings
    folder: Path

    def run_dir(self, seed: int) -> Path:
        return self.folder / f"seed-{seed}"

    def seeded(self, seed: int) -> EsmSettings:
        outputs = {"outputs.root_dir": str(self.folder), "outputs.run_name": f"seed-{seed}"}
        return self.settings.changed({"seed": seed, "eval.split": "test", "eval.seeds": [0], **outputs})

    def questions(self, seed: int) -> tuple[list[Example], list[Example], list[Example]]:
        """Return the questions to mine with this seed, and the dev and test questions of all seeds."""
        make = self.settings.task.generator
        place, share = self.plan.seeds.index(seed), make.n_train
        whole = self.settings.changed({"task.generator.n_train": share * len(self.plan.seeds)})
        found = splits(whole.task)
        return found.train[place * share : (place + 1) * share], found.dev, found.test

    def methods(self, seed: int) -> list[str]:
        first = seed == self.plan.seeds[0]
        return [name for name in self.plan.methods if first or name not in ONCE]


def load_plan(file: Path) -> StudyPlan:
    """Load a plan. Raises LabError if it is invalid."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        raw = YAML(typ="safe").load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = ", ".join(sorted(other.stem for other in file.parent.glob("*.yaml")))
        raise LabError(f"no study {file.stem!r}", file=file, hint=f"available: {known}") from None
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise LabError(f"cannot read the plan: {error}", file=file) from error
    try:
        plan = StudyPlan.model_validate(raw)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise LabError(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}", file=file) from None
    for name in (*plan.methods, *plan.tune, *plan.like, *plan.like.values()):
        if name not in tables.NAMES:
            raise LabError(f"unknown method {name!r}", file=file, hint=f"choose from {', '.join(tables.NAMES)}")
    if {"greedy", "esm"} - set(plan.methods):
        raise LabError("a study needs the methods greedy and esm", file=file)
    own = set(plan.methods) - set(plan.like) - set(ONCE)
    for name, other in plan.like.items():
        if name == "esm" or other not in own:
            raise LabError(
                f"like: {name} cannot use the settings of {other}", file=file,
                hint=f"choose from {', '.join(sorted(own))}; esm has its own",
            )  # fmt: skip
    return plan


def prepare(name: str, plan: StudyPlan, model: Path | None, folder: Path, *, backend: str | None = None) -> Study:
    """Return the study; write its plan into its folder, or check that it is the one which is there."""
    changes: dict[str, Any] = {} if model is None else {"model.name_or_path": str(model)}
    settings = parse_settings(plan.config).changed(changes | ({} if backend is None else {"model.backend": backend}))
    written = {"plan": plan.model_dump(mode="json"), "model": settings.model.backend}
    file = folder / "plan.json"
    if not file.is_file():
        files.write_json(file, written)
    elif files.read_json(file) != written:
        raise LabError(
            "this folder contains a study with another plan", file=file, hint="use another folder: --out FOLDER"
        )
    return Study(name, plan, settings, folder)


def run(study: Study, log: Log = print) -> Row:
    """Run a study from mining to its tables; continue where it was interrupted."""
    backend = make_backend(study.settings.model, study.settings.prompt.chat)
    try:
        for seed in study.plan.seeds:
            _run_seed(study, seed, backend, log)
    finally:
        backend.close()
    return report(study, log)


def _run_seed(study: Study, seed: int, backend: Backend, log: Log) -> None:
    settings, run_dir = study.seeded(seed), study.run_dir(seed)
    train, dev, test = study.questions(seed)
    counts = mine.run(settings, backend, train, run_dir, log)
    log(
        f"seed {seed}: {counts['rollouts']} rollouts, {counts['rollout_accuracy']:.0%} correct, {counts['pairs']} pairs"
    )
    if not (run_dir / "memory" / "meta.json").is_file():
        select.run(settings, run_dir)
        memory.run(settings, run_dir)
    own = _choose(study, seed, backend, dev, log)
    evaluate.run(
        own["esm"], backend, test, run_dir, split="test", log=lambda text: log(f"seed {seed}, {text}"), own=own,
        methods=[Method(name, 0) for name in study.methods(seed)],
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- choices on dev


def _trials(grid: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def _choose(study: Study, seed: int, backend: Backend, dev: Sequence[Example], log: Log) -> dict[str, EsmSettings]:
    """Return the settings of every method: the most accurate ones on dev, the first of equals. Writes chosen.json."""
    settings, file = study.seeded(seed), study.run_dir(seed) / "chosen.json"
    if not file.is_file():
        chosen: dict[str, Any] = {"n_dev": len(dev), "methods": {}, "tried": {}}
        for name in study.methods(seed):
            if name in study.plan.like or name == "majority":
                continue
            changes, budget = _tune(study, seed, backend, dev, name, study.plan.tune.get(name, {}), chosen, log)
            chosen["methods"][name] = changes
            if name == "esm":
                chosen["esm_budget"] = budget
        if "majority" in study.plan.methods:
            grid = study.plan.tune.get("majority", {}) | {"eval.vote_samples": [MIN_VOTES]}
            changes, spent = _tune(study, seed, backend, dev, "majority", grid, chosen, log)
            votes = max(MIN_VOTES, math.ceil(chosen["esm_budget"] / (spent / MIN_VOTES)))
            chosen["methods"]["majority"] = changes | {"eval.vote_samples": votes}
        for name, other in study.plan.like.items():
            chosen["methods"][name] = chosen["methods"][other]
        files.write_json(file, chosen)
    methods: dict[str, dict[str, Any]] = files.read_json(file)["methods"]
    log(f"seed {seed}: chosen on {len(dev)} dev questions: {methods}")
    own = {name: settings.changed(changes) for name, changes in methods.items()}
    return {name: own.get(name, settings) for name in study.methods(seed)}


def _tune(
    study: Study, seed: int, backend: Backend, dev: Sequence[Example], name: str, grid: Mapping[str, Sequence[Any]],
    chosen: dict[str, Any], log: Log,
) -> tuple[dict[str, Any], float]:  # fmt: skip
    """Return the best changes on dev, and their mean number of tokens per question, probes included."""
    best: tuple[float, dict[str, Any], float] | None = None
    for number, changes in enumerate(_trials(grid)):
        trial = study.seeded(seed).changed(changes | {"eval.split": "dev"})
        found = evaluate.run(
            trial, backend, dev, study.run_dir(seed), split="dev", prefix=f"dev{number:02d}_", log=lambda _: None,
            methods=[Method(name, 0)],
        )  # fmt: skip
        accuracy = found.accuracy(name)
        budget = float(np.mean([row["budget_used"] for row in found.rows[name][0]]))
        chosen["tried"].setdefault(name, []).append({"changes": changes, "accuracy": accuracy, "budget": budget})
        log(f"seed {seed}, dev: {name} {accuracy:.3f} with {changes or 'nothing to choose'}")
        if best is None or accuracy > best[0]:
            best = accuracy, changes, budget
    assert best is not None
    return best[1], best[2]


# ------------------------------------------------------------------------------------------------------------ report


def report(study: Study, log: Log = print) -> Row:
    """Write tables and figure from the stored answers, also of an unfinished study; return the result as JSON data."""
    rows, examples = _answers(study)
    if not examples:
        raise LabError("no test question is answered by all methods yet", file=study.folder)
    _, _, test = study.questions(study.plan.seeds[0])
    correct: Correct = {
        name: [[bool(row["correct"]) for row in one] for one in several] for name, several in rows.items()
    }
    samples = study.settings.eval.bootstrap
    table = [_method_row(study, name, correct, rows[name], examples, samples) for name in rows]
    sentence = tables.headline(correct, samples=samples)
    if len(examples) < len(test):
        sentence += f" (unfinished: {len(examples)} of {len(test)} test questions)"
    rival = tables.best_rival(correct, samples=samples)
    result = {
        "study": study.name, "headline": sentence, "n_test": len(examples), "n_planned": len(test),
        "seeds": [seed for seed in study.plan.seeds if (study.run_dir(seed) / "chosen.json").is_file()],
        "methods": table, "probing": _probing(rows["esm"]) | {"dev": _dev_by_rule(study)},
        "best_rival": rival and {"name": rival[0], "delta": rival[3], "ci_low": rival[4], "ci_high": rival[5]},
        "chosen": {str(seed): files.read_json(study.run_dir(seed) / "chosen.json")["methods"]
                   for seed in study.plan.seeds if (study.run_dir(seed) / "chosen.json").is_file()},
    }  # fmt: skip
    files.write_json(study.folder / "tables" / "result.json", result)
    plain = [{key: value for key, value in row.items() if key not in ("groups", "by_seed")} for row in table]
    tables.write_csv(study.folder / "tables" / "results.csv", plain)
    files.atomic_write(study.folder / "tables" / "results.md", markdown(study, result).encode())
    for note in _figure(result, study.folder / "figures" / "accuracy.pdf"):
        log(f"note: {note}")
    log(sentence)
    return result


def _answers(study: Study) -> tuple[dict[str, list[list[Row]]], list[Example]]:
    """Return the answers by method, [seed][question], and the questions that every method has answered."""
    _, _, test = study.questions(study.plan.seeds[0])
    found: dict[str, list[dict[str, Row]]] = {name: [] for name in study.plan.methods}
    t_max = study.settings.decode.max_new_tokens
    for seed in study.plan.seeds:
        if not (study.run_dir(seed) / "eval" / Method("esm", 0).tag(t_max)).is_dir():
            continue
        for name in study.methods(seed):
            file = study.run_dir(seed) / "eval" / Method(name, 0).tag(t_max) / "per_example.jsonl"
            found[name].append({row["example_id"]: row for row in files.read_jsonl(file)})
    ids = [example for example in test if all(example.id in one for several in found.values() for one in several)]
    if not any(found.values()):
        return {}, []
    return {name: [[one[example.id] for example in ids] for one in several] for name, several in found.items()}, ids


def _method_row(
    study: Study, name: str, correct: Correct, rows: Sequence[Sequence[Row]], examples: Sequence[Example], samples: int
) -> Row:
    every = [row for one in rows for row in one]
    by_seed = [float(np.mean(one)) for one in correct[name]]
    row: Row = {
        "method": name, "acc": float(np.mean(by_seed)), "acc_min": min(by_seed), "acc_max": max(by_seed),
        "by_seed": by_seed, "seeds": len(by_seed), "n": len(examples),
    }  # fmt: skip
    for other in ("greedy", "esm"):
        same = other == name
        delta, low, high = (None,) * 3 if same else tables.difference(correct[other], correct[name], samples)
        pairs = [] if same else [_won_lost(before, after) for before, after in _by_seed(correct[other], correct[name])]
        row |= {
            f"minus_{other}": delta, f"minus_{other}_low": low, f"minus_{other}_high": high,
            f"won_{other}": None if same else sum(won for won, _ in pairs),
            f"lost_{other}": None if same else sum(lost for _, lost in pairs),
            f"mcnemar_p_{other}": None if same else max(stats.mcnemar(*pair) for pair in pairs),
        }  # fmt: skip
    row |= {
        "tokens": float(np.mean([one["tokens_used"] for one in every])),
        "probe_tokens": float(np.mean([one["probe_tokens_used"] for one in every])),
        "cpu_seconds": _cpu_seconds(study, name),
        "groups": _groups(correct[name], examples),
    }
    return row


def _by_seed(before: Sequence[Sequence[bool]], after: Sequence[Sequence[bool]]) -> Iterator[tuple[Any, Any]]:
    """Yield both methods for each seed; what has no seed is compared with every seed of the other."""
    for place in range(max(len(before), len(after))):
        yield before[place if len(before) > 1 else 0], after[place if len(after) > 1 else 0]


def _won_lost(before: Sequence[bool], after: Sequence[bool]) -> tuple[int, int]:
    both = list(zip(before, after, strict=True))
    return sum(a and not b for b, a in both), sum(b and not a for b, a in both)


def _cpu_seconds(study: Study, name: str) -> float | None:
    t_max = study.settings.decode.max_new_tokens
    spent = [
        line
        for seed in study.plan.seeds
        for line in files.read_jsonl(study.run_dir(seed) / "eval" / Method(name, 0).tag(t_max) / "seconds.jsonl")
    ]
    asked = sum(line["questions"] for line in spent)
    return sum(line["cpu_seconds"] for line in spent) / asked if asked else None


def _groups(correct: Sequence[Sequence[bool]], examples: Sequence[Example]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for place, example in enumerate(examples):
        found.setdefault(group_of(example), []).append(float(np.mean([one[place] for one in correct])))
    return {name: float(np.mean(found[name])) for name in sorted(found)}


def _probing(rows: Sequence[Sequence[Row]]) -> Row:
    """Return how the probes of ESM decided: how often against the retrieval, and by how much."""
    steps = [step for one in rows for row in one for step in row["steps"] if step["did_probe"] and step["candidates"]]
    if not steps:
        return {"steps": 0}
    gains = [one["conf_gain"] for step in steps for one in step["candidates"] if one["conf_gain"] is not None]
    spread = [max(one["ahat"] for one in step["candidates"]) - min(one["ahat"] for one in step["candidates"])
              for step in steps if len(step["candidates"]) > 1]  # fmt: skip
    nearest = [max(step["candidates"], key=lambda one: one["ahat"])["name"] for step in steps]
    wanted = [max(one["ahat"] for one in step["candidates"]) > step["null_ahat"] for step in steps]
    return {
        "steps": len(steps),
        "nearest_overruled": float(np.mean([
            want and step["chosen"] != name for step, name, want in zip(steps, nearest, wanted, strict=True)
        ])),
        "overruled_by_null": float(np.mean([
            want and step["chosen"] is None for step, want in zip(steps, wanted, strict=True)
        ])),
        "confidence_gain_mean": float(np.mean(gains)), "confidence_gain_sd": float(np.std(gains)),
        "value_spread_of_candidates": float(np.mean(spread)) if spread else None,
    }  # fmt: skip


def _dev_by_rule(study: Study) -> dict[str, Row]:
    """Return the accuracy on dev of ESM with each probe rule, and without probing: mean and best of the trials."""
    found: dict[str, list[list[float]]] = {}
    for seed in study.plan.seeds:
        file = study.run_dir(seed) / "chosen.json"
        tried = files.read_json(file)["tried"] if file.is_file() else {}
        by_rule: dict[str, list[float]] = {}
        for trial in tried.get("esm", []):
            rule = trial["changes"].get("online.probe_rule", study.settings.online.probe_rule)
            by_rule.setdefault(rule, []).append(trial["accuracy"])
        if "no_probing" in tried:
            by_rule["no_probing"] = [trial["accuracy"] for trial in tried["no_probing"]]
        for rule, values in by_rule.items():
            found.setdefault(rule, []).append(values)
    return {
        rule: {"mean": float(np.mean(values)), "best_by_seed": [max(one) for one in values]}
        for rule, values in found.items()
    }


# ------------------------------------------------------------------------------------------------- tables and figure


def markdown(study: Study, result: Row) -> str:
    """Return the tables of the document."""
    rows = {row["method"]: row for row in result["methods"]}
    seeds = len(result["seeds"])
    groups = list(rows["greedy"]["groups"])
    repeated = f"{seeds} mining seeds" if seeds > 1 else "one mining seed"
    lines = [
        f"**{result['headline']}**", "",
        f"{study.plan.title}. {result['n_test']} test questions, {repeated}; intervals are 95 %, paired by question"
        f"{' and resampled over seeds' if seeds > 1 else ''}; p is the exact McNemar test"
        f"{', the largest of the seeds' if seeds > 1 else ''}; won / lost is the number of questions"
        f"{', summed over seeds' if seeds > 1 else ''}.",
        "", "| | right | against greedy | won / lost | p | against ESM | tokens + probes | CPU s |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name in (name for name in tables.NAMES if name in rows):
        row = rows[name]
        cells = [
            tables.NAMES[name], f"{row['acc']:.3f}" + (f" ({row['acc_min']:.3f}–{row['acc_max']:.3f})"
                                                       if row["seeds"] > 1 else ""),
            _interval(row, "greedy"),
            "" if row["won_greedy"] is None else f"{row['won_greedy']} / {row['lost_greedy']}",
            "" if row["mcnemar_p_greedy"] is None else f"{row['mcnemar_p_greedy']:.2g}", _interval(row, "esm"),
            f"{row['tokens']:.1f}" + (f" + {row['probe_tokens']:.1f}" if row["probe_tokens"] else ""),
            "" if row["cpu_seconds"] is None else f"{row['cpu_seconds']:.3f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    if dev := result["probing"]["dev"]:
        parts = []
        for rule, one in dev.items():
            best = ", ".join(f"{value:.3f}" for value in one["best_by_seed"])
            parts.append(f"`{rule}` {one['mean']:.3f} (best by seed: {best})")
        lines += ["", f"Mean over all settings tried on dev, by probe rule: {'; '.join(parts)}."]
    lines += ["", f"| right, by group | {' | '.join(groups)} |", "|---" * (1 + len(groups)) + "|"]
    for name in (name for name in tables.NAMES if name in rows):
        shares = " | ".join(f"{rows[name]['groups'][group]:.2f}" for group in groups)
        lines.append(f"| {tables.NAMES[name]} | {shares} |")
    return "\n".join(lines) + "\n"


def _interval(row: Row, other: str) -> str:
    if row[f"minus_{other}"] is None:
        return ""
    return f"{row[f'minus_{other}']:+.3f} [{row[f'minus_{other}_low']:+.3f}, {row[f'minus_{other}_high']:+.3f}]"


def _figure(result: Row, file: Path) -> list[str]:
    """Plot the accuracies with the intervals of their differences from greedy."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return [f"no {file.name}: matplotlib is missing (pip install 'looplab[plots]')"]
    rows = {row["method"]: row for row in result["methods"]}
    names = [name for name in tables.NAMES if name in rows][::-1]
    greedy = rows["greedy"]["acc"]
    drawing = Figure(figsize=(6.5, 0.45 * len(names) + 1), layout="constrained")
    axes = drawing.subplots()
    for place, name in enumerate(names):
        row = rows[name]
        if row["minus_greedy"] is not None:
            axes.plot(
                [greedy + row["minus_greedy_low"], greedy + row["minus_greedy_high"]], [place] * 2, color="tab:grey"
            )
        axes.plot(row["by_seed"], [place] * len(row["by_seed"]), "|", color="tab:blue")
        axes.plot([row["acc"]], [place], "o", color="tab:red" if name == "esm" else "tab:blue")
    axes.axvline(greedy, color="tab:grey", linestyle=":", linewidth=1)
    axes.set_yticks(range(len(names)), [tables.NAMES[name] for name in names])
    axes.set_xlabel(f"right, of {result['n_test']} test questions")
    tables.save_figure(drawing, file)
    return []
