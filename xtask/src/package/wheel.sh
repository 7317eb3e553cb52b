#!/bin/sh
# Installs the wheel with pip and removes it again, in a root of its own: wheel.sh WHEEL.
set -eu
python3 -m venv /opt/venv
PATH=/opt/venv/bin:$PATH
pip install --no-index "$1"
[ "$(command -v tachyon-bpf)" = /opt/venv/bin/tachyon-bpf ]
tachyon-bpf --version | grep '^tachyon-bpf '
tachyon-bpf report --help >/dev/null
pip show --files tachyon-bpf
pip uninstall --yes tachyon-bpf
[ ! -e /opt/venv/bin/tachyon-bpf ]
