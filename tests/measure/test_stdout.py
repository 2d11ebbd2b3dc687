from __future__ import annotations

from math import inf, isnan
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looplab.errors import LabError
from looplab.measure import stdout
from looplab.measure.base import merge
from looplab.measure.printed import read_line
from looplab.measure.splits import has_split
from looplab.measure.stdout import LAST_LINE, StdoutSource
from looplab.measure.tables import Tables

Points = dict[str, list[tuple[float, float]]]


def read(tmp_path: Path, text: str, *patterns: str, final: bool = False) -> Points:
    path = tmp_path / "train.log"
    path.write_bytes(text.encode())
    batch = StdoutSource(path, patterns).poll(final)
    return {name: list(zip(curve.steps, curve.values, strict=True)) for name, curve in batch.items()}


@pytest.mark.parametrize(
    ("line", "step", "metrics"),
    [
        ("step: 100 loss: 0.31 acc=0.9", 100, {"loss": 0.31, "acc": 0.9}),
        ("Epoch 3/10 - loss: 0.31 - val_loss: 4e-1", 3, {"loss": 0.31, "val_loss": 0.4}),
        ("Epoch [5/10] Step [10/100] Loss: 0.3", 10, {"Loss": 0.3}),
        ("step:1K loss:0.2 tokens=1.2M", 1000, {"loss": 0.2, "tokens": 1.2e6}),
        ("iter 20 | train/loss = -1.5e-3 | lr = 1e-3", 20, {"train/loss": -1.5e-3, "lr": 1e-3}),
        ("\x1b[32mstep: 7\x1b[0m \x1b[1macc:\x1b[0m 91.5%", 7, {"acc": 91.5}),
        ("{'loss': 0.31, 'learning_rate': 5e-05, 'epoch': 1.5}", 1.5, {"loss": 0.31, "learning_rate": 5e-5}),
        ('{"step": 4, "loss": 0.5}', 4, {"loss": 0.5}),
        (
            "step:100/1750 val_loss:3.25 train_time:100ms step_avg:57.5ms",
            100,
            {"val_loss": 3.25, "train_time": 100, "step_avg": 57.5},
        ),
        ("step=5, train loss: 0.4, val loss: 0.5", 5, {"train_loss": 0.4, "val_loss": 0.5}),
        ("step 5: tokens: 1,234,567", 5, {"tokens": 1234567}),
        (" 45%|████▌     | 45/100 [00:10<00:12,  4.50it/s, loss=0.31, acc=0.9]", 45, {"loss": 0.31, "acc": 0.9}),
        ("2025-01-01 10:00:00,123 - INFO - step: 3 loss: 2", 3, {"loss": 2}),
        ("[2025-01-01T10:00:00Z] INFO: loss: 2 global_step: 3", 3, {"loss": 2}),
        ("INFO:trainer:loss: 0.5 step=200", 200, {"loss": 0.5}),
        ("I1103 10:00:00.123456 140 train.py:42] step: 9 loss: 1", 9, {"loss": 1}),
        ("mAP@0.5: 0.61 step: 2", 2, {"mAP@0.5": 0.61}),
        ("success_rate : .25 step: 2", 2, {"success_rate": 0.25}),
        ("epoch    10 | loss 6.6        |  12.5% accuracy", 10, {"loss": 6.6, "accuracy": 12.5}),
        ("Epoch 2, 88.5% val accuracy, loss 0.3", 2, {"val_accuracy": 88.5, "loss": 0.3}),
    ],
)
def test_lines_as_trainers_print_them(tmp_path: Path, line: str, step: float, metrics: dict[str, float]) -> None:
    assert read(tmp_path, line + "\n") == {name: [(step, value)] for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("line", "metrics"),
    [
        ("Evaluation over 10 episodes: 35.1", {"Evaluation": 35.1}),
        ("Average reward over the last 100 episodes: 12.3", {"reward": 12.3}),
        ("Mean return over 20 eval episodes = 195.2 +/- 3.1", {"eval_return": 195.2}),
        ("Accuracy of the model: 0.93", {"Accuracy": 0.93}),
        ("The final validation score of the model was 0.87", {"validation_score": 0.87}),
        ("INFO - boost - Result: 0.89\nINFO - boost - Completed after 0:00:03", {"Result": 0.89}),
        (" Average Precision  (AP) @[ IoU=0.50:0.95 | area=   all | maxDets=100 ] = 0.383", {"AP": 0.383}),
        (" Average Precision  (AP) @[ IoU=0.50      | area=   all | maxDets=100 ] = 0.592", {"AP50": 0.592}),
        (" Average Precision  (AP) @[ IoU=0.50:0.95 | area= small | maxDets=100 ] = -1.000", {"AP_small": -1.0}),
        (" Average Recall     (AR) @[ IoU=0.50:0.95 | area=   all | maxDets= 10 ] = 0.51", {"AR_10": 0.51}),
    ],
)
def test_sentences_with_results(tmp_path: Path, line: str, metrics: dict[str, float]) -> None:
    assert read(tmp_path, line + "\n", final=True) == {name: [(0, value)] for name, value in metrics.items()}


