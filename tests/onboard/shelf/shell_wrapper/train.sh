#!/usr/bin/env bash
# Train the perceptron baseline. Extra arguments go to the python script, e.g.
#   ./train.sh --eta 0.5 --averaged
set -euo pipefail
cd "$(dirname "$0")"

export PYTHONUNBUFFERED=1
PYTHON=${PYTHON:-python}
EXP=${EXP:-baseline}
mkdir -p "exp/$EXP"

$PYTHON scripts/perceptron.py \
    --out "exp/$EXP" \
    --epochs 10 \
    "$@" 2>&1 | tee "exp/$EXP/train.log"
