#!/bin/busybox sh
# The guest's first process: records a live interpreter and sends what came of it through the second serial line.
# No step may end the script: what failed is seen in the results, which always travel.
. /guest.sh
say "kernel $(cat kernel)"

/usr/bin/python3.11 -I -S -X utf8 /known_stack.py >target 2>target.log &
target=$!
wait_for ready target
say "python has pid $target"

# Whether a thread can be met between its wait and its own code, which the profiler has no part in.
kick >kick 2>kick.log
say 'kicked, the profiler comes next'

# programs PID: a line for each BPF program that a process holds.
programs() {
    for info in "/proc/$1/fdinfo/"*; do
        grep -q prog_type "$info" && grep -E 'prog_type|prog_id|verified_insns' "$info" | tr '\n' ' ' && echo
    done 2>/dev/null
    true
}

# record NAME ARGUMENTS...: a recording, its export and what the kernel tells of its programs, in a directory of that name.
record() {
    name=$1
    shift
    mkdir -p "$name"
    tachyon-bpf -p "$target" --frequency 199 -o "$name/out.tach" --report "$name/report.json" "$@" >"$name/record.log" 2>&1 &
    profiler=$!
    # The kernel tells of each loaded program through its descriptor, while the recording runs; verified_insns from 5.16 on.
    # The output is opened when those are gone that only tried out what the kernel can; the verifier may still be at work.
    # xtask/src/vm/verdict.rs counts them.
    case " $* " in *" --no-native "*) all=8 ;; *) all=9 ;; esac
    tries=0
    until [ -e "$name/out.tach.part" ] && programs "$profiler" >"$name/programs" && [ "$(grep -o 'prog_id:.[0-9]*' "$name/programs" | sort -u | wc -l)" -ge "$all" ]; do
        [ "$tries" -lt 900 ] && kill -0 "$profiler" 2>/dev/null || break
        usleep 100000
        tries=$((tries + 1))
    done
    wait "$profiler"
    echo $? >"$name/record.status"
    tachyon-bpf export "$name/out.tach" -o "$name/out.collapsed" --format collapsed >"$name/export.log" 2>&1
    echo $? >"$name/export.status"
}

# refuses NAME COMMAND...: what the profiler and its doctor say, run by that command; most of them it is expected to refuse.
refuses() {
    name=$1
    shift
    mkdir -p "$name"
    chmod 777 "$name"
    "$@" tachyon-bpf -p "$target" --no-native --duration 1s -o "$name/out.tach" >"$name/record.log" 2>&1
    echo $? >"$name/record.status"
    "$@" tachyon-bpf doctor >"$name/doctor" 2>&1
}

if [ -x /usr/bin/tachyon-bpf ]; then
    tachyon-bpf doctor >doctor 2>&1
    say 'doctor'
    record python --no-native --duration 3s
    say 'python'
    # With what is the default on this machine: native frames where they can be had.
    record default --native=all --duration 2s
    say 'default'
    # As many frames as a sample holds, and more: the most tail calls that one takes.
    /usr/bin/python3.11 -I -S -X utf8 /deepest.py >deep 2>deep.log &
    deep=$!
    wait_for ready deep
    mkdir deepest
    # With the programs that follow tasks, here and in the two below: each kernel's verifier looks at all of them.
    tachyon-bpf -p "$deep" --frequency 49 --interpreter-frames --async --duration 3s -o deepest/out.jsonl --report deepest/report.json \
        >deepest/record.log 2>&1
    echo $? >deepest/record.status
    kill "$deep"
    say 'deepest'
    # A thread that waits between its turns: whether what the kick meets is the line that waits.
    /usr/bin/python3.11 -I -S -X utf8 /waits.py >waits 2>waits.log &
    waits=$!
    wait_for ready waits
    mkdir waiting
    tachyon-bpf -p "$waits" --off-cpu --async --frequency 49 --duration 3s -o waiting/out.jsonl --report waiting/report.json \
        >waiting/record.log 2>&1
    echo $? >waiting/record.status
    say 'waiting'
    # Two events that are the same ones: a thread leaves its CPU, counted by perf and as a tracepoint.
    mkdir events
    tachyon-bpf -p "$waits" -e context-switches -e sched:sched_switch --async --duration 2s -o events/out.jsonl \
        --report events/report.json >events/record.log 2>&1
    echo $? >events/record.status
    kill "$waits"
    say 'recorded'
    # A CPU that goes and comes back: what runs on it then is sampled.
    mkdir hotplug
    if [ -w /sys/devices/system/cpu/cpu1/online ]; then
        tachyon-bpf -p "$target" --no-native --frequency 199 -o hotplug/out.jsonl --report hotplug/report.json \
            >hotplug/record.log 2>&1 &
        profiler=$!
        wait_until_loaded hotplug/out.jsonl
        sleep 1
        echo 0 >/sys/devices/system/cpu/cpu1/online
        sleep 1
        echo 1 >/sys/devices/system/cpu/cpu1/online
        sleep 1
        taskset -p 2 "$target" >/dev/null
        cut -d ' ' -f 1 /proc/uptime >hotplug/there
        sleep 3
        kill -INT "$profiler"
        wait "$profiler"
        echo $? >hotplug/record.status
        taskset -p ffff "$target" >/dev/null
    elif [ ! -e /sys/devices/system/cpu/cpu1/online ]; then
        echo "cpu1 cannot go" >hotplug/none
    fi
    # Events on many CPUs and nothing to sample.
    if [ "$(nproc)" -gt 2 ]; then
        kill -STOP "$target"
        record idle --no-native --duration 2s
        kill -CONT "$target"
    fi
    if [ -x /usr/bin/setpriv ]; then
        # Less locked memory than the maps take, and no right to raise it, where they count (before 5.11). busybox takes no
        # capability away.
        # The maps of the recordings before are freed some time after their end, and count until then.
        case $(cat kernel) in
        5.*) sleep 3 && (ulimit -l 64 && refuses memlock /usr/bin/setpriv --inh-caps=-sys_resource --bounding-set=-sys_resource) ;;
        esac
        # Exactly what is needed, at Debian's own level of perf_event_paranoid and below it.
        few=-all,+bpf,+perfmon,+sys_ptrace,+dac_read_search
        nobody="/usr/bin/setpriv --reuid 65534 --regid 65534 --clear-groups"
        nobody="$nobody --inh-caps=$few --ambient-caps=$few --bounding-set=$few"
        ulimit -l unlimited
        refuses paranoid $nobody
        echo 2 >/proc/sys/kernel/perf_event_paranoid
        refuses capable $nobody
    fi
    # Last, for there is no way back.
    mount -t securityfs securityfs /sys/kernel/security
    echo confidentiality >/sys/kernel/security/lockdown
    refuses lockdown env
fi
kill "$target"
send
