# What the first process of a guest begins with, whatever it is there for (`. /guest.sh`): file systems, the console, and a
# directory whose files `send` takes out of the guest.
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tmpfs tmpfs /tmp
mount -t tracefs tracefs /sys/kernel/tracing
exec </dev/console >/dev/console 2>&1
# xtask/src/vm/guest.rs looks for this line: what fails before it is not this project's doing.
echo 'the guest has booted'
# The line for the results differs between machines: it is an argument of the kernel.
results=$(tr ' ' '\n' </proc/cmdline | sed -n 's/^results=//p')
export PATH=/bin:/usr/bin HOME=/tmp
mkdir -p /tmp/out
cd /tmp/out || poweroff -f
uname -r >kernel

# say TEXT: a line on the console, with the time.
say() {
    echo "guest: $1, $(cut -d ' ' -f 1 /proc/uptime) s after boot"
}

# Waits up to 20 s for a line in a file.
wait_for() {
    tries=0
    until grep -q "$1" "$2" 2>/dev/null || [ "$tries" -ge 200 ]; do
        usleep 100000
        tries=$((tries + 1))
    done
}

# Waits until the profiler, whose process is $profiler, has opened its output, here $1, and its first perf event: that is once all
# programs are loaded, which takes long here.
wait_until_loaded() {
    tries=0
    until { [ -e "$1.part" ] && ls -l "/proc/$profiler/fd" 2>/dev/null | grep -q perf_event; } || [ "$tries" -ge 900 ]; do
        usleep 100000
        tries=$((tries + 1))
    done
}

# Sends the directory's files through the second serial line, and ends the guest.
send() {
    say 'sending results'
    dmesg >dmesg
    touch complete
    stty -F "/dev/$results" raw -echo
    tar -c -f - . | gzip -c | base64 >"/dev/$results"
    # The serial driver still holds the last bytes when the write returns.
    stty -F "/dev/$results" -echo
    sleep 1
    poweroff -f
}
