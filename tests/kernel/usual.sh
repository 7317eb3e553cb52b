#!/bin/busybox sh
# The first process of a guest with many processors: records one busy process with default options, then all Python processes, and
# sends how often the profiler's threads woke meanwhile (xtask/src/bench/usual/many_cpus.rs).
. /guest.sh

nproc >cpus
head -c 8 /dev/zero >/tmp/none
cp /tmp/none /tmp/counter
/usr/bin/python3.11 -I -S -X utf8 /deep.py 30 0 /tmp/counter 0 2>target.log &
target=$!
# It works as soon as it counts.
tries=0
while cmp -s /tmp/none /tmp/counter && [ "$tries" -lt 200 ]; do
    usleep 100000
    tries=$((tries + 1))
done
say "python has pid $target"

# The time since boot, then how often each of the profiler's threads has slept.
moment() {
    cut -d ' ' -f 1 /proc/uptime
    grep -h '^voluntary_ctxt_switches' "/proc/$profiler/task/"*/status
}

# watch NAME OPTIONS...: a recording, watched for 20 s from 10 s after its start on, in a directory of that name.
watch() {
    name=$1
    shift
    mkdir "$name"
    tachyon-bpf record "$@" --frequency 99 -o "$name/out.tach" --report "$name/report.json" >"$name/record.log" 2>&1 &
    profiler=$!
    wait_until_loaded "$name/out.tach"
    sleep 10
    moment >"$name/before"
    sleep 20
    moment >"$name/after"
    grep '^VmHWM' "/proc/$profiler/status" >"$name/memory"
    kill -INT "$profiler"
    wait "$profiler"
    echo $? >"$name/record.status"
    rm "$name/out.tach"
    say "$name"
}

say 'the profiler comes next'
watch process --pid "$target"
watch all --all-python
kill "$target"
send