@pytest.mark.parametrize(
    "line",
    [
        "2025-01-01 10:00:00 INFO: starting",
        "10:00:00 started at: 10:00:00",
        "date: 2025-01-01",
        "ERROR: 3 files are missing",
        "RuntimeError: 3 is not a size",
        'File "train.py", line 12, in main',
        "train.py:123 loading",
        "device: cuda:0",
        "listening on localhost:8080, port: 8080",
        "see http://host:80/",
        "version: 1.2.3",
        "shape: 3x4, sizes=[1, 2]",
        "batch: 3/10",
        "weights: None",
        "time per step: 0.3",
        "eta: 12 elapsed: 3",
        "betas=1,2,3",
        "saved to out/run=final",
        "",
    ],
)
def test_what_is_not_a_metric(tmp_path: Path, line: str) -> None:
    assert read(tmp_path, line + "\n") == {}


def test_a_line_without_a_step_uses_the_last_one_seen(tmp_path: Path) -> None:
    assert read(tmp_path, "step: 50 loss: 1\nval_bpb: 0.99\n")["val_bpb"] == [(50, 0.99)]


def test_without_any_step_the_lines_with_metrics_are_counted(tmp_path: Path) -> None:
    assert read(tmp_path, "loss: 3\nhello\nloss: 2\n") == {"loss": [(0, 3.0), (1, 2.0)]}


def test_keras_prints_the_epoch_on_a_line_of_its_own(tmp_path: Path) -> None:
    text = "Epoch 1/2\n10/10 [====] - 1s 2ms/step - loss: 0.5 - acc: 0.1\nEpoch 2/2\n10/10 [====] - loss: 0.4\n"
    assert read(tmp_path, text) == {"loss": [(1, 0.5), (2, 0.4)], "acc": [(1, 0.1)]}


def test_an_epoch_next_to_a_step_is_a_metric(tmp_path: Path) -> None:
    found = read(tmp_path, "step: 10 epoch: 1 loss: 3\nepoch: 2 loss: 2\nEpoch 3 loss: 1\n")
    assert found == {"loss": [(10, 3.0), (10, 2.0), (10, 1.0)], "epoch": [(10, 1.0), (10, 2.0)]}


def test_carriage_returns_separate(tmp_path: Path) -> None:
    assert read(tmp_path, "step: 1 loss: 3\rstep: 2 loss: 2\rstep: 3 loss: 1\r\n") == {
        "loss": [(1, 3.0), (2, 2.0), (3, 1.0)]
    }


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    found = read(tmp_path, "step: 1 a: nan b=inf c: -inf\n")
    assert isnan(found["a"][0][1])
    assert found["b"] == [(1, inf)]
    assert found["c"] == [(1, -inf)]


def test_a_last_line_without_its_end_counts_only_if_the_writer_ended(tmp_path: Path) -> None:
    assert read(tmp_path, "val_bpb: 0.99") == {}
    assert read(tmp_path, "val_bpb: 0.99", final=True) == {"val_bpb": [(0, 0.99)]}


def test_the_users_pattern_says_what_is_in_a_line(tmp_path: Path) -> None:
    found = read(tmp_path, "it 5 of 9, L 0.25 x: 1\nacc: 0.5\n", r"it (?P<step>\d+) .* L (?P<loss>\S+)")
    assert found == {"loss": [(5, 0.25)], "acc": [(5, 0.5)]}


def test_a_pattern_may_match_several_times_and_find_no_number(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "step 100 loss 0.5, step 200 loss 1.5K; step 300 loss none\n",
        r"step (?P<step>\d+) loss (?P<loss>[^;,]+)",
    )
    assert [value for _, value in found["loss"]] == [0.5, 1500.0]


