"""Fix a lab after its script, its configs or its metrics have changed: `looplab check --fix`.

A change is proposed only if it is certain; anything else is reported as doubtful. Without knowledge of
the script (an unknown command), only what the lab's own files say is looked at.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from looplab.config import paths
from looplab.config.files import put, take_out
from looplab.config.lab import LAB_FILE, RUN_FOLDER, ConfigRendering, LabConfig, ObjectiveConfig, StudyConfig
from looplab.config.paths import show
from looplab.errors import LabError
from looplab.guard.knobs import Knob, show_value
from looplab.launch.command import CONFIG_PLACEHOLDERS, VARIABLE, flag_of, flag_words, rendered_leaves
from looplab.ledger import ledger as ledgers
from looplab.ledger.study import StudyLedger
from looplab.loop.setup import RunOptions, base_paths
from looplab.measure.discover import IGNORED
from looplab.measure.summary import Directions
from looplab.onboard.base import MISSING, Interface, Script, ScriptSetting, flag_rendering
from looplab.onboard.knobs import words_of
from looplab.onboard.mend_edits import delete, move, rename_key, renamed, set_item, set_value
from looplab.onboard.mend_files import LabFiles, Mending
from looplab.onboard.readers import read_interface
from looplab.onboard.readers.config_file import RUNNER
from looplab.onboard.readers.hydra import kind_of
from looplab.onboard.scripts import PYTHON, SHELLS, find_script, module_file
from looplab.onboard.source import calls
from looplab.runs import folder as run_folder

LIKE = 0.6
"""Similarity from which two names may mean the same setting."""
LIKE_METRIC = 0.8
"""Similarity from which two names may mean the same metric."""
RUNS = 3
"""Ended runs whose metrics are looked at."""
MAX_FILES = 20_000
"""Files of a lab that are looked at to find a script that was moved."""
OUTPUTS = "outputs"


def find_mending(lab: LabConfig, studies: Sequence[StudyConfig], *, ask: bool) -> Mending:
    """Return what can be fixed in a lab.

    Args:
        ask: Ask the scripts for their settings, which starts them with `--help`.
    """
    files = LabFiles(lab.folder)
    doubts: dict[str, None] = {}
    for study in studies:
        mender = _Mender(lab, study, files, doubts)
        mender.mend(ask=ask)
    return Mending(tuple(files.fixes), tuple(doubts), files.changed())


class _Mender:
    """Looks at one study."""

    def __init__(self, lab: LabConfig, study: StudyConfig, files: LabFiles, doubts: dict[str, None]) -> None:
        self._lab, self._study, self._files, self._doubts = lab, study, files, doubts
        self._lab_file = lab.folder / LAB_FILE
        self._rendering = study.launch.config
        self._command = list(study.launch.command)
        self._bases = base_paths(lab.folder, study, RunOptions()) if study.base else {}
        inner = "." if study.launch.cwd == RUN_FOLDER else study.launch.cwd
        self._home = lab.folder / inner

    def mend(self, *, ask: bool) -> None:
        for path in self._bases.values():
            self._files.document(path)  # a file that cannot be read is an error, as in `check`
        self._mend_command()
        script = self._script() if ask else None
        interface = _read(script) if script is not None else None
        if script is not None and interface is not None:
            self._mend_settings(script, interface)
        self._mend_seed()
        self._mend_ranges(interface)
        self._mend_objective()

    # -- places in the files

    def _doubt(self, text: str) -> None:
        several = len(self._lab.studies) > 1
        self._doubts[f"{self._study.name}: {text}" if several else text] = None

    def _block(self, data: Any, key: str) -> Any:
        """Return the part of the lab file that holds a key of the study: its own, or the defaults of all studies."""
        own = next((one for one in data.get("studies", ()) if one.get("study") == self._study.name), None)
        return own if own is not None and (key in own or key not in data) else data

    def _change_lab(self, key: str, why: str, action: Callable[[Any], None]) -> None:
        self._files.change(self._lab_file, why, lambda data: action(self._block(data, key)))

    def _base(self, path: Path) -> Any:
        return self._files.document(path).data

    def _knobs(self) -> Mapping[str, Any]:
        block = self._block(self._files.document(self._lab_file).data, "knobs")
        return block.get("knobs") or {}

    def _value_of(self, key: str) -> Any:
        """Return the value of a key in the first base that has it, or the default of its knob."""
        for path in self._bases.values():
            base = self._base(path)
            found = paths.find(base, key)
            if len(found) == 1:
                return paths.get(base, found[0])
        spec = self._knobs().get(key)
        return spec.get("default", MISSING) if isinstance(spec, Mapping) else MISSING

    # -- the command

    def _mend_command(self) -> None:
        """Find a script that was moved."""
        place = _script_word(self._command)
        if place is None:
            return
        index, is_module = place
        word = self._command[index]
        file = Path(*word.split(".")).with_suffix(".py") if is_module else Path(word)
        if (self._home / file).is_file() or (is_module and _is_module(self._home, word, self._command[0])):
            return
        found = [
            other
            for path in _files_in(self._lab.folder)
            if path.name == file.name and not (other := os.path.relpath(path, self._home)).startswith("..")
        ]
        if is_module:
            found = [".".join(Path(other).with_suffix("").parts) for other in found]
        if len(found) != 1:
            which = f"which of {', '.join(sorted(found))}?" if found else f"the lab has no file {file.name}"
            self._doubt(f"launch.command: {word} does not exist; {which}")
            return
        new = found[0]
        self._command[index] = new

        def replace_word(block: Any) -> None:
            block["launch"]["command"][index] = new

        self._change_lab("launch", f"{word} was moved to {new}", replace_word)

    def _script(self) -> Script | None:
        """Return the script that the command starts; None if it is not known."""
        words = [sys.executable if word == "{python}" else word for word in self._command]
        if len(words) > 3 and Path(words[1]).name == RUNNER:
            words = [words[0], *words[3:]]
        kept: list[str] = []
        for word in words:
            if VARIABLE.search(word) is None:
                kept.append(word)
            elif word not in CONFIG_PLACEHOLDERS and len(kept) > 2 and re.fullmatch(r"--?[^=]+", kept[-1]):
                kept.pop()  # an option with a value that each run fills in
        try:
            return find_script(kept, self._home) if kept else None
        except LabError:
            return None

    # -- the settings of the script

    def _mend_settings(self, script: Script, interface: Interface) -> None:
        way = self._rendering.as_
        if interface.rendering.get("as", "file") != way:
            if way != "file" and interface.rendering.get("as", "file") != "file":
                self._doubt(
                    f"{script.name} now takes its settings in another way ({interface.reader}), and launch.config "
                    f"passes them as {way}"
                )
            return
        if way == "file" and interface.reader != "constants":
            return  # which keys of its config a script reads is not known
        known = _known_flags(script) if way == "flags" else frozenset()
        if way == "flags":
            self._mend_case(interface, known)
        settings = {_normal(setting.name): setting for setting in interface.settings}
        certain = _is_certain(script, interface, known)
        keys = self._keys()
        present = {key for key in keys if self._is_setting(key, settings, known, interface)}
        used = {_normal(self._name(key)) for key in present}
        fresh = [setting for name, setting in settings.items() if name not in used and not setting.positional]
        gone = [key for key in keys if key not in present]
        candidates = {key: self._candidates(key, fresh) for key in gone}
        wanted = [found[0].name for found in candidates.values() if len(found) == 1]
        for key in gone:
            found = candidates[key]
            if len(found) == 1 and wanted.count(found[0].name) == 1:
                self._rename(key, found[0], script)
            elif found:
                names = ", ".join(setting.name for setting in found)
                self._doubt(f"{key} is no longer a setting of {script.name}; it may be {names} now")
            else:
                self._remove(key, script, fresh, certain=certain)
        self._name_required(script, interface)
        if way == "flags":
            self._mend_rendering(interface)
        self._fill_bases(script, interface, settings)
        if way == "hydra":
            self._compare_with_hydra(interface)

    def _keys(self) -> list[str]:
        """Return the keys that reach the script: those of the base configs, and knobs."""
        found: dict[str, None] = {}
        for path in self._bases.values():
            for place, value in rendered_leaves(self._files.document(path).plain(), self._rendering):
                if value is not None:
                    found[show(place)] = None
        for key in self._knobs():
            if not any(map(paths.is_wildcard, paths.parse(key))) and not self._rendering.leaves_out(paths.parse(key)):
                found.setdefault(show(paths.parse(key)), None)
        return list(found)

    def _name(self, key: str) -> str:
        """Return the name under which a key reaches the script."""
        return str(paths.parse(key)[-1]) if self._rendering.keys == "flat" else key

    def _is_setting(
        self, key: str, settings: Mapping[str, ScriptSetting], known: frozenset[str], interface: Interface
    ) -> bool:
        name = _normal(self._name(key))
        if self._rendering.as_ == "env":
            name = _normal(self._rendering.prefix + key.replace(".", "__"))
        if name in settings or f"{{config.{key}}}" in " ".join(self._command):
            return True
        if name in {_normal(flag.lstrip("-")) for flag in known}:
            return True  # an option that readers leave out
        # A group of Hydra, or a table that is written as one value.
        return any(other.startswith(f"{name}.") for other in settings) and interface.base is not None

    def _candidates(self, key: str, fresh: Sequence[ScriptSetting]) -> list[ScriptSetting]:
        """Return the settings that the key may have become: of the same kind and default, with a similar name."""
        value = self._value_of(key)
        if value is MISSING:
            return []
        return [
            setting
            for setting in fresh
            if _is_same(setting.default, value) and _similarity(self._name(key), setting.name) >= LIKE
        ]

    def _rename(self, key: str, setting: ScriptSetting, script: Script) -> None:
        new_name = setting.name.replace("-", "_") if self._rendering.case == "kebab" else setting.name
        old = paths.parse(key)
        new = show((*old[:-1], new_name)) if self._rendering.keys == "flat" else new_name
        why = f"{key} of {script.name} is {setting.name} now (same type and default)"
        for path in self._bases.values():
            self._files.change(path, why, lambda data: move(data, key, new))

        def rename(block: Any) -> None:
            if key in (block.get("knobs") or {}):
                rename_key(block["knobs"], key, new)

        self._change_lab("knobs", why, rename)
        for section in ("seed", "flags", "constraints", "normalise", "derive", "modes", "launch"):

            def rename_mentions(block: Any, section: str = section) -> None:
                if section in block:
                    block[section] = renamed(block[section], key, new, section)

            self._change_lab(section, why, rename_mentions)
        if self._study.seed is None and key.rpartition(".")[2].lower() == "seed":
            self._change_lab("seed", why, lambda block: put(block, "seed", new))
        self._doubt_other_mentions(key)

    def _doubt_other_mentions(self, key: str) -> None:
        """Name the files of proposers that still use a key."""
        word = re.compile(rf"(?<![\w.]){re.escape(key)}(?![\w])")
        for entry in self._study.proposers:
            for name in filter(None, (entry.rules, entry.queue)):
                file = self._lab.folder / name
                if file.is_file() and word.search(file.read_text(errors="replace")):
                    self._doubt(f"{name} names {key}; change it by hand")

    def _remove(self, key: str, script: Script, fresh: Sequence[ScriptSetting], *, certain: bool) -> None:
        what = f"{key} is no longer a setting of {script.name}"
        similar = [setting.name for setting in fresh if _similarity(self._name(key), setting.name) >= LIKE]
        if similar:
            self._doubt(f"{what}; it may be {', '.join(similar)} now, which has another type or default")
            return
        if not certain:
            return
        if key == self._study.seed or self._is_mentioned(key):
            self._doubt(f"{what}, and the lab file names it elsewhere; change it by hand")
            return
        for path in self._bases.values():
            self._files.change(path, what, lambda data: delete(data, key))

        def remove(block: Any) -> None:
            if key in (block.get("knobs") or {}):
                take_out(block["knobs"], key)

        self._change_lab("knobs", what, remove)

        def forget(block: Any) -> None:
            config = block["launch"].get("config")
            for part in ("names", "store_true", "skip"):
                known = config.get(part) if isinstance(config, Mapping) else None
                if isinstance(known, Mapping | list) and key in known:
                    take_out(known, key if isinstance(known, Mapping) else known.index(key))

        self._change_lab("launch", what, forget)

    def _is_mentioned(self, key: str) -> bool:
        """Return whether the lab file uses a key outside its knobs."""
        study = self._study
        texts = [*study.constraints, *study.derive, *study.derive.values(), *study.flags.values()]
        texts += [text for rule in study.normalise for text in (rule.set, rule.to)]
        texts += [edit for edits in study.modes.values() for edit in edits]
        word = re.compile(rf"(?<![\w.]){re.escape(key)}(?![\w.])")
        return any(word.search(text) for text in texts)

    def _name_required(self, script: Script, interface: Interface) -> None:
        given = {_normal(self._name(key)) for key in self._keys()}
        words = {word.partition("=")[0].lstrip("-") for word in self._command}
        for setting in interface.settings:
            if not setting.required or setting.default is not MISSING or _normal(setting.name) in given:
                continue
            if setting.positional:
                if f"{{config.{setting.name}}}" in self._command:
                    continue
                place = (0, False) if script.program is not None else _script_word(self._command)
                rest = self._command[place[0] + 1 :] if place else []
                if any(not word.startswith("-") and word not in CONFIG_PLACEHOLDERS for word in rest):
                    continue
            elif {setting.name, _normal(setting.name)} & {*words, *map(_normal, words)}:
                continue
            where = " or ".join([*self._bases] or ["the base config"])
            self._doubt(f"{script.name} needs {setting.name} now; write it to {where} or to launch.command")

    # -- how values are written

    def _mend_case(self, interface: Interface, known: frozenset[str]) -> None:
        """Write names as the script's flags are written."""
        flags = known or {setting.flag or f"--{setting.name}" for setting in interface.settings}
        keys = [paths.parse(key) for key in self._keys() if key not in self._rendering.names]

        def missing(rendering: ConfigRendering) -> set[str]:
            return {flag_of(key, rendering) for key in keys} - flags

        if interface.reader in ("tyro", "fire") or not missing(self._rendering):
            return  # both spellings are accepted
        other = self._rendering.model_copy(
            update={"case": "kebab" if self._rendering.case != "kebab" else "as_written"}
        )
        if len(missing(other)) >= len(missing(self._rendering)) or any(
            flag in flags
            for flag in {flag_of(key, self._rendering) for key in keys} - {flag_of(k, other) for k in keys}
        ):
            return
        example = sorted(missing(self._rendering) - missing(other))
        self._rendering = other
        self._set_rendering({"case": other.case}, f"{example[0]} is not a flag of the script")

    def _set_rendering(self, changes: Mapping[str, Any], why: str) -> None:
        def change(block: Any) -> None:
            launch = block["launch"]
            if not isinstance(launch.get("config"), Mapping):
                launch["config"] = {"as": launch.get("config") or "file"}
            for key, value in changes.items():
                if value is None:
                    launch["config"].pop(key, None)
                else:
                    launch["config"][key] = value

        self._change_lab("launch", why, change)

    def _mend_rendering(self, interface: Interface) -> None:
        """Write bools, lists and unusual flags as the script's parser reads them."""
        now = self._block(self._files.document(self._lab_file).plain(), "launch")["launch"].get("config")
        self._rendering = ConfigRendering.model_validate(now if isinstance(now, Mapping) else {"as": now})
        given = {_normal(self._name(key)): key for key in self._keys()}
        settings = [
            setting
            for setting in interface.settings
            if not setting.positional and _normal(setting.name) in given and f"--{setting.name}" not in self._command
        ]
        spread = {setting.spread for setting in settings if isinstance(self._value(setting, given), list)}
        if len(spread) > 1:
            self._doubt("the script reads some lists as several words and others as one; `lists` applies to all")
        if spread == {True} and self._rendering.separator == "equals":
            self._doubt("the script reads lists as several words, which needs `separator: space`")
            return
        written = flag_rendering(settings)
        written["lists"] = "spread" if spread == {True} else "json" if spread == {False} else self._rendering.lists
        fitting = ConfigRendering.model_validate({**written, "separator": self._rendering.separator})
        wrong = [
            key
            for setting in settings
            for key in (given[_normal(setting.name)],)
            if self._is_wrong(key, setting, fitting, self._value(setting, given))
        ]
        if not wrong:
            return
        keys = {setting.name: given[_normal(setting.name)] for setting in settings}
        names = {keys[name]: flag for name, flag in written.get("names", {}).items()}
        names = {**{key: flag for key, flag in self._rendering.names.items() if key not in keys.values()}, **names}
        changes: dict[str, Any] = {
            "booleans": written.get("booleans"),
            "store_true": [keys[name] for name in written.get("store_true", ())] or None,
            "names": names or None,
            "lists": "spread" if fitting.lists == "spread" else None,
        }
        self._set_rendering(changes, f"the script reads {', '.join(wrong)} in another way")

    def _value(self, setting: ScriptSetting, given: Mapping[str, str]) -> Any:
        return self._value_of(given[_normal(setting.name)])

    def _is_wrong(self, key: str, setting: ScriptSetting, fitting: ConfigRendering, value: Any) -> bool:
        """Return whether the words of a key are not those that the script's parser reads."""
        if (
            value is MISSING
            or value is None
            or (isinstance(value, list) and setting.kind != "list" and not setting.spread)
        ):
            return False
        values = (True, False) if isinstance(value, bool) and setting.kind == "bool" else (value,)
        place, own = tuple(paths.parse(key)), tuple(setting.name.split("."))
        return any(
            [_normal(word) for word in flag_words(place, one, self._rendering)]
            != [_normal(word) for word in flag_words(own, one, fitting)]
            for one in values
        )

    # -- base configs

    def _fill_bases(self, script: Script, interface: Interface, settings: Mapping[str, ScriptSetting]) -> None:
        """Write the script's default of a knob to the base configs that lack the key."""
        for key, spec in list(self._knobs().items()):
            if any(map(paths.is_wildcard, paths.parse(key))) or not isinstance(spec, Mapping) or "default" in spec:
                continue
            setting = settings.get(_normal(self._name(key)))
            for name, path in self._bases.items():
                if setting is None or paths.find(self._base(path), key):
                    continue
                if setting.default is MISSING or setting.default is None:
                    self._doubt(f"{name} lacks the knob {key}, and {script.name} has no default for it")
                    continue
                value = setting.default
                why = f"{key} is a knob, and {name} lacks it; {show_value(value)} is the default of {script.name}"
                self._files.change(path, why, partial(set_value, key=key, value=value))

    def _compare_with_hydra(self, interface: Interface) -> None:
        """Name keys that Hydra composes differently, because unchanged keys are not passed to it."""
        if (self._rendering.only or "changed") == "all" or not interface.base:
            return
        composed = paths.flatten(interface.base)
        for name, path in self._bases.items():
            base = paths.flatten(self._files.document(path).plain())
            other = [key for key, value in base.items() if key in composed and not _is_same(composed[key], value)]
            for key in other:
                self._doubt(
                    f"{name}: {key} is {show_value(base[key])}, and Hydra composes {show_value(composed[key])}; only "
                    "changed keys are passed to Hydra. Make them equal, or write `only: all` in launch.config"
                )

    def _mend_seed(self) -> None:
        """Find the key of the seed if the base configs lack the one that the lab file names."""
        block = self._block(self._files.document(self._lab_file).data, "seed")
        key = block.get("seed")
        if not isinstance(key, str) or not self._bases:
            return
        bases = [self._files.document(path).plain() for path in self._bases.values()]
        if any(paths.find(base, key) for base in bases):
            return
        found = [
            {
                show(place)
                for place, value in paths.leaves(base)
                if "seed" in words_of(str(place[-1])) and isinstance(value, int) and not isinstance(value, bool)
            }
            for base in bases
        ]
        everywhere = sorted(set.intersection(*found))
        if len(everywhere) == 1:
            new = everywhere[0]
            why = f"{key} is not in the base configs, and {new} is their only seed"
            self._change_lab("seed", why, lambda block: set_item(block, "seed", new))
        else:
            which = f"which of {', '.join(everywhere)}?" if everywhere else "they have no other seed"
            self._doubt(f"seed: {key} is not in the base configs; {which}")

    def _mend_ranges(self, interface: Interface | None) -> None:
        """Widen the range of a knob that does not contain the value of a base config, or its own default."""
        for key, spec in list(self._knobs().items()):
            if not isinstance(spec, Mapping) or any(map(paths.is_wildcard, paths.parse(key))):
                continue
            values = {
                name: paths.get(base, place)
                for name, path in self._bases.items()
                for base in (self._files.document(path).plain(),)
                for place in paths.find(base, key)
            }
            if "default" in spec and not values:
                values["its default"] = spec["default"]
            for name, value in values.items():
                self._widen(key, name, value)

    def _widen(self, key: str, name: str, value: Any) -> None:
        spec = dict(self._knobs()[key])
        spec.pop("default", None)
        try:
            problem = Knob.make(key, spec).problem(value, value)
        except LabError:
            return  # `check` reports what is wrong with the knob
        if problem is None:
            return
        wider = _wider(spec, value)
        if wider is None or not _is_legal(key, {**spec, **wider}, value):
            self._doubt(f"knob {key}: {problem} ({name})")
            return

        def widen(block: Any) -> None:
            for limit, new in wider.items():
                if limit == "choices":
                    added = next(i for i, item in enumerate(new) if item not in block["knobs"][key]["choices"])
                    block["knobs"][key]["choices"].insert(added, new[added])
                else:
                    block["knobs"][key][limit] = new

        where = f"the value in {name}" if name in self._bases else name
        self._change_lab("knobs", f"{key}: {where} is {problem.replace(' is ', ', which is ', 1)}", widen)

    # -- metrics

    def _mend_objective(self) -> None:
        """Rename an objective that the last ended runs did not measure."""
        objective = self._study.objective
        if objective is None:
            return
        measured = self._measured()
        if not measured or any(objective.metric in one for one in measured):
            return
        names = set.intersection(*measured)
        found = _similar_metrics(objective, names)
        if len(found) != 1:
            which = f"which of {', '.join(found)}?" if found else f"they measured {_few(sorted(names))}"
            self._doubt(f"objective: the last {len(measured)} run(s) did not measure {objective.metric}; {which}")
            return
        new = found[0]
        why = f"the last {len(measured)} run(s) measured {new}, and not {objective.metric}; `looplab remeasure` follows"
        self._change_lab("objective", why, lambda block: set_item(block["objective"], "metric", new))

    def _measured(self) -> list[set[str]]:
        """Return the metrics of the last ended runs that have any."""
        try:
            if not self._lab.ledger_path.exists():
                return []
            ledger = ledgers.open_for_reading(self._lab.ledger_path)
        except LabError:
            return []
        try:
            runs = [run for run in StudyLedger(ledger, self._study.name).runs(state="ended") if run.status == "ok"]
        finally:
            ledger.close()
        hidden = {self._study.holdout.metric} if self._study.holdout is not None else set()
        found = []
        for run in runs[-RUNS:]:
            folder = run_folder.study_folder(self._lab.folder, self._study.name) / run.id
            metrics = run_folder.read_json(folder, "summary.json", strict=False).get("metrics")
            if isinstance(metrics, dict) and metrics:
                found.append(set(metrics) - hidden)
        return found


