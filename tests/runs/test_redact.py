from __future__ import annotations

import copy
import json
import os
import string
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.runs.redact import (
    CHUNK,
    HIDDEN,
    SHAPED,
    forget,
    hide_values,
    is_secret,
    is_secret_file,
    is_secret_name,
    known_secrets,
    name_strength,
    redact_argv,
    redact_bytes,
    redact_data,
    redact_env,
    redact_text,
    remember,
    scrub_file,
)
from looplab.untrusted import UntrustedError

KEY = "0123456789abcdef0123456789abcdef01234567"


NAMES = {
    3: """WANDB_API_KEY AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID DB_PASSWORD DB_PASS MYSQL_PWD GITHUB_PAT HF_PAT WANDB_PASS
        API_KEYS SENTRY_DSN SLACK_WEBHOOK_URL DISCORD_WEBHOOK GOOGLE_APPLICATION_CREDENTIALS_JSON PGPASSWORD apiKey
        clientSecret authToken --wandb.api-key --password logger.api_key access_token private_key OPENAI_API_KEY_2
        passphrase db.pass apikey SSHPASS SESSION_COOKIE redis_passwd bot_token secret SECRETS""",
    2: "HF_TOKEN OPENAI_KEY KEY --token REDISCLI_AUTH BASIC_AUTH pad_token image_key sort_key eos_token_id TOKEN_2",
    1: "XDG_SESSION_ID DESKTOP_SESSION private request_signature",
    0: """TOKENIZERS_PARALLELISM KEYBOARD PATH MONKEY --max-tokens AUTHOR max_tokens tokenizer tokenizer_name key_dim num_keys
        n_keys key_value_heads passes author PWD OLDPWD compass bypass low_pass forward_pass keys tokens num_tokens
        HF_TOKEN_PATH WANDB_API_KEY_FILE AUTH_URL authors donkey token_dropout secretary pattern path passed patience
        cookiecutter sessions_per_day public_keys GIT_AUTHOR_NAME TOKENIZER""",
}


@pytest.mark.parametrize(("name", "strength"), [(name, n) for n, names in NAMES.items() for name in names.split()])
def test_names_of_secrets(name: str, strength: int) -> None:
    assert name_strength(name) == strength
    assert is_secret_name(name) == (strength >= 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("api_key", "x"), ("password", "hunter2"), ("db_pass", "hunter2"), ("password", 12345678), ("token", KEY),
        ("image_key", KEY), ("wandb_key", KEY), ("session", KEY), ("key", KEY),
    ],
)  # fmt: skip
def test_values_of_configs_that_are_secrets(name: str, value: object) -> None:
    assert is_secret(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokenizer", "bert"), ("max_tokens", 512), ("key_dim", 64), ("num_keys", 8), ("passes", 3), ("author", "Ann"),
        ("monkey", KEY), ("pad_token", "<pad>"), ("mask_token", "[MASK]"), ("image_key", "observation.images.front_01"),
        ("sort_key", "length"), ("api_key", "${oc.env:WANDB_API_KEY}"), ("api_key", "$WANDB_API_KEY"), ("api_key", ""),
        ("api_key", None), ("password", False), ("pass", 3), ("secret", 1), ("auth", "basic"), ("token_id", 50256),
        ("commit", KEY), ("api_key", "***"), ("private", "yes"), ("session", "morning"), ("key", "train"),
    ],
)  # fmt: skip
def test_values_of_configs_that_are_not(name: str, value: object) -> None:
    assert not is_secret(name, value)


TEXTS = {
    "got sk-abcdefghijklmnop1234 here": "got *** here",
    "sk-ant-api03-Ab1-Cd2_Ef3Gh4Ij5Kl6": "***",
    "sk-proj-Ab1-Cd2_Ef3Gh4Ij5Kl6Mn": "***",
    "key AKIAIOSFODNN7EXAMPLE.": "key ***.",
    "ghp_0123456789abcdefghij0123": "***",
    "github_pat_11ABCDEFG0123456789_abc": "***",
    "hf_abcdefghijklmnopqrstuvwx": "***",
    "glpat-0123456789abcdefABCD": "***",
    "xoxb-1234567890-abcdef": "***",
    "AIza" + "a1B2c3D4" * 5: "***",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTYifQ.abc_def-123": "***",
    "https://me:pw@host/x": "https://me:***@host/x",
    "redis://:hunter22@host": "redis://:***@host",
    "https://0123456789abcdef0123@github.com/a/b": "https://***@github.com/a/b",
    "https://hooks.slack.com/services/T00/B00/XXXX": "https://hooks.slack.com/services/***",
    "https://discord.com/api/webhooks/12345/AbC-d_f": "https://discord.com/api/webhooks/***",
    "https://api.telegram.org/bot123456789:AAabcdefghijklmnopqrstuv/x": "https://api.telegram.org/bot***/x",
    "https://s3/x?a=1&X-Amz-Signature=0a1b2c3d&b=2": "https://s3/x?a=1&X-Amz-Signature=***&b=2",
    "https://x/y?token=abcdef123": "https://x/y?token=***",
    "https://x.blob/y?sv=2020&sig=abc%2Fdef": "https://x.blob/y?sv=2020&sig=***",
    "Authorization: Bearer abcdef0123456789abcdef": "Authorization: Bearer ***",
    "logger.api_key=abcdefgh": "logger.api_key=***",
    "wandb.api_key@set=abcdefgh": "wandb.api_key@set=***",
    '{"api_key": "hunter", "lr": 1}': '{"api_key": "***", "lr": 1}',
    "password: hunter2": "password: ***",
    "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nx": "***\nx",
}


