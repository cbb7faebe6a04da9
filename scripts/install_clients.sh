#!/usr/bin/env bash
# Public clients, which the gateway is tried with, in an environment of their own:
# what they depend on need not agree with what Octavo depends on.
#
#   scripts/install_clients.sh [FOLDER]       default: build/clients
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-build/clients}
[ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install --disable-pip-version-check --quiet -r tests/clients/requirements.txt
if command -v npm >/dev/null; then
  mkdir -p "$folder-node" && cp tests/clients/package.json "$folder-node"
  npm install --prefix "$folder-node" --silent --no-audit --no-fund --ignore-scripts
fi
