"""A secret that a lab uses is in no file that looplab writes."""

from __future__ import annotations

from pathlib import Path

KEY = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "tkn-ZZ99-not-a-known-shape-77"

TALKATIVE = """\
import json, os, sys
print("key", os.environ["WANDB_API_KEY"], "token", os.environ["MY_TOKEN"], sys.argv, flush=True)
print(os.environ["WANDB_API_KEY"], file=sys.stderr)
with open(os.environ["LOOPLAB_METRICS"], "a") as file:
    print(json.dumps({"step": 1, "loss": 0.5}), file=file)
"""


def files_with(folder: Path, secret: str) -> list[str]:
    """The files below a folder that hold the secret, the ledger and its log included."""
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and secret.encode() in path.read_bytes()
    ]


def prepared(lab):
    lab.write("train.py", TALKATIVE)
    lab.configure(
        launch={
            "command": ["{python}", "-S", "train.py", "--api-key", KEY, f"--token={TOKEN}"],
            "env": {"WANDB_API_KEY": KEY, "MY_TOKEN": TOKEN},
        }
    )
    lab.queue("train.lr@set=0.3")
    return lab


def test_what_stands_in_launch_env_stays_in_the_lab_file(lab) -> None:
    prepared(lab)("run")
    assert lab.count(status="ok") == 2
    for secret in (KEY, TOKEN):
        assert files_with(lab.folder, secret) == ["lab.yaml"]
    assert "key *** token ***" in (lab.runs()[0] / "record/train.log").read_text()
    lab("verify")


def test_what_stands_in_the_environment_lands_nowhere(lab) -> None:
    lab.write("train.py", TALKATIVE)
    done = lab("run", env={"WANDB_API_KEY": KEY, "MY_TOKEN": TOKEN})
    for secret in (KEY, TOKEN):
        assert files_with(lab.folder, secret) == []
        assert secret not in done.out + done.err
        assert secret not in lab("logs").out
        assert secret not in lab("show", "--json").out


def test_a_study_in_the_background_gets_the_secret_and_does_not_write_it(lab, until) -> None:
    lab.write("train.py", TALKATIVE)
    lab("run", "--detach", env={"WANDB_API_KEY": KEY, "MY_TOKEN": TOKEN})
    until(lambda: lab.engine() is None, "the end of the engine")
    assert lab.count(status="ok") == 1
    for secret in (KEY, TOKEN):
        assert files_with(lab.folder, secret) == []


def test_a_secret_of_a_stopped_run_is_taken_out_too(lab, until) -> None:
    lab.write("train.py", TALKATIVE + "import time\ntime.sleep(60)\n")
    engine = lab.start("run", env={"WANDB_API_KEY": KEY, "MY_TOKEN": TOKEN})
    lab.until_at_work()
    lab("stop")
    engine.ended(code=130)
    assert files_with(lab.folder, KEY) == []


def test_a_secret_among_the_arguments_for_the_trainer_is_passed_but_not_kept(lab) -> None:
    lab("run", "--", "--api-key", KEY, f"--token={TOKEN}")
    (run,) = lab.runs()
    assert lab.read(run, "seen.json")["argv"] == ["--api-key", KEY, f"--token={TOKEN}"]
    (run / "seen.json").unlink()  # the trainer's own file
    for secret in (KEY, TOKEN):
        assert files_with(lab.folder, secret) == []
    assert "not kept" in lab("resume", code=2).err


def test_a_secret_among_the_arguments_cannot_go_into_the_background(lab) -> None:
    done = lab("run", "--detach", "--", f"--token={TOKEN}", code=2)
    assert "environment" in done.err
    assert TOKEN not in done.err
    assert not lab.runs()
