"""Build wheel and sdist, and install them as a stranger would: `make release-check`.

    python tools/release_check.py [--fast] [--python PYTHON] [--also PYTHON …]

The wheel is installed in a clean environment, tried out, and its light extras are added one by one; for heavy ones pip
only resolves them, with constraints.txt. Prints sizes and import times. `--fast`: the wheel and its contents alone.
`--also python3.13`: the wheel is installed there as well, and all extras together are resolved.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIGHT = {"quickstart": "sklearn", "plots": "matplotlib", "search": "optuna", "ui": "starlette", "wandb": "wandb"}
"""Extras that are installed, each with a module that it brings."""
HEAVY = ("ot", "rl", "esm", "mario", "ray", "all")
"""Extras that are only resolved."""
LARGEST_MB = 6.0
"""Megabytes that the wheel may have."""
JUNK = ("__pycache__", ".pyc", "/.git/", ".DS_Store", ".venv", "outputs/", ".looplab/", "node_modules", ".egg-info")


def problems_of(names: list[str]) -> list[str]:
    """Return the files that do not belong into a wheel."""
    outside = [name for name in names if not name.startswith("looplab/") and ".dist-info/" not in name]
    tests = [name for name in names if name.startswith(("tests/", "benchmarks/")) or "/test_" in name]
    junk = [name for name in names if any(part in name for part in JUNK)]
    return sorted({*outside, *tests, *junk})


def build(target: Path) -> tuple[Path, Path]:
    """Return the wheel and the sdist; the wheel is built from the sdist, so both are whole."""
    call([sys.executable, "-m", "build", "--outdir", str(target), str(ROOT)])
    (wheel,), (sdist,) = target.glob("*.whl"), target.glob("*.tar.gz")
    return wheel, sdist


def check_contents(wheel: Path, sdist: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    wrong = problems_of(names)
    if wrong:
        raise SystemExit(f"{wheel.name} contains {', '.join(wrong[:10])}")
    licences = [name for name in names if "/licenses/" in name]
    if not any(name.endswith("uPlot.LICENSE") for name in licences) or not any(
        n.endswith("/LICENSE") for n in licences
    ):
        raise SystemExit(f"{wheel.name} lacks a licence; it has {licences}")
    size = wheel.stat().st_size / 1e6
    if size > LARGEST_MB:
        raise SystemExit(f"{wheel.name} has {size:.1f} MB, more than {LARGEST_MB}")
    with tarfile.open(sdist) as archive:
        count = len(archive.getnames())
    print(f"{wheel.name}: {size:.2f} MB, {len(names)} files")
    print(f"{sdist.name}: {sdist.stat().st_size / 1e6:.2f} MB, {count} files")


def check_installation(wheel: Path, python: str, folder: Path) -> None:
    environment = folder / "env"
    call([python, "-m", "venv", str(environment)])
    bin_ = environment / "bin"
    pip = [str(bin_ / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    constraints = ["-c", str(ROOT / "constraints.txt")]
    call([*pip, str(wheel)])
    call([str(bin_ / "python"), "-m", "pip", "check"])
    expected = wheel.name.split("-")[1]
    told = call([str(bin_ / "looplab"), "--version"]).strip()
    if told != expected:
        raise SystemExit(f"looplab --version says {told}, the wheel is {expected}")
    call([str(bin_ / "looplab"), "init", "quickstart", str(folder / "lab")])
    call([str(bin_ / "looplab"), "check", "--lab", str(folder / "lab")])
    for code in ("pass", "import looplab", "from looplab import trainkit", "import looplab; looplab.open"):
        print(f"python -c {code!r}: {1000 * seconds_of([str(bin_ / 'python'), '-c', code]):.0f} ms")
    print(f"looplab --help: {1000 * seconds_of([str(bin_ / 'looplab'), '--help']):.0f} ms")
    for extra, module in LIGHT.items():
        call([*pip, *constraints, f"{wheel}[{extra}]"])
        call([str(bin_ / "python"), "-c", f"import {module}"])
        print(f"looplab[{extra}]: installed")
    for extra in HEAVY:
        call([*pip, *constraints, "--dry-run", f"{wheel}[{extra}]"])
        print(f"looplab[{extra}]: resolves")
    call([str(bin_ / "python"), "-m", "pip", "check"])


def check_other(wheel: Path, python: str, folder: Path) -> None:
    """Install the wheel with another Python, and let its pip resolve all extras together."""
    environment = folder / f"env-{Path(python).name}"
    call([python, "-m", "venv", str(environment)])
    own = str(environment / "bin" / "python")
    pip = [own, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    call([*pip, "--upgrade", "pip"])
    call([*pip, str(wheel)])
    version = call([str(environment / "bin" / "looplab"), "--version"]).strip()
    call([*pip, "-c", str(ROOT / "constraints.txt"), "--dry-run", f"{wheel}[all]"])
    print(f"{call([own, '--version']).strip()}: looplab {version} installed, looplab[all] resolves")


def seconds_of(command: list[str]) -> float:
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        call(command)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def call(command: list[str]) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LOOPLAB"))}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tempfile.gettempdir())
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fast", action="store_true", help="build, and look at the contents alone")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the clean environment")
    parser.add_argument("--also", action="append", default=[], metavar="PYTHON", help="another interpreter to try")
    parser.add_argument("--out", type=Path, help="where wheel and sdist are kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="looplab-release-") as folder:
        target = options.out or Path(folder) / "dist"
        wheel, sdist = build(target.resolve())
        check_contents(wheel, sdist)
        if not options.fast:
            check_installation(wheel, options.python, Path(folder))
        for python in options.also:
            check_other(wheel, python, Path(folder))
    print("all is well")


if __name__ == "__main__":
    main()
