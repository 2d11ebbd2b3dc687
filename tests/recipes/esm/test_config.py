from __future__ import annotations

import json
from pathlib import Path

import pytest

from looplab.errors import LabError
from looplab.recipes.esm.esm import config
from looplab.recipes.esm.esm.config import load, parse_settings, resolve_layers

CONFIGS = Path(config.__file__).parents[1] / "configs"
SECTIONS = {
    "seed", "model", "task", "prompt", "decode", "control_points", "offline_mine",
    "offline_select", "offline_memory", "online", "eval", "outputs",
}  # fmt: skip


def write(folder: Path, text: str) -> Path:
    path = folder / "some.yaml"
    path.write_text(text)
    return path


def refused(folder: Path, text: str) -> str:
    with pytest.raises(LabError) as caught:
        load(write(folder, text))
    return str(caught.value)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_of_the_recipe_is_read_and_survives_its_resolved_form(path: Path, tmp_path: Path) -> None:
    found = load(path)
    resolved = tmp_path / "config_resolved.json"
    resolved.write_text(json.dumps(found.plain()))
    assert load(resolved) == found
    assert set(found.plain()) - {"suite"} == SECTIONS


def test_the_recipe_has_the_configs_that_its_guide_names() -> None:
    names = {path.stem for path in CONFIGS.glob("*.yaml")}
    wanted = {"debug", "gsm8k_recommended_small", "gsm8k_recommended_paper", "suite_tiny", "tiny", "tiny_unsteerable"}
    assert wanted | {"smollm2_addition"} <= names


def test_a_short_file_gets_every_default() -> None:
    found = parse_settings({"task": {"dataset": "gsm8k"}})
    assert (found.offline_mine.K, found.offline_mine.eta0, found.offline_select.epsilon) == (8, 0.001, 1e-4)
    assert (found.online.k_retrieve, found.online.L, found.online.rho, found.decode.max_new_tokens) == (16, 2, 0.1, 256)
    assert (found.control_points.M, found.control_points.segment_delimiter, found.task.data_root) == (
        6,
        "\n\n",
        "datasets",
    )
    assert found.eval.split == "dev"


def test_an_unknown_key_is_named_with_its_line_and_a_near_one(tmp_path: Path) -> None:
    message = refused(tmp_path, "task:\n  dataset: tiny\nonline:\n  beta: 2\n  k_retrive: 3\n")
    assert "some.yaml:5" in message
    assert "online.k_retrive" in message
    assert "did you mean k_retrieve" in message


def test_an_unknown_section_is_named(tmp_path: Path) -> None:
    assert "did you mean offline_mine" in refused(tmp_path, "task: {dataset: tiny}\nofline_mine: {K: 4}\n")


def test_all_errors_are_reported_at_once(tmp_path: Path) -> None:
    message = refused(tmp_path, "task: {dataset: tiny}\ndecode: {top_p: 0}\nonline: {beta: -1}\n")
    assert "decode.top_p" in message
    assert "online.beta" in message


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("offline_mine: {K: '8'}", "offline_mine.K"),
        ("offline_mine: {temperature: 0}", "offline_mine.temperature"),
        ("offline_mine: {pos_source: golden}", "offline_mine.pos_source"),
        ("online: {min_tool_m: 3, max_tool_m: 2}", "below min_tool_m"),
        ("online: {k_scale: .inf}", "online.k_scale"),
        ("eval: {ablations: [no_memroy]}", "eval.ablations.0"),
        ("control_points: {segment_delimiter: ''}", "control_points.segment_delimiter"),
        ("seed: true", "seed"),
        ("outputs: {run_id: 20251216_130915}", "in quotes"),
    ],
)
def test_an_invalid_value_is_reported(line: str, expected: str, tmp_path: Path) -> None:
    message = refused(tmp_path, f"task: {{dataset: tiny}}\n{line}\n")
    assert expected in message
    assert "some.yaml:2" in message


def test_mining_the_test_split_is_refused(tmp_path: Path) -> None:
    message = refused(tmp_path, "task: {dataset: gsm8k, train_split: test, eval_split: test}\n")
    assert "must be different" in message


@pytest.mark.parametrize("text", ["", "- a\n", "task: [\n", "task: {dataset: a, dataset: b}\n"])
def test_a_file_that_is_no_config_is_refused_in_words(text: str, tmp_path: Path) -> None:
    assert "some.yaml" in refused(tmp_path, text)


def test_a_missing_file_lists_what_is_there() -> None:
    with pytest.raises(LabError, match=r"debug\.yaml"):
        load(CONFIGS / "debgu.yaml")


def test_old_names_are_read_with_a_note(tmp_path: Path) -> None:
    found = load(write(tmp_path, "task: {dataset: tiny}\nonline: {k: 5, alpha_mult: 0.25}\n"))
    assert (found.online.k_retrieve, found.online.k_scale) == (5, 0.25)
    assert found.notes == ("online.k is read as online.k_retrieve", "online.alpha_mult is read as online.k_scale")


def test_an_old_name_beside_its_new_one_is_refused(tmp_path: Path) -> None:
    assert "remove one of them" in refused(tmp_path, "task: {dataset: tiny}\nonline: {k: 5, k_retrieve: 5}\n")


def test_a_wrong_value_under_an_old_name_has_its_line(tmp_path: Path) -> None:
    assert "some.yaml:3" in refused(tmp_path, "task: {dataset: tiny}\nonline:\n  k: 0\n")


def test_changed_settings_are_checked_again() -> None:
    found = parse_settings({"task": {"dataset": "tiny"}})
    assert found.changed({"decode.max_new_tokens": 64}).decode.max_new_tokens == 64
    with pytest.raises(LabError, match="did you mean max_new_tokens"):
        found.changed({"decode.max_new_token": 64})


def test_a_suite_gives_each_dataset_its_own_settings() -> None:
    found = parse_settings(
        {
            "task": {"dataset": "gsm8k", "max_train_examples": 9},
            "suite": {
                "run_name_prefix": "all",
                "gpus": "0,1",
                "datasets": [
                    {"name": "arc-c", "prompt_template": "arc_0shot", "max_eval_examples": 7},
                    {"name": "reasoning-gym/chain_sum", "max_new_tokens": 32},
                ],
            },
        }
    )
    assert found.suite is not None
    assert found.suite.gpus == [0, 1]
    arc, sums = found.members()
    assert (arc.task.dataset, arc.prompt.template, arc.task.max_eval_examples) == ("arc-c", "arc_0shot", 7)
    assert (arc.task.max_train_examples, arc.outputs.run_name, arc.suite) == (9, "all_arc-c", None)
    assert (sums.decode.max_new_tokens, sums.outputs.run_name) == (32, "all_reasoning-gym_chain_sum")


def test_two_datasets_of_a_suite_cannot_share_a_folder() -> None:
    with pytest.raises(LabError, match="own `label`"):
        parse_settings({"task": {"dataset": "tiny"}, "suite": {"datasets": [{"name": "tiny"}, {"name": "tiny"}]}})


def test_layers_are_indices_or_shares_of_the_depth() -> None:
    assert resolve_layers(None, 28) == tuple(range(19, 28))
    assert resolve_layers(None, 2) == (1,)
    assert resolve_layers([3, -1, 0.5], 9) == (3, 4, 8)
    assert resolve_layers([0.0, 1.0], 4) == (0, 3)
    with pytest.raises(LabError, match="no layer 4"):
        resolve_layers([4], 4)
