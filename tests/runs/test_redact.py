from __future__ import annotations

from pathlib import Path

import pytest

from looplab.runs.redact import is_secret_name, known_secrets, redact_argv, redact_env, redact_text, scrub_file

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    "name", ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "--wandb.api-key"]
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "KEYBOARD", "PATH", "MONKEY", "--max-tokens", "AUTHOR"])
def test_names_that_only_look_like_it(name: str) -> None:
    assert not is_secret_name(name)


def test_argv_and_env_lose_their_secrets() -> None:
    assert redact_argv(["t.py", "--api-key", KEY, f"--wandb.token={KEY}", "--lr", "0.1"]) == [
        "t.py", "--api-key", "***", "--wandb.token=***", "--lr", "0.1",
    ]  # fmt: skip
    assert redact_env({"HF_TOKEN": "x", "A": "1", "B": "https://me:pw@host/x"}) == {
        "HF_TOKEN": "***", "A": "1", "B": "https://me:***@host/x",
    }  # fmt: skip


def test_values_that_look_like_a_secret_are_hidden_anywhere() -> None:
    assert redact_text("got sk-abcdefghijklmnop1234 here") == "got *** here"
    assert redact_text("loss 0.3 at step 100") == "loss 0.3 at step 100"


def test_a_log_is_scrubbed_of_known_secrets(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(f"key is {KEY}\nloss 1\n")
    secrets = known_secrets({"WANDB_API_KEY": KEY, "SHORT_KEY": "abc", "NAME": "value-long-enough"})
    assert scrub_file(log, secrets)
    assert log.read_text() == "key is ***\nloss 1\n"
    assert not scrub_file(log, secrets)
