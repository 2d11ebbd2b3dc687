"""A secret that a lab uses is in no file that looplab writes."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest

KEY = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "tkn-ZZ99-not-a-known-shape-77"

TALKATIVE = """\
import json, os, sys
print("key", os.environ["WANDB_API_KEY"], "token", os.environ["MY_TOKEN"], sys.argv, flush=True)
print(os.environ["WANDB_API_KEY"], file=sys.stderr)
with open(os.environ["LOOPLAB_METRICS"], "a") as file:
    print(json.dumps({"step": 1, "loss": 0.5, os.environ["MY_TOKEN"]: 1}), file=file)
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


@pytest.mark.slow
def test_what_stands_in_the_environment_lands_nowhere(lab) -> None:
    lab.write("train.py", TALKATIVE)
    done = lab("run", env={"WANDB_API_KEY": KEY, "MY_TOKEN": TOKEN})
    for secret in (KEY, TOKEN):
        assert files_with(lab.folder, secret) == []
        assert secret not in done.out + done.err
        assert secret not in lab("logs").out
        assert secret not in lab("show", "--json").out


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_secret_among_the_arguments_for_the_trainer_is_passed_but_not_kept(lab) -> None:
    lab("run", "--", "--api-key", KEY, f"--token={TOKEN}")
    (run,) = lab.runs()
    assert lab.read(run, "seen.json")["argv"] == ["--api-key", KEY, f"--token={TOKEN}"]
    (run / "seen.json").unlink()  # the trainer's own file
    for secret in (KEY, TOKEN):
        assert files_with(lab.folder, secret) == []
    assert "not stored" in lab("resume", code=2).err


def test_a_secret_among_the_arguments_cannot_go_into_the_background(lab) -> None:
    done = lab("run", "--detach", "--", f"--token={TOKEN}", code=2)
    assert "environment" in done.err
    assert TOKEN not in done.err
    assert not lab.runs()


# -- values of configs

PASSWORD = "correct-horse-battery"
CONFIGURED = """\
import json, os, sys
with open(sys.argv[1]) as file:
    config = json.load(file)
mode = oct(os.stat(sys.argv[1]).st_mode & 0o777)
print("the password is", config["db"].get("password", ""), sys.argv[2:], flush=True)
with open(os.path.join(os.environ["LOOPLAB_RUN_DIR"], "seen.json"), "w") as file:
    json.dump({"length": len(config["db"].get("password", "")), "mode": mode, "lr": config["train"]["lr"]}, file)
with open("trainer_summary.json", "w") as file:
    json.dump({"db": config["db"]}, file)
with open(os.environ["LOOPLAB_METRICS"], "a") as file:
    print(json.dumps({"step": 1, "loss": config["train"]["lr"], "note": config["db"].get("password", "")}), file=file)
"""


@pytest.fixture
def configured(lab):
    lab.write("train.py", CONFIGURED)
    lab.base(db={"password": PASSWORD, "user": "ann", "pad_token": "<pad>"})
    lab.configure(
        launch={"command": ["{python}", "-S", "{lab}/train.py", "{config}"], "cwd": "run"}, slots={"count": 1}
    )
    return lab


@pytest.mark.slow
def test_a_secret_of_a_config_reaches_the_trainer_and_is_recorded_nowhere(configured) -> None:
    lab = configured
    lab.queue("train.lr@set=0.3")
    done = lab("run")
    assert PASSWORD not in done.out + done.err
    assert files_with(lab.folder, PASSWORD) == ["configs/base.json"]
    for seen in lab.all("seen.json"):
        assert (seen["length"], seen["mode"]) == (len(PASSWORD), "0o600")
    for config in lab.all("config.json"):
        assert config["db"] == {"password": "***", "user": "ann", "pad_token": "<pad>"}
    run = lab.runs()[1]
    assert "the password is *** []" in (run / "record/train.log").read_text()
    assert json.loads((run / "trainer_summary.json").read_text())["db"]["password"] == "***"
    assert json.loads((run / "metrics.jsonl").read_text())["note"] == "***"
    assert stat.S_IMODE((run / "record/config.json").stat().st_mode) & stat.S_IRUSR
    assert lab.read(run, "run.json")["changes"]["parent"] == {"train.lr": {"old": 0.1, "new": 0.3}}
    lab("verify")
    for command in (("show", "2", "--json"), ("diff", "1", "2"), ("report",), ("plan", "--json")):
        assert PASSWORD not in lab(*command, code=None).out
    assert files_with(lab.folder, PASSWORD) == ["configs/base.json"]


