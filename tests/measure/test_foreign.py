"""Configs and metrics of runs that other tools left behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from looplab.config.lab import StudyConfig
from looplab.measure.foreign import ForeignRun, Unreadable, read_folder, run_folders

DATA = Path(__file__).parent / "data"


@pytest.fixture
def study() -> StudyConfig:
    return StudyConfig.model_validate(
        {
            "study": "s",
            "launch": {"command": ["true"]},
            "objective": {"metric": "loss", "goal": "min"},
            "holdout": {"metric": "secret_test", "budget": 1},
            "judge": {"baseline_seeds": 2},
        }
    )


def knobs(config: Any) -> int:
    return sum(key in config for key in ("lr", "train", "net"))


def read(path: Path, study: StudyConfig, **mapped: str) -> ForeignRun:
    run = read_folder(path, study, mapped, knobs)
    assert isinstance(run, ForeignRun), run
    return run


@pytest.mark.parametrize("client", ["0.16.6", "0.19.11"])
def test_an_offline_run_of_wandb_has_config_and_history_in_one_file(
    client: str, study: StudyConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "wandb" / "offline-run-20250101_000000-fixture1"
    folder.mkdir(parents=True)
    shutil.copy(DATA / f"wandb-{client}.wandb", folder / "run-fixture1.wandb")
    other = tmp_path / "wandb" / "offline-run-20250102_000000-fixture2"
    shutil.copytree(folder, other)
    (other / "run-fixture1.wandb").rename(other / "run-fixture2.wandb")
    assert run_folders(tmp_path) == run_folders(tmp_path / "wandb") == [folder, other]
    assert run_folders(folder) == [folder]
    run = read(folder, study)
    assert run.config == {"lr": 0.001, "net": {"width": 64}, "late": 5}
    assert run.objective == pytest.approx(1 / 40)
    assert run.digest != read(other, study).digest  # the name of the file is another


def test_the_wrapping_of_wandbs_config_file_is_taken_off(study: StudyConfig, tmp_path: Path) -> None:
    files = tmp_path / "run" / "wandb" / "run-1" / "files"
    files.mkdir(parents=True)
    (files / "config.yaml").write_text("wandb_version: 1\n_wandb:\n  value: {a: 1}\nlr:\n  desc: null\n  value: 0.5\n")
    (files / "wandb-summary.json").write_text('{"loss": 0.25, "_step": 9}')
    run = read(tmp_path / "run", study)
    assert run.config == {"lr": 0.5}
    assert run.objective == 0.25


def test_hyperparameters_of_tensorboard_are_read(study: StudyConfig, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.plugins.hparams import plugin_data_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    info = plugin_data_pb2.SessionStartInfo()
    info.hparams["lr"].number_value = 0.25
    info.hparams["opt"].string_value = "adam"
    info.hparams["warm"].bool_value = True
    content = plugin_data_pb2.HParamsPluginData(session_start_info=info, version=0).SerializeToString()
    plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="hparams", content=content)
    value = summary_pb2.Summary.Value(
        tag="_hparams_/session_start_info", metadata=summary_pb2.SummaryMetadata(plugin_data=plugin)
    )
    writer = EventFileWriter(str(tmp_path / "run"))
    writer.add_event(event_pb2.Event(wall_time=1.0, summary=summary_pb2.Summary(value=[value])))
    for step in range(3):
        scalar = summary_pb2.Summary.Value(tag="loss", simple_value=1.0 - step / 4)
        writer.add_event(event_pb2.Event(wall_time=2.0, step=step, summary=summary_pb2.Summary(value=[scalar])))
    writer.close()
    run = read(tmp_path / "run", study)
    assert run.config == {"lr": 0.25, "opt": "adam", "warm": True}
    assert run.is_flat
    assert run.objective == 0.5


def test_of_several_configs_the_one_with_most_knobs_is_taken(study: StudyConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "last" / "pretrained_model").mkdir(parents=True)
    (run / "config.json").write_text('{"architectures": ["Model"]}')  # a model's config, not the trainer's
    wanted = {"lr": 0.5, "train": {"steps": 10}}
    (run / "checkpoints/last/pretrained_model/train_config.json").write_text(json.dumps(wanted))
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n')
    assert read(run, study).config == wanted


def test_the_held_out_metric_is_not_read(study: StudyConfig, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2, "secret_test": 3}\n')
    assert set(read(tmp_path, study).metrics) == {"loss"}


def test_a_metric_by_another_name(study: StudyConfig, tmp_path: Path) -> None:
    (tmp_path / "progress.csv").write_text("step,val\n1,2\n2,1.5\n")
    assert read(tmp_path, study).objective is None
    assert read(tmp_path, study, val="loss").objective == 1.5


def test_a_folder_without_metrics_says_so(study: StudyConfig, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "override.json").write_text("{}")
    assert run_folders(tmp_path) == [tmp_path / "a"]
    found = read_folder(tmp_path / "a", study, {}, knobs)
    assert isinstance(found, Unreadable)
    assert "trainer_summary.json" in found.why


def test_an_override_alone_is_a_partial_config(study: StudyConfig, tmp_path: Path) -> None:
    (tmp_path / "override.json").write_text('{"train": {"lr": 1}}')
    (tmp_path / "trainer_summary.json").write_text('{"metrics": {"loss": 1}}')
    run = read(tmp_path, study)
    assert (run.config, run.config_from) == ({"train": {"lr": 1}}, "override.json")
