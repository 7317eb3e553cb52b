#!/bin/busybox sh
# The guest's first process: records a live interpreter and sends what came of it through the second serial line.
# No step may end the script: what failed is seen in the results, which always travel.
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tmpfs tmpfs /tmp
mount -t tracefs tracefs /sys/kernel/tracing
exec </dev/ttyS0 >/dev/ttyS0 2>&1
export PATH=/bin:/usr/bin HOME=/tmp
mkdir -p /tmp/out
cd /tmp/out || exit

uname -r >kernel
echo "guest: kernel $(cat kernel), $(cut -d ' ' -f 1 /proc/uptime) s after boot"

# Waits up to 20 s for a line in a file.
wait_for() {
    tries=0
    until grep -q "$1" "$2" 2>/dev/null || [ "$tries" -ge 200 ]; do
        usleep 100000
        tries=$((tries + 1))
    done
}

/usr/bin/python3.11 -I -S -X utf8 /known_stack.py >target 2>target.log &
target=$!
wait_for ready target
echo "guest: python has pid $target, $(cut -d ' ' -f 1 /proc/uptime) s after boot"

if [ -x /usr/bin/tachyon-bpf ]; then
    tachyon-bpf doctor >doctor 2>&1
    tachyon-bpf -p "$target" --duration 3s --frequency 199 -o out.tach --report report.json >record.log 2>&1 &
    profiler=$!
    # The kernel tells of each loaded program through its descriptor, while the recording runs; verified_insns from 5.16 on.
    # Five stages of sampling and four lifecycle hooks.
    tries=0
    until [ "$(grep -l prog_type "/proc/$profiler/fdinfo/"* 2>/dev/null | wc -l)" -ge 9 ] || [ "$tries" -ge 200 ]; do
        usleep 100000
        tries=$((tries + 1))
    done
    for info in "/proc/$profiler/fdinfo/"*; do
        grep -q prog_type "$info" && grep -E 'prog_type|prog_id|verified_insns' "$info" | tr '\n' ' ' && echo
    done >programs 2>/dev/null
    wait "$profiler"
    echo $? >record.status
    tachyon-bpf export out.tach -o out.collapsed --format collapsed >export.log 2>&1
    echo $? >export.status
fi
kill "$target"
echo "guest: sending results, $(cut -d ' ' -f 1 /proc/uptime) s after boot"
dmesg >dmesg
touch complete

stty -F /dev/ttyS1 raw -echo
tar -c -f - . | gzip -c | base64 >/dev/ttyS1
# The serial driver still holds the last bytes when the write returns.
stty -F /dev/ttyS1 -echo
sleep 1
poweroff -f