@pytest.mark.parametrize("pattern", ["(?P<loss>", r"loss (\d+)"])
def test_a_bad_pattern_is_an_error(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(LabError, match="pattern"):
        StdoutSource(tmp_path / "train.log", [pattern])


@pytest.mark.parametrize(
    ("text", "metrics"),
    [
        ("Epoch 1 | Train Loss: 0.30 | Val Loss: 0.51", {"Train_Loss": 0.3, "Val_Loss": 0.51}),
        ("Epoch 1: Training loss: 0.3, Validation loss: 0.5", {"Training_loss": 0.3, "Validation_loss": 0.5}),
        ("Train Acc: 0.9 Test Acc: 0.8", {"Train_Acc": 0.9, "Test_Acc": 0.8}),
        ("TRAIN LOSS=0.3  DEV LOSS=0.5", {"TRAIN_LOSS": 0.3, "DEV_LOSS": 0.5}),
        ("trn loss: 0.3 held-out loss: 0.5", {"trn_loss": 0.3, "held-out_loss": 0.5}),
        ("\t Val. Loss: 0.4 |  Val. Acc: 80%", {"Val_Loss": 0.4, "Val_Acc": 80.0}),
        # LightGBM, CatBoost, XGBoost
        ("[10]\ttraining's auc: 0.99\tvalid_0's auc: 0.75", {"training_auc": 0.99, "valid_0_auc": 0.75}),
        ("[10]\tvalid_0's auc: 0.7\tvalid_1's auc: 0.6", {"valid_0_auc": 0.7, "valid_1_auc": 0.6}),
        ("[10]\tcats's auc: 0.7\tdogs's auc: 0.6", {"cats_auc": 0.7, "dogs_auc": 0.6}),
        (
            "100:\tlearn: 0.32\ttest: 0.4\tbest: 0.4 (99)\ttotal: 58ms",
            {"learn": 0.32, "test": 0.4, "best": 0.4, "total": 58.0},
        ),
        ("[10]\teval-logloss:0.3\ttrain-logloss:0.2", {"eval-logloss": 0.3, "train-logloss": 0.2}),
        # a split word counts for all values after it
        ("train Loss: 0.6 Acc: 0.7", {"train_Loss": 0.6, "train_Acc": 0.7}),
        ("Test set: Average loss: 0.0106, Accuracy: 99.2%", {"Test_loss": 0.0106, "Test_Accuracy": 99.2}),
        ("Validation: loss=0.3 acc=0.8", {"Validation_loss": 0.3, "Validation_acc": 0.8}),
        ("[val] loss: 0.3 | acc: 0.8", {"val_loss": 0.3, "val_acc": 0.8}),
        ("[val] loss 0.3", {"val_loss": 0.3}),
        ("train: loss 0.5 | val: loss 0.6", {"train_loss": 0.5, "val_loss": 0.6}),
        ("Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.3", {"Train_Loss": 2.3}),
        ("Train: 10/100 loss: 2.3", {"Train_loss": 2.3}),
        ("Val: 10 loss: 2.3 foo: 3", {"Val": 10, "Val_loss": 2.3, "foo": 3}),
        ("train/loss 0.3 val/loss 0.5 foo 0.6", {"train/loss": 0.3, "val/loss": 0.5}),
        ("Validation DataLoader 0: 100%|###| 5/5 [00:10<00:12, loss=0.3]", {"Validation_loss": 0.3}),
        ("Training:  45%|####    | 45/100 [00:10<00:12, 4.50it/s, loss=0.3]", {"Training_loss": 0.3}),
        ("{'train': {'loss': 0.3, 'acc': 0.9}, 'val': {'loss': 0.5, 'acc': 0.8}}",
         {"train_loss": 0.3, "train_acc": 0.9, "val_loss": 0.5, "val_acc": 0.8}),
        ("train_metrics: loss=0.3; EvalMetrics(loss=0.5)", {"train_loss": 0.3, "Eval_loss": 0.5}),
        ('{"loss": 0.5, "split": "val"}', {"val_loss": 0.5}),
        ("loss: 0.5 acc: 0.8 (val)", {"val_loss": 0.5, "val_acc": 0.8}),
        ("loss: 0.5 step: 3 (val)", {"val_loss": 0.5}),
        ("loss: 0.3 (train), loss: 0.5 (val), step: 3", {"train_loss": 0.3, "val_loss": 0.5}),
        ("loss: 0.3 [train] loss: 0.5 [val]", {"train_loss": 0.3, "val_loss": 0.5}),
        ("lr: 0.1 [val] loss: 0.5 [test] loss: 0.4", {"lr": 0.1, "val_loss": 0.5, "test_loss": 0.4}),
        ("Train/Val Loss: 0.3 / 0.5", {"Train_Val_Loss": 0.3}),
        # behind the metric
        ("loss train: 0.3, loss val: 0.5", {"loss_train": 0.3, "loss_val": 0.5}),
        ("Loss (train): 0.3  Loss (val): 0.5", {"Loss_train": 0.3, "Loss_val": 0.5}),
        ("Accuracy on the test set: 0.8, loss on val set: 0.5", {"Accuracy_test": 0.8, "loss_val": 0.5}),
        ("Epoch: 1/5 Train steps: 25 Val steps: 7 0.4s loss: 0.3 val_loss: 0.5", {"loss": 0.3, "val_loss": 0.5}),
        ("Train step: 10 loss: 0.3 | Val step: 10 loss: 0.5", {"Train_loss": 0.3, "Val_loss": 0.5}),
        # what belongs to no split
        ("train loss: 0.4, val loss: 0.5, lr: 1e-3", {"train_loss": 0.4, "val_loss": 0.5, "lr": 1e-3}),
        ("loss: 0.5 - acc: 0.1 - val_loss: 0.4 - val_acc: 0.2", {"loss": 0.5, "acc": 0.1, "val_loss": 0.4, "val_acc": 0.2}),
        ("val_loss: 0.4, loss: 0.5", {"val_loss": 0.4, "loss": 0.5}),
        ("train_gpt.py:42] loss: 0.5", {"loss": 0.5}),
        ("INFO:trainer:loss: 0.5", {"loss": 0.5}),
        ("contest: 3 devices: 4 loss: 0.5", {"contest": 3, "devices": 4, "loss": 0.5}),
    ],
)  # fmt: skip
def test_values_of_different_splits_are_different_metrics(tmp_path: Path, text: str, metrics: dict[str, float]) -> None:
    found = read(tmp_path, text + "\n")
    assert {name: [value for _, value in points] for name, points in found.items()} == {
        name: [value] for name, value in metrics.items()
    }


@pytest.mark.parametrize(
    ("line", "metrics"),
    [
        ("avg loss: 0.3 max loss: 0.9", {"avg_loss": [0.3], "max_loss": [0.9]}),
        ("Train avg loss: 0.3 max loss: 0.9", {"Train_avg_loss": [0.3], "Train_max_loss": [0.9]}),
        ("cats: loss=0.3 | dogs: loss=0.5", {"cats_loss": [0.3], "dogs_loss": [0.5]}),
        ("[cats] loss: 0.3 [dogs] loss: 0.5", {"cats_loss": [0.3], "dogs_loss": [0.5]}),
        ("Fold 1 loss: 0.3 Fold 2 loss: 0.5", {"Fold_1_loss": [0.3], "Fold_2_loss": [0.5]}),
        ("Epoch 7 loss: 0.3 total loss: 0.5", {"loss": [0.3], "total_loss": [0.5]}),
        ("train_loss: 1 acc: 2 val_loss: 3 acc: 4", {"train_loss": [1], "train_acc": [2], "val_loss": [3], "val_acc": [4]}),
        ("val loss: 0.5 loss: 0.3", {"val_loss": [0.5], "val_loss_2": [0.3]}),
        ("loss: 3 loss: 2", {"loss": [3, 2]}),
    ],
)  # fmt: skip
def test_one_name_with_different_words_before_it_is_several_metrics(
    tmp_path: Path, line: str, metrics: dict[str, list[float]]
) -> None:
    found = read(tmp_path, line + "\n")
    assert {name: [value for _, value in points] for name, points in found.items()} == metrics


def test_two_lines_of_two_splits_are_two_curves(tmp_path: Path) -> None:
    text = "Epoch 1\nTrain: loss 0.3 acc: 0.9\nVal: loss 0.5 acc: 0.8\nEpoch 2\nTrain: loss 0.2\nVal: loss 0.4\n"
    assert read(tmp_path, text) == {
        "Train_loss": [(1, 0.3), (2, 0.2)],
        "Train_acc": [(1, 0.9)],
        "Val_loss": [(1, 0.5), (2, 0.4)],
        "Val_acc": [(1, 0.8)],
    }


def test_a_heading_counts_for_the_lines_below_it(tmp_path: Path) -> None:
    text = (
        "Epoch 1\n-----\nloss: 2.3  [   64/60000]\nTest Error: \n Accuracy: 44.7%, Avg loss: 2.1 \n\n"
        "Epoch 2\n-----\nloss: 2.0  [   64/60000]\nTest Error: \n Accuracy: 50%, Avg loss: 1.9 \n\nloss: 1.8\n"
        "=== Validation ===\nloss: 1.7\nstep: 3 loss: 1.6\n"
    )
    assert read(tmp_path, text) == {
        "loss": [(1, 2.3), (2, 2.0), (2, 1.8), (3, 1.6)],
        "Test_Accuracy": [(1, 44.7), (2, 50.0)],
        "Test_loss": [(1, 2.1), (2, 1.9)],
        "Validation_loss": [(2, 1.7)],
    }


def test_under_a_heading_a_name_with_its_own_split_is_kept(tmp_path: Path) -> None:
    text = "***** eval metrics *****\n  epoch = 2.0\n  eval_loss = 0.5\n  runtime = 3s\n  lr = 0.1\n"
    assert read(tmp_path, text) == {"eval_loss": [(2, 0.5)], "eval_runtime": [(2, 3.0)], "lr": [(2, 0.1)]}


@pytest.mark.parametrize(
    ("train", "heading"),
    [
        ("loss: 0.3", "Evaluating..."),
        ("loss: 0.3", "[Validation]"),
        ("Training\nloss: 0.3", "Validation"),
        ("[Training]\nloss: 0.3", "--- Running validation"),
        ("Epoch 1/2\nloss: 0.3", "Start evaluation on the dev set"),
    ],
)
def test_a_word_of_its_own_is_a_heading(tmp_path: Path, train: str, heading: str) -> None:
    found = read(tmp_path, f"{train}\n{heading}\nloss: 0.5\nacc: 0.8\nloss: 0.2\nloss: 0.1\n")
    assert [value for _, value in found.pop("loss")] == [0.3, 0.2, 0.1]
    assert sorted(values[0][1] for values in found.values()) == [0.5, 0.8]
    assert all(has_split(name) for name in found)


def test_a_sentence_about_a_split_is_not_a_heading(tmp_path: Path) -> None:
    assert list(read(tmp_path, "Loading validation data\nloss: 0.3\nWrote eval results to disk\nloss: 0.2\n")) == [
        "loss"
    ]


def test_a_split_that_is_switched_off_is_another_one(tmp_path: Path) -> None:
    text = "is_training=True loss=0.3\nis_training=False loss=0.5\n{'train': false, 'loss': 0.6}\n"
    found = read(tmp_path, text)
    assert {name: [value for _, value in values] for name, values in found.items()} == {
        "training_loss": [0.3],
        "not_training_loss": [0.5],
        "not_train_loss": [0.6],
    }


SPLIT_WORDS = {
    "train": ["train", "training", "trn", "tr"],
    "val": ["val", "valid", "validation", "eval", "evaluation", "dev", "valid_0"],
    "test": ["test", "testing", "holdout", "hold-out", "held_out"],
}
SEPARATE = [
    "{split} {metric}: {value}", "{split}  {metric} = {value}", "{split}'s {metric}: {value}", "{split}: {metric}={value}",
    "[{split}] {metric}: {value}", "{split} set: {metric}: {value}", "{split}: {metric} {value}", "{split} - {metric}: {value}",
    "{{'{split}': {{'{metric}': {value}}}}}", "{metric} on {split} set: {value}", "{split} set: Average {metric}: {value}",
    "{split} best {metric}: {value}", "{split} Epoch: 7 {metric}: {value}", "{split}: 7/9 {metric}: {value}",
]  # fmt: skip
"""A split word of its own: what follows belongs to it."""
WITHIN = [
    "{split}_{metric}: {value}", "{split}-{metric}={value}", "{split}/{metric}: {value}", "{split}.{metric}={value}",
    "{metric}_{split}: {value}", "{metric}/{split} = {value}", "{metric} ({split}): {value}", "{metric} {split}: {value}",
    "{metric}: {value} ({split})",
]  # fmt: skip
"""A split word that belongs to one value: what follows may be of any split, and is not generated here."""
METRICS = ["loss", "acc", "accuracy", "auc", "F1", "error", "quux"]


@st.composite
def printed_lines(draw: st.DrawFn) -> list[tuple[str, dict[float, str]]]:
    """Lines with the split of each of their values; whole numbers tell the values apart."""
    recased = st.sampled_from([str, str.lower, str.upper, str.capitalize, str.title])
    number = 0
    lines = []
    for _ in range(draw(st.integers(1, 4))):
        parts, owners = [draw(st.sampled_from(["", "Epoch 3 ", "Epoch 3: ", "[12] ", "INFO: ", "step=4, "]))], {}
        joint = draw(st.sampled_from([" ", ", ", " | ", "; ", " - ", "\t"]))
        for _ in range(draw(st.integers(1, 3))):
            split = draw(st.sampled_from(sorted(SPLIT_WORDS)))
            word = draw(recased)(draw(st.sampled_from(SPLIT_WORDS[split])))
            form = draw(st.sampled_from(SEPARATE + WITHIN))
            metrics = draw(st.lists(st.sampled_from(METRICS), min_size=1, max_size=2))
            for place, name in enumerate(map(draw(recased), metrics)):
                number += 1
                value = number + 0.5
                owners[value] = split
                alone = place > 0 and form in SEPARATE
                parts.append(f"{name}: {value}" if alone else form.format(split=word, metric=name, value=value))
        lines.append((parts[0] + joint.join(parts[1:]), owners))
    return lines


@settings(max_examples=200, deadline=None)
@given(lines=printed_lines(), cuts=st.lists(st.integers(0, 1 << 20), max_size=4))
def test_no_curve_ever_holds_values_of_two_splits(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[str, dict[float, str]]], cuts: list[int]
) -> None:
    path = tmp_path_factory.getbasetemp() / "property.log"
    data = "".join(line + "\n" for line, _ in lines).encode()
    owners = {value: split for _, of_line in lines for value, split in of_line.items()}
    path.write_bytes(data)
    whole = StdoutSource(path).poll()
    for name, curve in whole.items():
        assert len({owners[value] for value in curve.values if value in owners}) <= 1, (name, curve.values)
    path.write_bytes(b"")
    source, parts, before = StdoutSource(path), {}, 0
    for cut in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
        with path.open("ab") as file:
            file.write(data[before:cut])
        before = cut
        merge(parts, source.poll())
    assert parts == whole


