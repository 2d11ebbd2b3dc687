#!/usr/bin/env bash
# Resume a training, or start it: RUN_NAME=bootstrap ACTION_TYPE=extended SCRIPTED_SEQUENCE='START:8,RIGHT+B:180' \
#   REWARD_DISTANCE_WEIGHT=0.05 ENABLE_RAM_X_PARSE=1 bash resume.sh [more flags of train.py]
set -euo pipefail
cd "$(dirname "$0")"
exec "${PYTHON:-python3}" train.py --config "${CONFIG:-configs/base.json}" --out "trained_models/${RUN_NAME:-mario}" --from-env "$@"