@pytest.mark.slow
def test_a_changed_secret_is_not_another_experiment_and_a_missing_one_is_reported(configured) -> None:
    lab = configured
    lab("run")
    lab.base(db={"password": "another-" + PASSWORD, "user": "ann", "pad_token": "<pad>"})
    lab.queue("train.lr@set=0.2")
    lab("resume")
    assert [seen["length"] for seen in lab.all("seen.json")] == [len(PASSWORD), len("another-" + PASSWORD)]
    assert lab.count(role="base") == 1
    lab.base(db={"user": "ann", "pad_token": "<pad>"})
    lab.queue("train.lr@set=0.4", parent="2")
    done = lab("resume", code=None)
    assert "no longer has the secret db.password" in done.out + done.err
    assert files_with(lab.folder, PASSWORD) == []


@pytest.mark.slow
def test_replicates_and_reproductions_get_the_secret_again(configured) -> None:
    lab = configured
    lab.write(
        "train.py",
        CONFIGURED.replace('config["train"]["lr"], "note"', 'config["train"]["lr"] + config["seed"] / 1e3, "note"'),
    )
    lab.base(seed=1, db={"password": PASSWORD, "user": "ann"})
    lab.configure(judge={"baseline_seeds": 3}, seed="seed")
    lab("run")
    assert lab.count(status="ok") == 3
    lab("reproduce", "1", code=None)
    assert lab.count(status="ok", role="reproduction") == 1
    assert {seen["length"] for seen in lab.all("seen.json")} == {len(PASSWORD)}
    assert files_with(lab.folder, PASSWORD) == ["configs/base.json"]
    lab("verify")


def test_a_config_passed_as_flags_is_hidden_in_the_record(configured) -> None:
    lab = configured
    lab.write("train.py", "import json, os, sys\nprint(sys.argv)\nprint(len(sys.argv))\n"
              "print(json.dumps({'step': 1, 'loss': 1}), file=open(os.environ['LOOPLAB_METRICS'], 'a'))\n")  # fmt: skip
    lab.configure(launch={"command": ["{python}", "-S", "train.py"], "config": {"as": "flags"}})
    lab("run")
    assert lab.count(status="ok") == 1
    assert files_with(lab.folder, PASSWORD) == ["configs/base.json"]
    (run,) = lab.runs()
    assert "db.password=***" in " ".join(lab.read(run, "run.json")["argv"]).replace(" ***", "=***")


# -- texts of people and agents

OPENAI = "sk-abcdefghijklmnop12345678"
AMAZON = "AKIAIOSFODNN7EXAMPLE"


@pytest.mark.slow
def test_secrets_in_what_people_say_and_propose_are_not_recorded(lab) -> None:
    lab.queue("train.lr@set=0.2", reason=f"with {OPENAI}")
    lab("run", env={"MY_TOKEN": TOKEN})
    lab("say", f"use {AMAZON} and https://ann:{PASSWORD}@host/x and {TOKEN}", env={"MY_TOKEN": TOKEN})
    lab("propose", "--change", "train.lr@set=0.3", "--reason", f"see https://x/y?sig={KEY}")
    lab("resume")
    lab("veto", "1", "--why", f"leaked {AMAZON}")
    lab("report")
    (lab.folder / "queue.yaml").unlink()
    for run in lab.runs():
        (run / "seen.json").unlink()  # the trainer's own file, with its whole environment
    for secret in (OPENAI, AMAZON, PASSWORD, TOKEN, KEY):
        assert files_with(lab.folder, secret) == []
    assert "with ***" in (lab.outputs() / "labbook.md").read_text()
    lab("verify")


def test_an_edit_with_a_secret_is_rejected_with_advice_and_not_recorded(lab) -> None:
    lab.base(wandb={"api_key": "", "mode": "offline"})
    lab.configure(knobs={**lab.study["knobs"], "wandb.api_key": {"type": "str"}})
    lab("propose", "--change", f"wandb.api_key@set={KEY}", code=None)
    done = lab("run")
    assert files_with(lab.folder, KEY) == []
    assert lab.count() == 1
    assert "base config or the environment" in done.out + done.err
    lab("verify")


