from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from looplab.config.lab import StudyConfig
from looplab.errors import LabError
from looplab.measure.base import Batch, Curve
from looplab.measure.discover import MAX_DEPTH, Reader, reader_of

OLD_WANDB = Path(__file__).parent / "data" / "wandb-0.16.6.wandb"


def put(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def put_wandb(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "run-fixture1.wandb").write_bytes(OLD_WANDB.read_bytes())


def found(run_dir: Path, kinds: str | list[str] = "auto") -> list[tuple[str, str]]:
    return [(source.kind, str(source.path.relative_to(run_dir))) for source in Reader(run_dir, kinds).sources()]  # type: ignore[arg-type]


def points(batch: Batch) -> dict[str, list[tuple[float, float]]]:
    return {name: list(zip(curve.steps, curve.values, strict=True)) for name, curve in batch.items()}


def test_everything_in_a_run_folder_is_found_the_most_trusted_first(tmp_path: Path) -> None:
    put(tmp_path / "train.log", "loss: 1\n")
    put(tmp_path / "trainer_summary.json", {"metrics": {}})
    put(tmp_path / "lightning_logs" / "version_0" / "metrics.csv", "step,a\n")
    put(tmp_path / "progress.csv", "step,a\n")
    put(tmp_path / "tb" / "events.out.tfevents.1700000000.host.1.0", "")
    put_wandb(tmp_path / "wandb" / "run-20250101_000000-fixture1")
    put(tmp_path / "wandb" / "run-20240101_000000-x" / "files" / "wandb-history.jsonl", "")
    put(tmp_path / "wandb" / "run-20240101_000000-x" / "files" / "wandb-summary.json", {})
    put(tmp_path / "metrics.jsonl", {"step": 1, "a": 1})
    assert found(tmp_path) == [
        ("jsonl", "metrics.jsonl"),
        ("wandb", "wandb/run-20250101_000000-fixture1/run-fixture1.wandb"),
        ("wandb_history", "wandb/run-20240101_000000-x/files/wandb-history.jsonl"),
        ("tensorboard", "tb/events.out.tfevents.1700000000.host.1.0"),
        ("csv", "lightning_logs/version_0/metrics.csv"),
        ("csv", "progress.csv"),
        ("stdout", "train.log"),
        ("trainer_summary", "trainer_summary.json"),
        ("wandb_summary", "wandb/run-20240101_000000-x/files/wandb-summary.json"),
    ]


@pytest.mark.parametrize("folder", ["checkpoints", ".git", "node_modules", "wandb/run-1/files/media", ".hidden/deep"])
def test_some_folders_are_not_looked_into(tmp_path: Path, folder: str) -> None:
    put(tmp_path / folder / "metrics.jsonl", {"a": 1})
    assert found(tmp_path) == []


def test_other_tables_are_not_metrics(tmp_path: Path) -> None:
    put(tmp_path / "dataset.csv", "a,b\n")
    put(tmp_path / "requirements.txt", "x")
    put(tmp_path / "events.out.tfevents.1.host.profile-empty", "")
    assert found(tmp_path) == []


def test_folders_are_not_followed_for_ever(tmp_path: Path) -> None:
    deep = tmp_path
    for _ in range(MAX_DEPTH + 1):
        deep = deep / "d"
    put(deep / "metrics.jsonl", {"a": 1})
    put(deep.parent / "metrics.jsonl", {"a": 1})
    (tmp_path / "loop").symlink_to(tmp_path)
    assert len(found(tmp_path)) == 1


def test_the_link_to_the_latest_run_is_not_a_second_run(tmp_path: Path) -> None:
    put_wandb(tmp_path / "wandb" / "offline-run-20250101_000000-fixture1")
    (tmp_path / "wandb" / "latest-run").symlink_to("offline-run-20250101_000000-fixture1")
    assert len(found(tmp_path)) == 1


def test_a_copied_link_to_the_latest_run_is_not_a_second_run(tmp_path: Path) -> None:
    put_wandb(tmp_path / "wandb" / "offline-run-20250101_000000-fixture1")
    put_wandb(tmp_path / "wandb" / "latest-run")
    assert len(found(tmp_path)) == 1


def test_a_latest_run_alone_is_read(tmp_path: Path) -> None:
    put_wandb(tmp_path / "wandb" / "latest-run")
    assert len(found(tmp_path)) == 1


def test_only_the_kinds_asked_for_are_found_in_the_order_asked(tmp_path: Path) -> None:
    put(tmp_path / "metrics.jsonl", {"step": 1, "a": 1})
    put(tmp_path / "progress.csv", "step,a\n1,2\n")
    put(tmp_path / "train.log", "step: 1 a: 3\n")
    assert [kind for kind, _ in found(tmp_path, ["csv", "jsonl"])] == ["csv", "jsonl"]
    assert points(Reader(tmp_path, ["csv", "jsonl"]).poll()) == {"a": [(1, 2.0)]}
    assert points(Reader(tmp_path, ["stdout"]).poll()) == {"a": [(1, 3.0)]}


def test_wandb_means_old_and_new_files(tmp_path: Path) -> None:
    put(tmp_path / "wandb" / "run-1" / "files" / "wandb-history.jsonl", {"_step": 3, "a": 1})
    assert points(Reader(tmp_path, ["wandb"]).poll()) == {"a": [(3, 1.0)]}


def test_an_unknown_kind_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no source 'mlflow'"):
        Reader(tmp_path, ["mlflow"])


def test_a_metric_that_two_kinds_know_is_not_doubled(tmp_path: Path) -> None:
    put(tmp_path / "metrics.jsonl", {"step": 1, "loss": 1}, {"step": 2, "loss": 2})
    put(tmp_path / "progress.csv", "step,loss,acc\n1,7,0.5\n2,8,0.6\n")
    reader = Reader(tmp_path)
    assert points(reader.poll()) == {"loss": [(1, 1.0), (2, 2.0)], "acc": [(1, 0.5), (2, 0.6)]}
    with (tmp_path / "progress.csv").open("a") as file:
        file.write("3,9,0.7\n")
    assert points(reader.poll()) == {"acc": [(3, 0.7)]}


def test_print_is_read_only_for_want_of_better(tmp_path: Path) -> None:
    put(tmp_path / "train.log", "step: 1 loss: 5 extra: 1\n")
    put(tmp_path / "metrics.jsonl")
    reader = Reader(tmp_path)
    assert points(reader.poll()) == {"loss": [(1, 5.0)], "extra": [(1, 1.0)]}
    put(tmp_path / "metrics.jsonl", {"step": 1, "loss": 5.01}, {"step": 2, "loss": 4.01})
    put(tmp_path / "train.log", "step: 1 loss: 5 extra: 1\nstep: 2 loss: 4 extra: 2\n")
    assert points(reader.poll()) == {"loss": [(2, 4.01)]}


def test_a_log_file_is_read_if_no_metric_was_printed(tmp_path: Path) -> None:
    put(tmp_path / "record" / "run.json", {})
    put(tmp_path / "record" / "train.log", "see logs/run.log\n")
    put(tmp_path / "logs" / "run.log", "[11:02:03.123] epoch 0 val_dice : 0.5\n[11:02:04.456] epoch 1 val_dice : 0.6\n")
    put(tmp_path / "wandb" / "debug.log", "step: 1 loss: 7\n")
    reader = Reader(tmp_path)
    assert points(reader.poll()) == {"val_dice": [(0, 0.5), (1, 0.6)]}
    put(tmp_path / "record" / "train.log", "see logs/run.log\nepoch 2 val_dice : 0.7\n")
    put(tmp_path / "logs" / "run.log", "epoch 2 val_dice : 0.7 other_loss : 3\n")
    assert points(reader.poll()) == {"val_dice": [(2, 0.7)]}


@pytest.mark.parametrize(
    "name", ["log.txt", "train_log.txt", "log_2024.txt", "train.log", "experiment.log", "log", "train_log"]
)
def test_names_of_log_files(tmp_path: Path, name: str) -> None:
    put(tmp_path / "out" / name, "epoch: 1 val_loss: 0.5\nepoch: 2 val_loss: 0.4\n")
    assert points(Reader(tmp_path).poll()) == {"val_loss": [(1, 0.5), (2, 0.4)]}


def test_other_text_is_not_a_log_file(tmp_path: Path) -> None:
    for name in ("requirements.txt", "catalog.txt", "debug-internal.log", "notes.txt"):
        put(tmp_path / name, "epoch: 1 val_loss: 0.5\n")
    assert points(Reader(tmp_path).poll()) == {}


def test_what_the_trainer_says_at_the_end_closes_what_it_printed(tmp_path: Path) -> None:
    put(tmp_path / "train.log", "step: 10 reward: 1.2\nstep: 20 reward: 2.3\n")
    put(tmp_path / "trainer_summary.json", {"metrics": {"reward": 2.345, "success": 1}})
    assert points(Reader(tmp_path).poll()) == {"reward": [(10, 1.2), (20, 2.3), (20, 2.345)], "success": [(20, 1.0)]}


def test_a_trainer_summary_does_not_add_to_a_curve(tmp_path: Path) -> None:
    put(tmp_path / "metrics.jsonl", {"step": 10, "reward": 1.5})
    put(tmp_path / "trainer_summary.json", {"metrics": {"reward": 1.5}})
    assert points(Reader(tmp_path).poll()) == {"reward": [(10, 1.5)]}


def test_a_bare_wandb_summary_is_read_only_for_want_of_history(tmp_path: Path) -> None:
    files = tmp_path / "wandb" / "run-1" / "files"
    put(files / "wandb-summary.json", {"_step": 9, "loss": 1, "other": 2})
    assert points(Reader(tmp_path).poll()) == {"loss": [(9, 1.0)], "other": [(9, 2.0)]}
    put(files / "wandb-history.jsonl", {"_step": 1, "loss": 3}, {"_step": 9, "loss": 1})
    assert points(Reader(tmp_path).poll()) == {"loss": [(1, 3.0), (9, 1.0)]}


def test_names_are_made_canonical_and_the_better_name_wins(tmp_path: Path) -> None:
    put(tmp_path / "metrics.jsonl", {"step": 1, "train/ot": 7, "train/ot_ot_loss": 8, "other": 1})
    reader = Reader(tmp_path, aliases={"train/ot_loss": ["train/ot_ot_loss", "train/ot"]})
    assert points(reader.poll()) == {"train/ot_loss": [(1, 8.0)], "other": [(1, 1.0)]}


def test_restarted_event_files_and_runs_are_one_curve(tmp_path: Path) -> None:
    put(tmp_path / "lightning_logs" / "version_0" / "metrics.csv", "step,loss\n1,3\n")
    put(tmp_path / "lightning_logs" / "version_1" / "metrics.csv", "step,loss\n2,2\n")
    assert points(Reader(tmp_path).poll()) == {"loss": [(1, 3.0), (2, 2.0)]}


def test_two_tables_that_know_the_same_metric_are_not_added_up(tmp_path: Path) -> None:
    put(tmp_path / "metrics.csv", "step,loss\n1,3\n")
    put(tmp_path / "results.csv", "step,loss,acc\n1,3,0.5\n")
    assert points(Reader(tmp_path).poll()) == {"loss": [(1, 3.0)], "acc": [(1, 0.5)]}


def test_the_same_name_in_train_and_validation_folders_is_two_metrics(tmp_path: Path) -> None:
    put(tmp_path / "logs" / "train" / "metrics.csv", "step,loss\n1,3\n")
    put(tmp_path / "logs" / "validation" / "metrics.csv", "step,loss\n1,4\n")
    assert points(Reader(tmp_path).poll()) == {"train/loss": [(1, 3.0)], "validation/loss": [(1, 4.0)]}


def test_a_file_below_another_of_its_kind_is_set_apart_by_its_folder(tmp_path: Path) -> None:
    put(tmp_path / "metrics.jsonl", {"step": 1, "loss": 1})
    put(tmp_path / "worker" / "metrics.jsonl", {"step": 1, "loss": 2})
    assert points(Reader(tmp_path).poll()) == {"loss": [(1, 1.0)], "worker/loss": [(1, 2.0)]}


def test_files_and_folders_are_found_when_they_appear(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    reader = Reader(run_dir)
    assert reader.poll() == {}
    put(run_dir / "config.json", "{}")
    assert reader.poll() == {}
    put(run_dir / "metrics.jsonl", {"step": 1, "a": 1})
    assert points(reader.poll()) == {"a": [(1, 1.0)]}
    put(run_dir / "out" / "logs" / "progress.csv", "step,b\n1,2\n")
    assert points(reader.poll()) == {"b": [(1, 2.0)]}
    assert reader.poll() == {}
    assert reader.last_step == 1


def test_a_quiet_folder_is_not_listed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "metrics.jsonl", {"step": 1, "a": 1})
    old = time.time() - 60
    os.utime(tmp_path, (old, old))
    reader = Reader(tmp_path)
    reader.poll()
    listed = []
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or real(path))
    reader.poll()
    assert listed == []
    put(tmp_path / "progress.csv", "step,b\n1,2\n")
    assert points(reader.poll()) == {"b": [(1, 2.0)]}
    assert listed == [str(tmp_path)]


