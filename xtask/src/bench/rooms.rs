//! Which room of the kernel, or of the server, a sampled function belongs to.
//! Never hides what it does not know: such functions are of the room `rest`, and are printed as all others.

use serde::{Deserialize, Serialize};

/// One line of a profile.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Spot {
    /// The thread's name.
    pub(crate) thread: String,
    /// The program, library or kernel module.
    pub(crate) object: String,
    pub(crate) function: String,
    /// Whether it ran in the kernel.
    pub(crate) kernel: bool,
    pub(crate) samples: u64,
}

/// The rooms, in the order in which they are shown.
pub(crate) const ROOMS: [&str; 14] = [
    "load generator",
    "server",
    "system calls and interrupts",
    "aio",
    "io_uring",
    "ublk_drv",
    "loop",
    "block layer",
    "file system",
    "vfs and direct I/O",
    "null_blk",
    "memory",
    "scheduler and tasks",
    "rest",
];

/// Beginnings of kernel functions' names (leading underscores left out) and their rooms; the first that fits counts.
const PREFIXES: &[(&str, &[&str])] = &[
    // perf does not say which module a function is from.
    ("ublk_drv", &["ublk_"]),
    ("io_uring", &["loop_rw_iter"]),
    ("loop", &["loop_", "lo_"]),
    ("null_blk", &["null_", "copy_to_nullb", "copy_from_nullb"]),
    (
        "aio",
        &[
            "aio_",
            "io_submit_one",
            "io_getevents",
            "do_io_getevents",
            "read_events",
            "lookup_ioctx",
            "x64_sys_io_submit",
            "x64_sys_io_getevents",
            "get_reqs_available",
            "put_reqs_available",
            "iocb_",
            "user_refill_reqs",
        ],
    ),
    ("block layer", &["io_schedule", "io_account"]),
    (
        "io_uring",
        &["io_", "x64_sys_io_uring", "do_io_uring", "tctx_", "req_", "ctx_flush", "loop_rw_iter", "uring_"],
    ),
    ("file system", &["ext4_", "iomap_", "jbd2_", "xfs_", "btrfs_", "es_", "inode_", "mark_inode"]),
    (
        "block layer",
        &[
            "blk",
            "bio_",
            "submit_bio",
            "bdev_",
            "elv_",
            "sbitmap",
            "bvec_",
            "rq_",
            "req_bio",
            "biovec",
            "bdi_",
            "part_",
            "update_io_ticks",
            "disk_",
            "get_max_",
            "dd_",
            "attempt_",
            "wbt_",
            "rq_qos",
            "mempool",
        ],
    ),
    ("block layer", &["bio"]),
    (
        "vfs and direct I/O",
        &[
            "vfs_",
            "file_",
            "generic_",
            "kiocb",
            "touch_atime",
            "atime_",
            "iov_iter",
            "import_",
            "fget",
            "fput",
            "rw_verify",
            "security_",
            "dio_",
            "filemap_",
            "mapping_",
            "lock_",
            "copy_from_iter",
            "copy_to_iter",
            "copy_page",
            "iter_",
            "fsnotify",
            "invalidate_",
            "mnt_",
            "current_time",
            "ktime_get_coarse",
            "timestamp_",
            "sb_",
            "percpu_down",
            "percpu_up",
            "down_",
            "up_",
            "rwsem",
        ],
    ),
    (
        "memory",
        &[
            "pin_user",
            "gup",
            "unpin_",
            "get_user_pages",
            "internal_get_user_pages",
            "try_grab",
            "try_get_folio",
            "kmem_cache",
            "kmalloc",
            "kfree",
            "kvfree",
            "slab_",
            "page_",
            "folio",
            "memcpy",
            "memset",
            "memcg",
            "mod_",
            "free_",
            "alloc_",
            "rmqueue",
            "get_page",
            "radix_tree",
            "xa_",
            "xas_",
            "clear_page",
            "try_charge",
            "follow_page",
            "unmap_",
            "handle_mm",
            "pte_",
            "obj_cgroup",
            "refill_obj",
            "count_memcg",
            "lru_",
            "is_valid_gup",
            "check_heap",
            "check_object",
            "virt_addr",
        ],
    ),
    (
        "scheduler and tasks",
        &[
            "sched",
            "try_to_wake",
            "ttwu",
            "wake",
            "pick_",
            "update_",
            "enqueue",
            "dequeue",
            "task_work",
            "switch_",
            "prepare_to",
            "finish_",
            "context_switch",
            "set_next",
            "put_prev",
            "place_entity",
            "reweight",
            "resched",
            "select_task",
            "psi_",
            "autoremove",
            "default_wake",
            "put_task",
            "queue_work",
            "process_one_work",
            "worker_",
            "kick_pool",
            "insert_work",
            "kthread",
            "avg_",
            "entity_",
            "check_preempt",
            "cpuacct",
            "raw_spin_rq",
            "native_load",
            "yield",
            "wq_",
            "get_work",
            "set_work",
            "rb_",
            "cgroup_",
            "rcu_",
            "native_sched",
            "sugov",
            "dl_",
            "hrtick",
            "hrtimer",
            "put_pid",
            "pvclock",
            "kvm_clock",
            "ktime_get",
            "propagate",
            "vruntime",
            "calc_",
            "min_vruntime",
            "task_",
            "work_",
            "move_",
            "assign_work",
            "max_vruntime",
            "thread_",
        ],
    ),
    (
        "system calls and interrupts",
        &[
            "entry_",
            "do_syscall",
            "syscall",
            "x64_sys",
            "irq",
            "sysvec",
            "asm_",
            "exit_to",
            "error_",
            "exc_",
            "common_interrupt",
            "native_",
            "apic",
            "do_softirq",
            "handle_softirqs",
            "tick_",
            "copy_from_user",
            "copy_to_user",
            "rep_",
            "x86_",
            "fpregs",
            "ret_from",
            "perf_",
            "smp_",
            "call_function",
            "llist",
            "x64_",
            "arch_",
            "srso",
            "fentry",
            "do_user",
            "copy_user",
            "might_",
            "rep_stos",
            "get_user",
            "put_user",
            "local_bh",
        ],
    ),
];

