#!/usr/bin/env bash
# Prints the path of a Chromium. Installs Debian's where there is none, in CI and where GOPT_BROWSER=install is set.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
  if command -v "$name"; then exit 0; fi
done
if [[ -z "${CI:-}" && "${GOPT_BROWSER:-}" != install ]]; then
  echo "there is no Chromium; GOPT_BROWSER=install tests/browser/chromium.sh installs Debian's" >&2
  exit 1
fi
if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
  echo "there is no Chromium, and no apt-get as root to install it with" >&2
  exit 1
fi
{ apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends chromium; } >&2
command -v chromium