@pytest.mark.parametrize(("text", "clean"), TEXTS.items())
def test_texts_lose_their_secrets_and_nothing_else(text: str, clean: str) -> None:
    assert redact_text(text) == clean
    assert redact_text(clean) == clean
    assert redact_text(f"före {text} \n") == f"före {clean} \n"
    assert redact_bytes(f"före {text} \n".encode()) == f"före {clean} \n".encode()


def test_a_private_key_without_end_is_hidden_to_the_end_of_the_text() -> None:
    assert redact_text("x\n-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n") == "x\n***"


@pytest.mark.parametrize(
    "text",
    [
        "loss 0.3 at step 100", "mask-transformer-base-v2-large-patch16", "task-0123456789abcdefghij",
        "sk-learn-intelex-2024-random", "tokenizer=bert-base-uncased", "max_tokens=512", "key_dim: 64", "passes: 3",
        "author: Ann", "monkey=abcdefgh", "the secret: lower learning rates", "password: none", "basic configuration",
        "api_key=${WANDB_API_KEY}", "what is the token? key=1", "a basic implementation123 of it", KEY,
        "https://example.org/a?b=1&page=2", "sha256:" + "0a" * 32, "train.lr@mul=0.5", "x@y.org", "hf_transformer_block",
        "0007-k3f9", "see https://docs.example.org/key/values", "git@github.com:a/b.git",
    ],
)  # fmt: skip
def test_texts_without_secrets_stay(text: str) -> None:
    assert redact_text(text) == text


@pytest.mark.parametrize(
    "unit",
    [
        "a", "1", "-", "/", ":", "@", "://", "sk-", "eyJ", "eyJ.", "?", "&token", "password", "password=", "api_key:", "\\",
        "-----BEGIN ", "-----BEGIN RSA PRIVATE KEY-----", "bearer ", "bearer a", "hooks.slack.com/a", "a.", "SG.", "https://a:",
        "?key=", "x0", "://a", "bot1", "/bot1:", "AKIA", "secret ", "_live_", "A ",
    ],
)  # fmt: skip
def test_no_text_makes_the_patterns_slow(unit: str) -> None:
    def steps(size: int) -> float:
        text = (unit * (size // len(unit) + 1))[:size]
        began = time.process_time()
        redact_text(text)
        is_secret("token", text)
        redact_argv([f"--token={text}", text])
        return time.process_time() - began

    steps(1000)
    # Quadratic patterns take minutes for this much; linear ones a part of a second.
    assert steps(400_000) < 20


words = st.text(alphabet=string.ascii_lowercase + " .,_-0123456789=@", max_size=60)


@given(words, words)
def test_redaction_is_stable_and_hides_what_is_remembered(before: str, after: str) -> None:
    forget()
    clean = redact_text(f"{before} {after}")
    assert redact_text(clean) == clean
    try:
        remember({"MY_API_KEY": KEY})
        assert KEY not in redact_text(f"{before}{KEY}{after}")
        assert KEY.encode() not in redact_bytes(f"{before}{KEY}{after}".encode())
    finally:
        forget()


configs = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), words),
    lambda node: st.one_of(
        st.lists(node, max_size=3),
        st.dictionaries(st.sampled_from(["lr", "api_key", "token", "a", "password", "key_dim"]), node, max_size=3),
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["wandb", "model", "password"]), configs, max_size=3))
def test_hidden_values_of_a_config_can_be_put_back(config: dict[str, Any]) -> None:
    forget()
    hidden, secrets = hide_values(config)
    again, more = hide_values(hidden)
    assert again == hidden
    assert not more
    whole: Any = copy.deepcopy(hidden)
    for path, value in secrets.items():
        node = whole
        for part in path[:-1]:
            node = node[part]
        assert node[path[-1]] == HIDDEN
        node[path[-1]] = value
    assert whole == config


@pytest.mark.parametrize(
    "name",
    [
        ".env", ".env.local", "prod.env", "conf/server.pem", "id_rsa", "deploy/id_ed25519", "credentials.json", ".netrc",
        "secrets.yaml", "secrets.toml", "aws_credentials", "x.key", "app-secrets.json", ".git-credentials",
    ],
)  # fmt: skip
def test_files_that_are_made_for_secrets(name: str) -> None:
    assert is_secret_file(name)


