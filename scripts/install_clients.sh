#!/usr/bin/env bash
# Public clients of the OpenAI API, which the gateway is tried with, in an environment of their own:
# what they depend on need not agree with what Octavo depends on.
#
#   scripts/install_clients.sh [FOLDER]       default: build/clients
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-build/clients}
[ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install --disable-pip-version-check --quiet \
  'openai>=2' 'langchain-openai>=1' 'locust>=2.30' 'schemathesis>=4' 'anthropic>=0.70' 'instructor>=1.11' \
  'pydantic-ai-slim[openai]>=1' 'openai-agents>=0.4'
"$folder/bin/python" -m pip list --disable-pip-version-check 2>/dev/null |
  grep -iE '^(openai|langchain-openai|locust|schemathesis|anthropic|instructor|pydantic-ai-slim|openai-agents) '
if command -v npm >/dev/null; then
  mkdir -p "$folder-node" && cp tests/clients/package.json "$folder-node"
  npm install --prefix "$folder-node" --silent --no-audit --no-fund --ignore-scripts
fi
