"""What a run is told about W&B: the same in every round, with everything it writes kept inside the lab."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlparse

from looplab.config.lab import Wandb

CACHE = ".wandb_cache"
DEFAULT_SERVER = "https://api.wandb.ai"


def wandb_environment(settings: Wandb | None, lab: Path, run_dir: str, study: str, run_id: str) -> dict[str, str]:
    if settings is None:
        return {}
    cache = str(lab / CACHE)
    env = {
        "WANDB_MODE": settings.mode,
        "WANDB_DIR": run_dir,
        "WANDB_CACHE_DIR": cache,
        "WANDB_CONFIG_DIR": cache,
        "WANDB_DATA_DIR": cache,
        "WANDB_ARTIFACT_DIR": f"{cache}/artifacts",
        "WANDB_NAME": f"{study}-{run_id}",
        "WANDB_RUN_GROUP": study,
        "WANDB_ERROR_REPORTING": "false",
    }
    if settings.entity:
        env["WANDB_ENTITY"] = settings.entity
    if settings.project:
        env["WANDB_PROJECT"] = settings.project
    if not settings.artifacts:
        # What can be switched off from outside: uploads of models by Transformers, and of code by wandb itself.
        env |= {"WANDB_LOG_MODEL": "false", "WANDB_DISABLE_CODE": "true"}
    return env


def has_wandb_key(env: Mapping[str, str]) -> bool:
    """Whether wandb would find a key: in the environment, or where `wandb login` puts it."""
    if env.get("WANDB_API_KEY"):
        return True
    host = urlparse(env.get("WANDB_BASE_URL", DEFAULT_SERVER)).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