impl Spot {
    /// The room that this function's samples count for.
    pub(crate) fn room(&self) -> &'static str {
        let load = self.thread == "fio";
        if !self.kernel {
            return if load { "load generator" } else { "server" };
        }
        let name = self.function.trim_start_matches('_');
        // null_blk copies with interrupts off; the sample is taken where they come on again.
        if name == "raw_spin_unlock_irq" {
            return "null_blk";
        }
        let fits = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
        PREFIXES.iter().find(|(_, prefixes)| fits(prefixes)).map_or("rest", |(room, _)| room)
    }

    /// The CPU had nothing to do.
    fn idle(&self) -> bool {
        self.function == "pv_native_safe_halt" || self.thread.starts_with("swapper")
    }

    /// perf itself and the command that it waits for.
    fn observer(&self) -> bool {
        self.thread == "sleep" || self.thread.starts_with("perf")
    }
}

/// Reads `perf report --sort comm,dso,symbol -n -t '|'`: share, samples, thread, object, function.
pub(crate) fn parse(report: &str) -> Vec<Spot> {
    let line = |line: &str| {
        let mut fields = line.split('|').map(str::trim);
        let _share = fields.next()?.strip_suffix('%')?;
        let samples = fields.next()?.parse().ok()?;
        let (thread, object) = (fields.next()?, fields.next()?);
        // What remains may hold the separator: names of Rust functions.
        let symbol = fields.collect::<Vec<_>>().join("|");
        // perf adds a column about cycles even where it has none.
        let symbol = symbol.trim_end_matches(['-', ' ']).trim_end_matches('|').trim_end();
        let (mode, function) = symbol.split_once(' ')?;
        Some(Spot {
            thread: thread.to_owned(),
            object: object.to_owned(),
            function: function.trim().to_owned(),
            kernel: mode == "[k]",
            samples,
        })
    };
    report.lines().filter_map(line).filter(|spot| !spot.idle() && !spot.observer()).collect()
}

/// The samples of each room, in the order of [`ROOMS`].
pub(crate) fn by_room(spots: &[Spot]) -> [u64; ROOMS.len()] {
    ROOMS.map(|room| spots.iter().filter(|spot| spot.room() == room).map(|spot| spot.samples).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = "# Overhead|Samples|Command|Shared Object|Symbol\n\
        \x20   12.50%|     1250|fio|fio|[.] td_io_queue\n\
        \x20    5.00%|      500|becket-io-0|becket|[.] <a::B as c::D>::e|f|-      -\n\
        \x20    4.00%|      400|becket-io-0|[ublk_drv]|[k] ublk_queue_rqs\n\
        \x20    3.00%|      300|fio|[kernel.kallsyms]|[k] io_submit_one\n\
        \x20    2.00%|      200|becket-io-0|[kernel.kallsyms]|[k] __io_submit_flush_completions\n\
        \x20    1.00%|      100|becket-io-0|[kernel.kallsyms]|[k] blk_mq_submit_bio\n\
        \x20    1.00%|      100|becket-io-0|[kernel.kallsyms]|[k] zzz\n\
        \x20    1.00%|      100|sleep|[kernel.kallsyms]|[k] zap_pte_range|-      -\n\
        \x20   40.00%|     4000|swapper|[kernel.kallsyms]|[k] pv_native_safe_halt\n\n";

    #[test]
    fn reports_are_read_and_idling_left_out() {
        let spots = parse(REPORT);
        assert_eq!(spots.len(), 7);
        assert_eq!(spots[1].function, "<a::B as c::D>::e|f");
        assert!(!spots[1].kernel && spots[2].kernel);
        assert_eq!(spots[0].samples, 1250);
    }

    #[test]
    fn functions_find_their_rooms() {
        let rooms: Vec<&str> = parse(REPORT).iter().map(Spot::room).collect();
        assert_eq!(rooms, ["load generator", "server", "ublk_drv", "aio", "io_uring", "block layer", "rest"]);
    }

    #[test]
    fn no_sample_is_lost_between_the_rooms() {
        let spots = parse(REPORT);
        let all: u64 = spots.iter().map(|spot| spot.samples).sum();
        assert_eq!(by_room(&spots).iter().sum::<u64>(), all);
    }

    #[test]
    fn every_prefix_is_of_a_room_that_is_shown() {
        for (room, _) in PREFIXES {
            assert!(ROOMS.contains(room), "{room}");
        }
    }
}