def _read(script: Script) -> Interface | None:
    """Return how a script takes its settings; None if that cannot be found out."""
    try:
        return read_interface(script)
    except (LabError, OSError):
        return None


def _known_flags(script: Script) -> frozenset[str]:
    """Return every flag that the running parsers of a script know; empty if introspection failed."""
    flags: set[str] = set()
    left = [option for parser in script.introspection.parsers for option in _options_of(parser)]
    while left:
        option = left.pop()
        found = [*(option.get("flags") or ()), *(option.get("off") or ())]
        flags.update(found or ([f"--{option['name']}"] if option.get("name") else ()))
        left += [inner for options in (option.get("commands") or {}).values() for inner in options]
    return frozenset(flags)


def _options_of(parser: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the options of a recorded parser, and those of its commands."""
    found = list(parser.get("options", ()))
    for inner in (parser.get("sub") or {}).values():  # a command of click, or the options of one of fire
        found += _options_of(inner) if isinstance(inner, Mapping) else inner
    return found


def _is_certain(script: Script, interface: Interface, known: frozenset[str]) -> bool:
    """Return whether a name that is not among the settings would be rejected by the script."""
    if interface.reader == "hydra":
        return bool(interface.base)
    if not known or interface.reader == "fire":  # a function may take any name
        return False
    return not any(True for tree in script.modules for _ in calls(tree, "parse_known_args"))


def _script_word(command: Sequence[str]) -> tuple[int, bool] | None:
    """Return where the script is in a command, and whether it is a module; None if that is not known."""
    first = command[0]
    if first == "{python}" or PYTHON.fullmatch(first):
        at = 1
        while at < len(command) and command[at].startswith("-") and command[at] != "-m":
            at += 1
        is_module = at < len(command) and command[at] == "-m"
        at += is_module
        if at + 2 < len(command) and Path(command[at]).name == RUNNER:
            at += 2
    elif Path(first).name in SHELLS:
        at, is_module = 1, False
    else:
        at, is_module = 0, False
        if Path(first).suffix not in (".py", ".sh"):
            return None
    if at >= len(command) or "{" in command[at] or command[at].startswith("-"):
        return None
    return (at, True) if is_module else (at, False) if Path(command[at]).suffix in (".py", ".sh") else None


def _is_module(folder: Path, name: str, python: str) -> bool:
    """Return whether a module can be started from a folder, or does not belong to it."""
    top = folder / name.split(".")[0]
    if "." in name and not (top.is_dir() or top.with_suffix(".py").is_file()):
        return True
    with contextlib.suppress(LabError):
        module_file(name, folder, shutil.which(python) or sys.executable)
        return True
    return False


def _files_in(folder: Path) -> Iterator[Path]:
    """Yield the files of a lab, without outputs, environments and hidden folders."""
    left = MAX_FILES
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if name not in IGNORED and not name.startswith(".") and not (place == str(folder) and name == OUTPUTS)
        )
        for name in names:
            left -= 1
            if left < 0:
                return
            yield Path(place, name)


def _normal(name: str) -> str:
    return name.lower().replace("-", "_")


def _similarity(old: str, new: str) -> float:
    """Return how likely two names mean the same: words that are left out or abbreviated count little."""
    a, b = words_of(old), words_of(new)
    if a == b or set(a) <= set(b) or set(b) <= set(a):
        return 0.9
    if "".join(a) == "".join(word[0] for word in b) or "".join(b) == "".join(word[0] for word in a):
        return 0.9
    return difflib.SequenceMatcher(None, "_".join(a), "_".join(b), autojunk=False).ratio()


def _is_same(default: Any, value: Any) -> bool:
    """Return whether a value is the default of a setting, and of its kind."""
    if default is MISSING or default is None or isinstance(default, bool) != isinstance(value, bool):
        return False
    if isinstance(default, int | float) and isinstance(value, int | float):
        if kind_of(default) != kind_of(value) and not float(value).is_integer():
            return False
        return math.isclose(default, value, rel_tol=1e-12) or default == value
    return kind_of(default) == kind_of(value) and bool(default == value)


def _similar_metrics(objective: ObjectiveConfig, names: set[str]) -> list[str]:
    """Return the metrics that an objective may have become: the same words first, else similar ones of its goal."""
    words = words_of(objective.metric)
    same = sorted(name for name in names if words_of(name) == words)
    if same:
        return same
    directions = Directions()
    text = "_".join(words)
    return sorted(
        name
        for name in names
        if directions.goal(name) == objective.goal
        and (
            sorted(words_of(name)) == sorted(words)
            or difflib.SequenceMatcher(None, text, "_".join(words_of(name)), autojunk=False).ratio() >= LIKE_METRIC
        )
    )


def _few(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _wider(spec: Mapping[str, Any], value: Any) -> dict[str, Any] | None:
    """Return the limits of a knob that must change for a value to be legal; None if that would not be enough."""
    if spec.get("choices") is not None:
        choices = list(spec["choices"])
        kinds = {kind_of(choice) for choice in choices}
        if kind_of(value) not in kinds or (isinstance(value, float) and not math.isfinite(value)):
            return None
        numbers = kinds <= {"int", "float"} and choices == sorted(choices)
        at = next((i for i, choice in enumerate(choices) if numbers and choice > value), len(choices))
        return {"choices": [*choices[:at], value, *choices[at:]]}
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    low, high = spec.get("low"), spec.get("high")
    if low is not None and value < low:
        return {"low": value}
    return {"high": value} if high is not None and value > high else None


def _is_legal(key: str, spec: Mapping[str, Any], value: Any) -> bool:
    try:
        return Knob.make(key, spec).problem(value, value) is None
    except LabError:
        return False


# -- changes of documents
