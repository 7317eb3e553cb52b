#!/bin/sh
# The guest's part of `systemd.rs`, run by a unit of its own once the system is up: installs the package, runs the agent under
# systemd as its manual says, and sends what came of it through the second serial line.
# No step may end the script: what failed is seen in the results, which always travel.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8
spool=/var/spool/tachyon-bpf
mkdir -p /trial/out
cd /trial/out || exit
say() {
    echo "guest: $*, $(cut -d ' ' -f 1 /proc/uptime) s after boot" >/dev/console
}
# until_so SECONDS COMMAND...
until_so() {
    end=$(($(cut -d . -f 1 /proc/uptime) + $1))
    shift
    until "$@" || [ "$(cut -d . -f 1 /proc/uptime)" -ge "$end" ]; do
        sleep 0.5
    done
}
# How a unit does, in lines of NAME=VALUE.
state() {
    systemctl show tachyon-bpf --property ActiveState,SubState,Result,NRestarts,MainPID >"$1"
}
main_pid() {
    systemctl show tachyon-bpf --property MainPID --value
}
segments() {
    find "$spool" -name '*.tach' | wc -l
}
has_segments() {
    [ "$(segments)" -ge "$1" ]
}
is_told() {
    journalctl --unit tachyon-bpf --no-pager | grep -q "$1"
}

say 'systemd is up'
systemctl is-system-running >running
systemd --version | head -1 >version
dpkg --install /trial/tachyon-bpf.deb >install 2>&1
echo $? >install.status
systemctl is-enabled tachyon-bpf >enabled
# Debian's kernel wants more than the agent has; `doctor` says so.
echo 2 >/proc/sys/kernel/perf_event_paranoid
# A segment each few seconds, and a watchdog that bites while one waits for it. An emulated processor has no share to spare.
sed -i 's/^# length = "60s"$/length = "5s"/' /etc/tachyon-bpf/agent.toml
mkdir -p /etc/systemd/system/tachyon-bpf.service.d
printf '[Service]\nRestartSec=1s\nWatchdogSec=30s\nTimeoutStartSec=300s\nCPUQuota=\n' >/etc/systemd/system/tachyon-bpf.service.d/trial.conf
systemctl daemon-reload

systemd-run --quiet --unit=shop --setenv=OTEL_SERVICE_NAME=shop --uid=nobody \
    /usr/bin/python3 -c 'while True: sum(number * number for number in range(10000))'

# Returns when the agent has said that it is ready.
systemctl enable --now tachyon-bpf >start 2>&1
echo $? >start.status
state started
say 'the agent is ready'
until_so 60 has_segments 2
systemctl reload tachyon-bpf >reload 2>&1
echo $? >reload.status
until_so 20 is_told 'the configuration was read again'
grep -E '^(Uid|Cap(Eff|Prm|Amb|Bnd)|NoNewPrivs|Seccomp):' "/proc/$(main_pid)/status" >status
say 'reloaded'

# Killed within a segment: the next one carries on.
killed=$(main_pid)
sleep 2
kill -KILL "$killed"
another() {
    [ "$(main_pid)" != "$1" ] && [ "$(main_pid)" != 0 ]
}
until_so 60 another "$killed"
until_so 120 systemctl --quiet is-active tachyon-bpf
until_so 30 is_told 'recovered'
state killed
say 'killed and started again'

# It does not answer: systemd ends it.
stopped=$(main_pid)
before=$(segments)
until_so 60 has_segments $((before + 1))
kill -STOP "$stopped"
until_so 120 another "$stopped"
until_so 120 systemctl --quiet is-active tachyon-bpf
state watchdog
say 'the watchdog was met'

before=$(segments)
until_so 60 has_segments $((before + 1))
systemctl stop tachyon-bpf >stop 2>&1
echo $? >stop.status
state stopped
ls -la "$spool" >spool
systemd-analyze security --no-pager tachyon-bpf >security 2>&1
journalctl --unit tachyon-bpf --no-pager --output=cat >journal
tachyon-bpf report --json "$spool" >report.json 2>report.log
mkdir accounts
cp "$spool"/*.json accounts
dpkg --purge tachyon-bpf >purge 2>&1
echo $? >purge.status
systemctl list-units --all --no-legend 'tachyon-bpf*' >left
say 'purged'

touch complete
tar -C /trial/out -czf /trial/results.tar.gz .
stty -F /dev/ttyS1 raw 2>/dev/null
base64 /trial/results.tar.gz >/dev/ttyS1
sync
systemctl poweroff --force --force