@pytest.mark.parametrize(
    "name",
    [".env.example", "train.py", "env.py", "environment.yaml", "secrets.py", "tokens.txt", "id_rsa.pub", "key.md"],
)
def test_files_that_are_not(name: str) -> None:
    assert not is_secret_file(name)


def test_argv_and_env_lose_their_secrets() -> None:
    assert redact_argv(["t.py", "--api-key", KEY, f"--wandb.token={KEY}", "--lr", "0.1"]) == [
        "t.py", "--api-key", "***", "--wandb.token=***", "--lr", "0.1",
    ]  # fmt: skip
    assert redact_env({"HF_TOKEN": "x", "A": "1", "B": "https://me:pw@host/x"}) == {
        "HF_TOKEN": "***", "A": "1", "B": "https://me:***@host/x",
    }  # fmt: skip


def test_arguments_of_hydra_and_of_other_kinds() -> None:
    given = ["t.py", "logger.api_key=abc", "+x.token=" + KEY, "--password=a b", "--pad-token", "<pad>", "model.token=cls",
             "-p", "8", "--passes=3", "tokenizer=bert", "++db.pass=x1", "--webhook-url", "http://x"]  # fmt: skip
    assert redact_argv(given) == [
        "t.py", "logger.api_key=***", "+x.token=***", "--password=***", "--pad-token", "<pad>", "model.token=cls",
        "-p", "8", "--passes=3", "tokenizer=bert", "++db.pass=***", "--webhook-url", "***",
    ]  # fmt: skip


def test_the_password_of_an_address_is_known_without_the_address() -> None:
    env = {
        "DATABASE_URL": "postgres://me:hunter2222@db/x",
        "SSH_AUTH_SOCK": "/tmp/ssh-1/agent",
        "XDG_SESSION_TYPE": "wayland1",
    }
    assert known_secrets(env) == [b"hunter2222"]


def test_an_environment_value_that_is_not_text_is_known_by_its_bytes() -> None:
    assert b"abcdefg\xff" in known_secrets({"X_TOKEN": "abcdefg\udcff"})


def test_a_log_is_scrubbed_of_known_secrets(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(f"key is {KEY}\nloss 1\n")
    secrets = known_secrets({"WANDB_API_KEY": KEY, "SHORT_KEY": "abc", "NAME": "value-long-enough"})
    assert scrub_file(log, secrets)
    assert log.read_text() == "key is ***\nloss 1\n"
    assert not scrub_file(log, secrets)


def test_a_large_log_is_scrubbed_of_known_secrets_also_across_chunks(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    with log.open("wb") as file:
        file.write(b"x" * (CHUNK - 5) + KEY.encode())
        file.write((b"y" * 1000 + b"\n") * (SHAPED // 1000) + KEY.encode())
    size = log.stat().st_size
    assert scrub_file(log, [KEY.encode()])
    assert log.stat().st_size == size - 2 * (len(KEY) - 3)
    assert KEY.encode() not in log.read_bytes()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_only_regular_files_are_scrubbed(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "train.log")
    with pytest.raises((UntrustedError, OSError)):
        scrub_file(tmp_path / "train.log", [b"abcdefgh"])


@pytest.mark.parametrize(
    ("name", "value", "printed"),
    [
        ("DB_PASS", 'a"b\\c/d päss', ['a"b\\c/d päss']),
        ("SERVICE_JSON", '{"private_key": "k3y-of-service"}', ["k3y-of-service"]),
        ("STORAGE", "AccountName=a;AccountKey=k3yOfAccount==;", ["k3yOfAccount=="]),
        ("DATABASE_URL", "postgres://u:p4ss_w0rd@h/db", ["p4ss_w0rd"]),
        ("REGISTRY_AUTH_CONFIG", '{"auths": "of the registry"}', ['{"auths": "of the registry"}']),
        ("FTP_USERPWD", "user:somewords", ["user:somewords"]),
        ("CI_JOB_JWT_V2", "word-and-word", ["word-and-word"]),
    ],
)
def test_a_known_secret_is_hidden_in_every_form(name: str, value: str, printed: list[str]) -> None:
    forget()
    try:
        remember({name: value})
        for secret in printed:
            in_json = json.dumps(secret), json.dumps(secret, ensure_ascii=False)
            for form in (secret, *in_json, quote(secret), quote_plus(secret)):
                assert redact_text(f"x {form} y").strip() in ("x *** y", 'x "***" y'), form
    finally:
        forget()


def test_keys_are_texts_too() -> None:
    data = {"loss": 1, "of": [{f"sk-{KEY}": {"token": KEY, "n": 2}}]}
    assert redact_data(data) == {"loss": 1, "of": [{HIDDEN: {"token": HIDDEN, "n": 2}}]}
    plain = {"loss": 1, "of": [{"password_strength": {"n": 2}}], 3: None}
    assert redact_data(plain) is plain
