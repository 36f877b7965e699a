#!/bin/busybox sh
# First process of the lab: the disks, then what is on them.
export PATH=/bin
busybox mount -t proc proc /proc
busybox --install -s /bin
mount -t devtmpfs dev /dev
for module in /modules/*.ko; do insmod "$module"; done
until [ -b /dev/vda ] && [ -b /dev/vdb ]; do sleep 0.1; done
mount -t ext4 -o noatime /dev/vda /new
mkdir -p /new/lab
mount -t ext4 -o noatime /dev/vdb /new/lab
umount /proc /dev
exec switch_root /new /bin/bash /lab/init