@pytest.mark.parametrize(
    "line",
    [
        "9" * 8000,
        "loss: " + "9" * 8000,
        "loss: " + "9" * 8000 + "x",
        "step" + " " * 3000,
        "step" + " " * 3000 + "x",
        "loss" + " " * 3000 + "x",
        "train " * 700,
        "Validation:" + " " * 3000 + ":",
        "loss on " * 500,
        "a" * 4000 + " val",
        "train/" * 700 + "x",
        "|" + " " * 3000 + "|" * 1000,
        "loss: 3" + " " * 3000 + "/",
        "\x1b[" * 2000,
        "loss 1" + "," * 4000,
    ],
    ids=lambda line: f"{line[:12]!r}…{len(line)}",
)
def test_a_strange_line_is_read_in_no_time(tmp_path: Path, line: str) -> None:
    """Under the time limit of every test; a pattern that tries all ways to part 3,000 spaces would take hours."""
    for _ in range(20):
        read(tmp_path, line + "\n")


def test_a_line_is_read_up_to_a_limit_and_never_half_a_number(tmp_path: Path) -> None:
    pairs = [f"loss{number}: {number}.25," for number in range(1000)]
    line = " ".join(pairs)
    assert len(line) > stdout.MAX_LINE
    found = read(tmp_path, line + "\nloss: 1\n")
    assert found.pop("loss") == [(1, 1.0)]
    assert found == {f"loss{number}": [(0, number + 0.25)] for number in range(len(found))}
    assert 200 < len(found) < 1000