def test_the_last_line_of_a_run_that_ended_counts(tmp_path: Path) -> None:
    put(tmp_path / "train.log", "step: 5 loss: 1\nval_bpb: 0.99")
    reader = Reader(tmp_path)
    assert points(reader.poll()) == {"loss": [(5, 1.0)]}
    assert points(reader.poll(final=True)) == {"val_bpb": [(5, 0.99)]}


def test_unreadable_records_are_counted_over_all_files(tmp_path: Path) -> None:
    put(tmp_path / "metrics.jsonl", {"step": 1, "a": 1}, "garbage\n")
    put(tmp_path / "progress.csv", "step,b\n1\n2,3\n")
    reader = Reader(tmp_path)
    reader.poll()
    assert reader.skipped == 2


def test_of_the_record_of_a_run_only_the_log_is_read(tmp_path: Path) -> None:
    put(tmp_path / "record" / "run.json", "{}")
    put(tmp_path / "record" / "train.log", "loss: 1\n")
    put(tmp_path / "record" / "metrics.jsonl", '{"step": 1, "loss": 9}\n')
    put(tmp_path / "train.log", "loss: 7\n")
    put(tmp_path / "summary.json", '{"loss": 8}')
    assert found(tmp_path) == [("stdout", "record/train.log"), ("log_file", "train.log")]
    assert Reader(tmp_path).poll(final=True)["loss"].values == [1]


