"""Which keys of a config are about W&B, what is written there, and whether a run would log online."""

from __future__ import annotations

from typing import Any

import pytest

from looplab.config.lab import LaunchConfig, WandbConfig
from looplab.config.paths import show
from looplab.errors import LabError
from looplab.launch.tracking import values_of, why_not_online, with_values, without

LEROBOT: dict[str, Any] = {
    "steps": 10,
    "wandb": {"enable": False, "disable_artifact": False, "project": "lerobot", "entity": None, "mode": "offline"},
}
PUFFER: dict[str, Any] = {"wandb": False, "wandb_project": "pufferlib", "train": {"steps": 10}}
ONLINE = WandbConfig(mode="online", entity="me", project="p")


def written(settings: WandbConfig | None, config: dict[str, Any]) -> dict[str, Any]:
    return {show(place): value for place, value in values_of(settings, config).items()}


def test_the_keys_of_a_table_are_found_and_written() -> None:
    assert written(ONLINE, LEROBOT) == {
        "wandb.enable": True, "wandb.mode": "online", "wandb.entity": "me", "wandb.project": "p",
        "wandb.disable_artifact": True,
    }  # fmt: skip
    assert written(WandbConfig(mode="disabled", artifacts=True), {"logger": LEROBOT}) == {
        "logger.wandb.enable": False, "logger.wandb.mode": "disabled", "logger.wandb.disable_artifact": False,
    }  # fmt: skip


def test_keys_at_the_top_are_found_and_none_is_invented() -> None:
    assert written(ONLINE, PUFFER) == {"wandb": True, "wandb_project": "p"}
    assert written(ONLINE, {"steps": 10}) == {}
    assert written(None, LEROBOT) == {}
    assert written(WandbConfig(keys="none"), LEROBOT) == {}


def test_keys_may_be_named_in_the_lab_file() -> None:
    named = WandbConfig(mode="offline", keys={"mode": "log.where", "enable": "log.on"})
    assert written(named, {"log": {"on": False}}) == {"log.where": "offline", "log.on": True}
    with pytest.raises(LabError, match=r"log\.where does not fit"):
        values_of(named, {"steps": 1})


def test_the_config_itself_is_never_changed() -> None:
    changed = with_values(LEROBOT, values_of(ONLINE, LEROBOT))
    assert changed["wandb"]["mode"] == "online"
    assert LEROBOT["wandb"]["mode"] == "offline"
    assert without(changed, list(values_of(ONLINE, changed))) == without(LEROBOT, list(values_of(ONLINE, LEROBOT)))
    assert without(LEROBOT, []) is LEROBOT


@pytest.mark.parametrize(
    ("wandb", "launch", "config", "why"),
    [
        (ONLINE, {}, {}, None),
        (ONLINE, {}, with_values(LEROBOT, values_of(ONLINE, LEROBOT)), None),
        (None, {}, {"wandb": {"enable": True, "mode": "online"}}, None),
        (None, {}, {}, "nothing enables it"),
        (None, {}, {"wandb": {"enable": True}}, "nothing enables it"),
        (None, {}, LEROBOT, "wandb.enable is false in the config"),
        (None, {}, {"wandb": {"mode": "offline"}}, "wandb.mode is offline in the config"),
        (WandbConfig(mode="offline"), {}, LEROBOT, "track.wandb.mode is offline"),
        (WandbConfig(mode="online", keys="none"), {}, {"wandb": {"mode": "disabled"}}, "wandb.mode is disabled"),
        (ONLINE, {"env": {"WANDB_MODE": "offline"}}, {}, "launch.env sets WANDB_MODE: offline"),
        (ONLINE, {"command": ["t", "--wandb.mode=offline"]}, {}, "the command sets wandb.mode=offline"),
        (ONLINE, {"command": ["t", "--wandb.mode", "offline"]}, {}, "the command sets wandb.mode=offline"),
        (ONLINE, {"command": ["t", "++wandb.mode=disabled"]}, {}, "the command sets wandb.mode=disabled"),
        (ONLINE, {"command": ["t", "--wandb.enable=false"]}, {}, "the command sets wandb.enable=false"),
        (None, {"command": ["t", "--wandb.mode=online", "--wandb.enable=true"]}, LEROBOT, None),
        (ONLINE, {"config": {"as": "flags", "skip": ["wandb"]}}, {"wandb": True}, "skip keeps wandb from the trainer"),
        (ONLINE, {"config": {"as": "flags"}}, {"wandb": True}, None),
    ],
)
def test_whether_the_trainer_will_really_log_online(
    wandb: WandbConfig | None, launch: dict[str, Any], config: dict[str, Any], why: str | None
) -> None:
    found = why_not_online(wandb, LaunchConfig.model_validate({"command": ["t"], **launch}), config)
    assert found is None if why is None else why in (found or "")


def test_arguments_after_the_command_count_too() -> None:
    launch = LaunchConfig(command=["t", "--wandb.mode=online"])
    assert why_not_online(ONLINE, launch, LEROBOT | {"wandb": {}}, ["--wandb.mode=offline"]) is not None