@pytest.mark.parametrize("cut", range(1, 14))
def test_a_number_that_the_limit_cuts_through_is_left_out(tmp_path: Path, cut: int) -> None:
    head = "acc: 1 tokens: "
    line = head.rjust(stdout.MAX_LINE - cut) + "1,234,567.25 loss: 2"
    assert read(tmp_path, line + "\n") == {"acc": [(0, 1.0)]} | ({"tokens": [(0, 1234567.25)]} if cut > 12 else {})


def test_a_name_that_may_be_a_setting_counts_once_it_has_two_values(tmp_path: Path) -> None:
    assert read(tmp_path, "alpha: 0.1\ngold: 3\ngold: 4\nalpha: 0.1\nbye\n") == {"gold": [(1, 3.0), (2, 4.0)]}
    assert read(tmp_path, "alpha: 0.1\nstep 1 loss: 2\nalpha: 0.3\n") == {"loss": [(1, 2.0)], "alpha": [(1, 0.3)]}


def test_the_last_line_counts_if_the_writer_ended_and_nothing_else_did(tmp_path: Path) -> None:
    assert read(tmp_path, "alpha: 0.1\ngold: 3\n", final=True) == {"gold": [(1, 3.0)]}
    assert read(tmp_path, "alpha: 0.1\ngold: 3\n") == {}


