# Each disk that becket serves over vhost-user: a file system is made, filled, read back and checked, while
# the host kills the disk's workers.
set -eu -o pipefail
found=0
for block in /sys/block/vd*; do
    case $(cat "$block/serial") in root | run | modules | scratch) continue ;; esac
    disk=/dev/${block##*/}
    # Feature 34 is the layout of the rings.
    packed=$(cut -c35 "$block/device/features")
    echo "$disk: packed $packed, $(ls "$block/mq" | wc -l) queues, $(blockdev --getsize64 "$disk") bytes"
    mkfs.ext4 -q "$disk"
    mkdir -p /mnt/disk /scratch/tree
    mount "$disk" /mnt/disk
    for round in $(seq 6); do
        for file in $(seq 40); do
            head -c $((file * 4099)) /dev/urandom >/scratch/tree/$file
        done
        mkdir /mnt/disk/$round
        cp /scratch/tree/* /mnt/disk/$round/
        (cd /scratch/tree && sha256sum *) >/scratch/sums.$round
        sync
        echo 3 >/proc/sys/vm/drop_caches
        for written in $(seq $round); do
            (cd /mnt/disk/$written && sha256sum --quiet -c /scratch/sums.$written)
        done
        rm /mnt/disk/$round/1?
        sed -i '/ 1[0-9]$/d' /scratch/sums.$round
        fstrim /mnt/disk
    done
    umount /mnt/disk
    e2fsck -fn "$disk" >/dev/null 2>&1
    echo "test disks::a_file_system_on_packed_rings_$packed ... ok"
    found=$((found + 1 + 10 * packed))
done
if dmesg | grep -iE 'I/O error|EXT4-fs (error|warning)'; then exit 1; fi
# One of each layout.
[ $found = 12 ]
echo "test disks::deaths_of_workers_are_not_noticed ... ok"
