#!/bin/sh
# Installs, upgrades, rolls back, removes and purges the Debian package, in a root of its own: deb.sh OLD NEW.
set -eu
old=$1 new=$2
config=/etc/tachyon-bpf/agent.toml
spool=/var/spool/tachyon-bpf
unit=/usr/lib/systemd/system/tachyon-bpf.service

fail() {
    echo "deb.sh: $*" >&2
    exit 1
}
is() {
    [ "$2" = "$3" ] || fail "$1: $2, not $3"
}
there() {
    for file; do [ -s "$file" ] || fail "$file is missing"; done
}
gone() {
    for file; do [ ! -e "$file" ] || fail "$file is left"; done
}
# Of the package, as dpkg tells it: "ii 0.1.0-1".
state() {
    dpkg-query --show --showformat '${db:Status-Abbrev}${Version}' tachyon-bpf
}
version() {
    dpkg-deb --field "$1" Version
}
# A word, which is what is compared: for "disabled" the status is not 0.
enabled() {
    systemctl --root=/ is-enabled tachyon-bpf || :
}
# What the package may leave is not in it: the user, and the logs and states of dpkg itself.
files() {
    find /etc /usr /var -xdev ! -path '/var/log/*' ! -path '/var/lib/dpkg/*' ! -path '/var/cache/*' \
        ! -name 'passwd-' ! -name 'shadow-' ! -name 'group-' ! -name 'gshadow-' ! -name .pwd.lock | sort
}

# The package's scripts take this for a running systemd. What they ask of it fails, which they must bear.
mkdir -p /run/systemd/system
files >/tmp/before

dpkg --install "$old"
is 'installed' "$(state)" "ii $(version "$old")"
tachyon-bpf --version | grep -q '^tachyon-bpf ' || fail 'the program does not tell its version'
there "$config" "$unit" /usr/share/man/man1/tachyon-bpf.1.gz /usr/share/bash-completion/completions/tachyon-bpf \
    /usr/share/zsh/vendor-completions/_tachyon-bpf /usr/share/fish/vendor_completions.d/tachyon-bpf.fish \
    /usr/share/doc/tachyon-bpf/copyright /usr/share/doc/tachyon-bpf/THIRD-PARTY-LICENSES.txt
gunzip --test /usr/share/man/man1/tachyon-bpf.1.gz
bash -n /usr/share/bash-completion/completions/tachyon-bpf
is 'the configuration files' "$(dpkg-query --show --showformat '${Conffiles}' tachyon-bpf | awk 'NF { print $1 }')" "$config"
is 'the spool' "$(stat --format '%U:%G %a' "$spool")" 'tachyon-bpf:tachyon-bpf 2750'
# It records nothing until somebody wants it to.
is 'the unit' "$(enabled)" disabled
systemd-analyze verify "$unit"
as_agent() {
    setpriv --reuid tachyon-bpf --regid tachyon-bpf --init-groups tachyon-bpf agent "$@"
}
as_agent --check >/tmp/check || fail "agent --check: $(cat /tmp/check)"

# What an administrator changes and what was recorded outlives upgrade, rollback and removal.
systemctl --root=/ enable tachyon-bpf
sed -i 's/^# frequency = 19$/frequency = 23/' "$config"
as_agent --check | grep -q '^record.frequency  *23 ' || fail "the agent does not read $config: $(as_agent --check)"
touch "$spool/segment"
kept() {
    grep -q '^frequency = 23$' "$config" || fail "$1: the configuration was replaced"
    [ -e "$spool/segment" ] || fail "$1: the spool was emptied"
}
for package in "$new" "$old" "$new"; do
    dpkg --install "$package"
    is 'after an upgrade' "$(state)" "ii $(version "$package")"
    kept 'after an upgrade'
    is 'the unit' "$(enabled)" enabled
done
dpkg --remove tachyon-bpf
is 'removed' "$(state)" "rc $(version "$new")"
gone /usr/bin/tachyon-bpf "$unit" /usr/share/doc/tachyon-bpf
kept 'after removal'
dpkg --install "$new"
kept 'installed again'
is 'the unit' "$(enabled)" enabled

dpkg --purge tachyon-bpf
gone /etc/tachyon-bpf "$spool"
files >/tmp/after
diff /tmp/before /tmp/after || fail 'the files differ from those before'