def test_a_setting_that_looks_like_a_step_gives_way_to_a_step_with_metrics(tmp_path: Path) -> None:
    assert read(tmp_path, "step: 500\nepoch 1 loss: 3\nepoch 2 loss: 2\n") == {"loss": [(1, 3.0), (2, 2.0)]}


@pytest.mark.parametrize(
    ("lines", "steps"),
    [
        (["Epoch [1/5], Step [600/600]", "Epoch [2/5], Step [100/600]", "Epoch [3/5], Step [1/600]"], [600, 700, 1201]),
        (["Epoch 1 step 600/3000", "Epoch 2 step 1200/3000", "Epoch 3 step 1800/3000"], [600, 1200, 1800]),
        (["Epoch: [0][10/391]", "Epoch: [1][10/391]", "Epoch: [0][20/391]"], [10, 401, 20]),
        (["epoch: 1 step: 7", "epoch: 2 step: 3", "epoch: 2 step: 7", "epoch: 3 step: 3"], [7, 10, 14, 17]),
        (["Epoch 2:  50%|#####     | 5/10 [00:01<00:01,"], [15]),
    ],
)
def test_steps_grow_over_the_epochs(tmp_path: Path, lines: list[str], steps: list[float]) -> None:
    found = read(tmp_path, "".join(f"{line} loss: 1\n" for line in lines))
    assert [step for step, _ in found["loss"]] == steps


