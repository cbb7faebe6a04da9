#!/usr/bin/env bash
# lm-eval with what its `local-completions` needs, in an environment of its own. No torch: the model is elsewhere.
#
#   scripts/install_lm_eval.sh [FOLDER]       default: build/lm-eval
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-build/lm-eval}
[ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
pip=("$folder/bin/python" -m pip install --disable-pip-version-check --quiet)
"${pip[@]}" --no-deps 'lm-eval==0.4.12'
"${pip[@]}" 'datasets>=2.16,<5' 'transformers>=4.5' jinja2 requests aiohttp tenacity tqdm numpy jsonlines \
  more-itertools sqlitedict zstandard pytablewriter dill word2number evaluate sacrebleu rouge-score scikit-learn
"$folder/bin/python" -m pip list --disable-pip-version-check 2>/dev/null | grep -iE '^lm[-_]eval '
