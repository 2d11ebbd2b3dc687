#!/bin/sh
# PufferLib 3.0.0 with its drone environment, in an environment of its own: pufferlib.sh FOLDER
#
# A plain install downloads graphics libraries while it builds. Here the drone environment alone is compiled, which needs
# only what the source package has. nvcc is hidden, since the build would want a CUDA torch.
set -eu
folder=$1
python=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m venv "$folder"
folder=$(cd "$folder" && pwd)
pip() { "$folder/bin/python" -m pip "$@"; }
pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" torch
pip install --quiet --disable-pip-version-check wheel Cython 'numpy<2' ninja 'setuptools<81'
# pip cannot fetch a source package without asking its setup.py, which downloads and fails; what was unpacked is kept.
TMPDIR=$work PATH=/usr/bin:/bin pip download --quiet --disable-pip-version-check --no-clean --no-deps \
  --no-build-isolation --no-binary :all: --dest "$work" pufferlib==3.0.0 2>"$work/log" || true
setup=$(find "$work" -maxdepth 3 -name setup.py | head -n 1)
[ -n "$setup" ] || { cat "$work/log" >&2; exit 1; }
cd "$(dirname "$setup")"
mkdir -p raylib-5.5_webassembly box2d-web box2d-linux-amd64
find pufferlib/ocean -name binding.c ! -path '*/drone/*' -delete
PATH=/usr/bin:/bin pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps .
# wandb 0.20 has lost a function that PufferLib calls.
pip install --quiet --disable-pip-version-check gym==0.23.0 gymnasium==0.29.1 pettingzoo==1.24.1 'shimmy<2' 'heavyball<2' \
  psutil rich rich_argparse imageio pyro-ppl 'wandb<0.20'
PATH=/usr/bin:/bin "$folder/bin/python" -c "import pufferlib.ocean.drone.drone"