def test_names_that_may_be_settings_are_held_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdout, "MAX_HELD", 2)
    assert set(read(tmp_path, "a: 1\nb: 1\nc: 1\na: 2\nc: 2\n")) == {"a"}


def test_text_behind_a_table_of_bars_is_read(tmp_path: Path) -> None:
    table = "┃ epoch ┃ train RMSE ┃ valid RMSE ┃\n│ 1     │ 0.9832     │ 0.9310     │\n"
    found = read(tmp_path, f"{table}Validation RMSE: 0.8912  MAE: 0.7083\nSaved to model.npz\n")
    assert found["valid_RMSE"] == [(1.0, 0.931)]
    assert [value for _, value in found["Validation_RMSE"]] == [0.8912]


FRAGMENTS = st.sampled_from(
    [
        *(
            "│",
            "┃",
            "|",
            "─",
            "━",
            "+",
            "-",
            ":",
            "=",
            "/",
            "%",
            "#",
            ",",
            "{",
            "}",
            "[",
            "]",
            "'",
            '"',
            "  ",
            "\t",
            " ",
        ),
        *("epoch", "step", "loss", "val", "train", "RMSE", "acc", "rollout/", "all", "E", "it/s", "1", "0.5", "1e-3"),
        *("nan", "3/10", "50%|###", "12k", "a", "é", "值"),
    ]
)


@given(st.lists(st.lists(FRAGMENTS, max_size=9).map("".join), max_size=12))
def test_no_sequence_of_lines_is_an_error(lines: list[str]) -> None:
    tables = Tables()
    for line in lines:
        tables.read(line)
        read_line(line)
    tables.finish()


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("Mean squared error: 0.5", "squared_error"),
        ("Test error: 0.5", "Test_error"),
        ("The mean squared error (MSE) on test set: 0.5", "MSE_test"),
        ("accuracy on test data: 0.5", "accuracy_test"),
        ("RMSE on validation data = 0.5", "RMSE_validation"),
        ("Balanced accuracy (test set): 0.5", "Balanced_accuracy_test"),
    ],
)
def test_results_in_words(tmp_path: Path, line: str, name: str) -> None:
    assert read(tmp_path, line + "\n") == {name: [(0, 0.5)]}


@pytest.mark.parametrize("line", ["error: 3.5", "Connection error: 3.5", "data: 3.5", "loaded test data: 3.5"])
def test_a_message_is_not_a_result(tmp_path: Path, line: str) -> None:
    assert read(tmp_path, line + "\n") == {}


def test_a_report_by_class_has_its_totals_whatever_the_classes_are_called(tmp_path: Path) -> None:
    for one, other in (("0", "1"), ("setosa", "iris b")):
        text = f"""
              precision    recall  f1-score   support

{one:>12}       1.00      0.99      0.98        88
{other:>12}       0.97      0.96      0.95        91

    accuracy                           0.94       179
   macro avg       0.93      0.92      0.91       179
weighted avg       0.90      0.89      0.88       179
"""
        found = {name: points[0][1] for name, points in read(tmp_path, text).items()}
        assert found["accuracy"] == 0.94
        assert found["macro_avg/f1-score"] == 0.91
        assert found["weighted_avg/recall"] == 0.89
        assert found[f"{one}/recall"] == 0.99
        assert not any("support" in name for name in found)


