#!/bin/bash
# Process 1 of the lab's root disk: makes a machine a node can run on, runs the command, powers off.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/lab/home LC_ALL=C.UTF-8

finish() {
    printf '%s\n' "$1" >/lab/status
    sync
    # What still runs holds files; the disk is read after this machine is gone.
    echo s >/proc/sysrq-trigger
    mount -o remount,ro /lab 2>/dev/null || echo u >/proc/sysrq-trigger
    echo o >/proc/sysrq-trigger
    sleep 60
}

prepare() {
    mount -t proc -o nosuid,nodev,noexec proc /proc
    mount -t sysfs -o nosuid,nodev,noexec sys /sys
    mkdir -p /dev/pts /dev/shm /store "$HOME"
    mount -t devpts -o mode=620,ptmxmode=666 devpts /dev/pts
    mount -t tmpfs -o mode=1777 tmp /dev/shm
    mount -t tmpfs -o mode=755 run /run
    mount -t tmpfs -o mode=1777 tmp /tmp
    mount -t cgroup2 -o nosuid,nodev,noexec cgroup /sys/fs/cgroup
    ln -sfn /proc/self/fd /dev/fd
    mkdir -p "/lib/modules/$(uname -r)" && mount --bind /lab/modules "/lib/modules/$(uname -r)" &&
        modprobe -a kvm-amd xfs tun veth loop nf_tables nft_masq
    mount -t xfs -o noatime,nouuid /dev/vdc /store
    ip link set lo up
    hostname lab
    printf '127.0.0.1 localhost lab\n' >/etc/hosts
    printf '%s-%s\n' lab keiki | md5sum | cut -c1-32 >/etc/machine-id
    # What a host offers as control groups, where its own services have their place.
    printf '+cpu +memory +pids +io\n' >/sys/fs/cgroup/cgroup.subtree_control
    [ -c /dev/kvm ]
}

mount -t devtmpfs dev /dev
# The kernel and what happens here speak on the serial port, the command on a port of its own.
exec </dev/null >/dev/ttyS0 2>&1
prepare || finish 125
exec >/dev/hvc0 2>&1
stty -onlcr </dev/hvc0
cd /lab/in
set -a
. /lab/environment
set +a
readarray -d '' -t command </lab/command
setsid -w "${command[@]}"
finish $?