def test_a_log_that_comes_later_is_read(tmp_path: Path) -> None:
    put(tmp_path / "record" / "run.json", "{}")
    reader = Reader(tmp_path)
    assert reader.poll() == {}
    put(tmp_path / "record" / "train.log", "loss: 1\n")
    assert reader.poll(final=True)["loss"].values == [1]


def test_a_folder_called_record_that_is_not_ours_is_read_like_any_other(tmp_path: Path) -> None:
    put(tmp_path / "record" / "metrics.jsonl", '{"step": 1, "loss": 9}\n')
    put(tmp_path / "train.log", "loss: 7\n")
    assert [source.kind for source in Reader(tmp_path).sources()] == ["jsonl", "stdout"]


@pytest.mark.parametrize(
    ("wanted", "printed", "metric"),
    [
        ("eval_accuracy", "eval/accuracy", "eval_accuracy"),
        ("eval/accuracy", "eval_accuracy", "eval/accuracy"),
        ("eval accuracy", "eval_accuracy", "eval accuracy"),
        ("val.loss", "val/loss", "val.loss"),
        ("eval_accuracy", "eval-accuracy", "eval-accuracy"),
        ("eval_accuracy", "Eval_accuracy", "Eval_accuracy"),
    ],
)
def test_a_name_that_differs_only_in_separators_is_the_wanted_one(
    tmp_path: Path, wanted: str, printed: str, metric: str
) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, printed: 0.5, "loss": 2.0}) + "\n")
    assert set(Reader(tmp_path, wanted=[wanted]).poll()) == {metric, "loss"}