def test_a_frame_with_an_index_is_a_table(tmp_path: Path) -> None:
    found = read(tmp_path, "   accuracy  loss\n0      0.90  0.12\n1      0.91  0.10\n")
    assert {name: [value for _, value in points] for name, points in found.items()} == {
        "accuracy": [0.9, 0.91],
        "loss": [0.12, 0.1],
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.8731\n", 0.8731),
        ("fitting 3 models\n0.91\n\n 0.8731", 0.8731),
        ("alpha=0.5\n87.3 %\n", 87.3),
        ("0.8731\ndone\n", None),
        ("accuracy: 0.9\n0.8731\n", None),
        ("0.8731 0.9\n", None),
    ],
)
def test_a_number_alone_at_the_end_is_a_metric_if_there_is_no_other(
    tmp_path: Path, text: str, value: float | None
) -> None:
    assert LAST_LINE not in read(tmp_path, text)  # not before the end
    found = read(tmp_path, text, final=True)
    assert found.get(LAST_LINE) == (None if value is None else [(0, value)])
    path = tmp_path / "train.log"
    wanted = StdoutSource(path, wanted=[LAST_LINE]).poll(final=True)
    assert (LAST_LINE in wanted) == (value is not None or text.startswith("accuracy"))


def test_a_name_and_a_number_on_a_line_of_their_own_are_a_metric_once_they_change(tmp_path: Path) -> None:
    lines = [f"-- Generation {i} --\n  Evaluated 180 individuals\n  Torch 2.1\n  Max {i}.5\n" for i in (1, 2)]
    assert read(tmp_path, "".join(lines)) == {"Max": [(1, 1.5), (2, 2.5)]}


def test_rows_of_bare_numbers_whose_first_column_counts_are_curves(tmp_path: Path) -> None:
    assert read(tmp_path, "0 0.9\n1 0.8\n2 0.7\n3 0.65\n") == {
        "column_2": [(0.0, 0.9), (1.0, 0.8), (2.0, 0.7), (3.0, 0.65)]
    }
    table = "# iter, energy, grad\n0, 1.5, 9\n10, 1.2, 8\n20, 1.1, 7\ndone\n"
    assert read(tmp_path, table) == {
        "energy": [(0.0, 1.5), (10.0, 1.2), (20.0, 1.1)],
        "grad": [(0.0, 9.0), (10.0, 8.0), (20.0, 7.0)],
    }


@pytest.mark.parametrize(
    "text",
    ["50 0 3\n2 40 1\n0 1 30\n", "1 2\n3 4\n", "0.1 0.2\n0.3 0.4\n0.5 0.6\n", "1 2\n2 3 4\n3 4\n", "1 5\n2 5\n4 5\n"],
)
def test_a_matrix_is_not_a_curve(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text) == {}


def test_a_training_heading_between_rules_applies_to_the_lines_below_it(tmp_path: Path) -> None:
    text = "--- train ---\naccuracy : 0.92\nROC AUC  : 0.97\n--- validation ---\naccuracy : 0.82\nROC AUC  : 0.88\n"
    assert {name: points[0][1] for name, points in read(tmp_path, text).items()} == {
        "train_accuracy": 0.92,
        "train_ROC_AUC": 0.97,
        "validation_accuracy": 0.82,
        "validation_ROC_AUC": 0.88,
    }
    assert set(read(tmp_path, "=== Training ===\nepoch 1 loss: 0.5\nepoch 2 loss: 0.4\n")) == {"loss"}


def test_the_line_of_the_code_in_a_log_line_is_not_a_metric(tmp_path: Path) -> None:
    text = "2026-01-02 13:00:00,123 [INFO ] trainer:30 - epoch 1/10 finished in 0.01 s: training loss 3.7, validation loss 0.9\n"
    assert set(read(tmp_path, text)) == {"training_loss", "validation_loss"}
    assert read(tmp_path, "step 3 loss:2 - acc:1 - done\n") == {"loss": [(3, 2)], "acc": [(3, 1)]}


@pytest.mark.parametrize(
    ("line", "points"),
    [
        (
            "epoch 01/05 | test mse 1.3345 | test R^2 0.1234 | 0.1s",
            {"test_mse": [(1, 1.3345)], "test_R2": [(1, 0.1234)]},
        ),
        ("R²: 0.81", {"R2": [(0, 0.81)]}),
        ("[mlp] ep 2/4  train/loss=1.5  val/acc=0.7", {"train/loss": [(2, 1.5)], "val/acc": [(2, 0.7)]}),
    ],
)
def test_signs_in_names_and_short_words_for_epochs(tmp_path: Path, line: str, points: Points) -> None:
    assert read(tmp_path, line + "\n") == points