def test_submit_refuses_secrets_in_the_manner_of_hydra(lab) -> None:
    done = lab("submit", "--", sys.executable, "-c", "pass", f"logger.api_key={KEY}", code=2)
    assert "environment" in done.err
    assert files_with(lab.folder, KEY) == []


def test_an_agent_that_writes_its_key_into_its_answer_leaks_nothing(lab) -> None:
    lab.write("agent.py", "import json, os, sys\nsys.stdin.read()\n"
              "answer = {'edits': ['train.lr@set=0.2'], 'reason': 'key ' + os.environ['AGENT_ACCOUNT']}\n"
              "json.dump({'proposals': [answer]}, open('next_config.json', 'w'))\nprint('done')\n")  # fmt: skip
    agent = {"cli": "command", "command": [sys.executable, "-S", str(lab.folder / "agent.py")], "wall": 600,
             "env": ["AGENT_ACCOUNT"]}  # fmt: skip
    lab.configure(proposers=[{"agent": agent}])
    lab("say", f"the key of the store is {AMAZON}", env={"AGENT_ACCOUNT": TOKEN})
    lab("autopilot", "--runs", "1", env={"AGENT_ACCOUNT": TOKEN})
    assert lab.read(lab.runs()[1], "run.json")["reason"] == "key ***"
    for run in lab.runs():
        (run / "seen.json").unlink()
    for secret in (TOKEN, AMAZON):
        assert files_with(lab.folder, secret) == []


# -- doctor


@pytest.mark.slow
def test_doctor_names_secrets_without_printing_them_and_takes_them_out_of_files(lab) -> None:
    lab("run")
    (run,) = lab.runs()
    (run / "record/train.log").write_text(f"the key is {KEY}\nlr is 0.1\n")
    lab.write("outputs/toy/labbook.md", f"{OPENAI}\n")
    lab.write("outputs/toy/model.bin", b"\0\1" + KEY.encode())
    env = {"WANDB_API_KEY": KEY}
    done = lab("doctor", "--secrets", "--json", env=env, code=1)
    found = {entry["where"]: (entry["what"], entry["why"]) for entry in done.json()["secrets"]}
    log = str((run / "record/train.log").relative_to(lab.folder))
    assert found == {
        log: ("file", "the value of $WANDB_API_KEY"),
        "outputs/toy/labbook.md": ("file", "it looks like a secret"),
        "outputs/toy/model.bin": ("binary", "the value of $WANDB_API_KEY"),
    }
    assert KEY not in done.out
    assert "not what it was" in lab("verify", code=1).out
    done = lab("doctor", "--secrets", "--scrub", env=env, code=1)
    assert "binary files are not rewritten" in done.out
    assert KEY not in done.out
    assert files_with(lab.folder, KEY) == ["outputs/toy/model.bin"]
    assert (run / "record/train.log").read_text() == "the key is ***\nlr is 0.1\n"
    assert "secrets were removed from record/train.log" in lab("verify").out
    (lab.folder / "outputs/toy/model.bin").unlink()
    assert "no secrets were found" in lab("doctor", "--secrets", env=env).out


def test_doctor_finds_secrets_in_the_ledger_and_says_that_they_stay(lab) -> None:
    lab("run")
    import sqlite3

    with sqlite3.connect(lab.folder / ".looplab/ledger.db") as db:
        db.execute("UPDATE events SET data=? WHERE seq=2", (json.dumps({"text": OPENAI}),))
        db.execute("UPDATE runs SET reason=?", (f"with {KEY}",))
    done = lab("doctor", "--secrets", "--scrub", env={"X_API_KEY": KEY}, code=1)
    assert "event 2 (" in done.out
    assert "table: runs, row 1: the value of $X_API_KEY" in done.out
    assert "revoke them" in done.out
    assert OPENAI not in done.out + done.err
    assert KEY not in done.out + done.err


def test_doctor_scrubs_nothing_while_an_engine_runs(lab) -> None:
    lab.base(wait="gate")
    engine = lab.start("run")
    lab.until_at_work()
    assert "engine" in lab("doctor", "--secrets", "--scrub", code=3).err
    lab("doctor", "--secrets")
    lab.open_gate()
    engine.ended()