def test_of_two_names_that_differ_in_separators_none_is_the_wanted_one(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "eval/loss": 1, "eval.loss": 2}\n')
    assert set(Reader(tmp_path, wanted=["eval_loss"]).poll()) == {"eval/loss", "eval.loss"}


def test_the_exact_name_wins_over_one_with_other_separators(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "eval/loss": 1, "eval_loss": 2}\n')
    for wanted in (["eval_loss"], ["eval_loss", "eval/loss"]):
        batch = Reader(tmp_path, wanted=wanted).poll()
        assert {name: curve.values for name, curve in batch.items()} == {"eval/loss": [1], "eval_loss": [2]}


def test_a_hidden_metric_is_hidden_under_any_separators(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "test/acc": 1, "test.acc": 2, "val/acc": 3}\n')
    assert set(Reader(tmp_path, hidden=["test_acc"], wanted=["test_acc"]).poll()) == {"val/acc"}


@pytest.mark.parametrize("line", ["score_threshold: 0.5", "peak_memory: 0.5", "batch_size: 3 score_threshold: 0.5"])
def test_a_wanted_name_is_a_metric_whatever_its_words_tell(tmp_path: Path, line: str) -> None:
    (tmp_path / "train.log").write_text(f"{line}\nhello\n")
    wanted = {"score_threshold", "peak_memory"}
    assert {name for name in Reader(tmp_path, wanted=wanted).poll(final=True) if name in wanted}
    assert not Reader(tmp_path).poll(final=True)


def test_a_name_stays_the_wanted_one_when_another_candidate_appears(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "eval/loss": 1}\n')
    reader = Reader(tmp_path, wanted=["eval_loss"])
    assert set(reader.poll()) == {"eval_loss"}
    with path.open("a") as file:
        file.write('{"step": 2, "eval/loss": 2, "eval.loss": 3}\n')
    assert {name: curve.values for name, curve in reader.poll().items()} == {"eval_loss": [2], "eval.loss": [3]}


def test_the_objective_of_a_study_is_found_under_other_separators(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "eval/accuracy": 0.5}\n')
    study = StudyConfig.model_validate(
        {
            "study": "s",
            "base": "b.yaml",
            "launch": {"command": ["x"]},
            "objective": {"metric": "eval_accuracy", "goal": "max"},
        }
    )
    assert set(reader_of(study, tmp_path).poll()) == {"eval_accuracy"}


def test_links_to_what_the_trainer_reads_are_not_its_metrics(tmp_path: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    data.mkdir(), run.mkdir()
    (data / "results.csv").write_text("step,price\n1,5\n")
    (run / "results.csv").symlink_to(data / "results.csv")
    (run / "data").symlink_to(data, target_is_directory=True)
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    assert "price" in Reader(run).poll()
    assert set(Reader(run, inputs=["results.csv", "./data"]).poll()) == {"loss"}


@pytest.mark.parametrize("name", ["log.jsonl", "train_log.jsonl", "history.ndjson", "metrics.jsonl"])
def test_rows_of_json_have_several_usual_names(tmp_path: Path, name: str) -> None:
    path = tmp_path / "results" / name
    path.parent.mkdir()
    path.write_text('{"epoch": 1, "valid": {"ndcg": 0.25}}\n{"epoch": 2, "valid": {"ndcg": 0.5}}\n')
    assert Reader(tmp_path).poll()["valid/ndcg"] == Curve([1, 2], [0.25, 0.5])


def test_rows_of_examples_are_not_metrics(tmp_path: Path) -> None:
    (tmp_path / "predictions.jsonl").write_text('{"id": 1, "score": 0.5}\n')
    assert Reader(tmp_path).poll() == {}


def test_a_name_with_a_power_is_found_as_it_is_printed(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("epoch 1 | test R^2 0.25\nepoch 2 | test R^2 0.5\n")
    assert Reader(tmp_path, wanted={"test R^2"}).poll(True) == {"test R^2": Curve([1, 2], [0.25, 0.5])}


def test_a_table_with_splits_is_not_of_the_split_that_its_folder_is_named_after(tmp_path: Path) -> None:
    put(tmp_path / "runs/detect/train/results.csv", "epoch,train/loss,val/loss,metrics/mAP50\n1,0.5,0.6,0.7\n")
    assert set(points(Reader(tmp_path).poll())) == {"train/loss", "val/loss", "metrics/mAP50"}
    put(tmp_path / "other/runs/train/results.csv", "epoch,loss\n1,0.5\n")
    assert set(points(Reader(tmp_path / "other").poll())) == {"train/loss"}


def test_folders_that_are_named_after_the_time_are_no_part_of_names(tmp_path: Path) -> None:
    put(tmp_path / "runs/log.jsonl", {"step": 1, "Loss/val": 0.5})
    put(tmp_path / "runs/1795119548.2257524/log.jsonl", {"step": 1, "hparam/val": 0.4})
    assert set(points(Reader(tmp_path).poll())) == {"Loss/val", "hparam/val"}


def test_the_monitors_of_several_environments_are_read(tmp_path: Path) -> None:
    for name in ("monitor.csv", "0.monitor.csv", "1.monitor.csv"):
        put(tmp_path / name / "logs" / name, '#{"t_start": 1.5, "env_id": "CartPole-v1"}\nr,l,t\n21.0,21,0.5\n')
        assert points(Reader(tmp_path / name).poll())["r"] == [(0, 21.0)]


def test_printed_evaluations_are_read_beside_monitors(tmp_path: Path) -> None:
    put(tmp_path / "logs/0.monitor.csv", '#{"t_start": 1.5, "env_id": "CartPole-v1"}\nr,l,t\n21.0,21,0.5\n')
    put(tmp_path / "train.log", "step 10 eval_reward 3.5\nstep 20 eval_reward 4.5\n")
    assert set(points(Reader(tmp_path).poll())) == {"r", "l", "t", "eval_reward"}
