//! Drives a vhost-user-blk back-end with random reads or writes, and prints what it did as one line of JSON.
//! It measures nothing but its own requests and the time.
#![forbid(unsafe_code)]

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use becket_virtio::{Driver, EVENT_IDX, IN, INDIRECT, OUT, PACKED, Shape};
use clap::Parser;
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};

/// Drive a vhost-user-blk back-end
#[derive(Parser)]
struct Args {
    /// The back-end's socket
    socket: PathBuf,
    /// Requests under way
    #[arg(long, default_value_t = 64)]
    depth: u16,
    /// Bytes of a request
    #[arg(long, default_value_t = 4096)]
    block: u32,
    /// How long
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Write instead of read
    #[arg(long)]
    write: bool,
    /// One after the other instead of at random
    #[arg(long)]
    sequential: bool,
    /// Lay the ring out as one table
    #[arg(long)]
    packed: bool,
    /// Look for results all the time instead of waiting for a notification
    #[arg(long)]
    poll: bool,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let socket = UnixStream::connect(&args.socket).context("cannot connect")?;
    let count = args.depth.next_power_of_two().max(2);
    let features = INDIRECT | EVENT_IDX | if args.packed { PACKED } else { 0 };
    let buffer = args.block.next_multiple_of(4096);
    let shape = Shape { queues: 1, count, depth: args.depth, buffer, features };
    let mut driver = Driver::start(socket.into(), shape)?;
    let capacity = u64::from_le_bytes(driver.front.config()?[..8].try_into()?) * 512;
    let blocks = capacity / u64::from(args.block);
    ensure!(blocks > 0, "the device is smaller than a request");
    let op = if args.write { OUT } else { IN };
    let mut random = SmallRng::seed_from_u64(1);
    let queue = &mut driver.queues[0];
    let mut next = 0;
    let mut submit = |queue: &mut becket_virtio::Queue| {
        next = if args.sequential { (next + 1) % blocks } else { random.random_range(0..blocks) };
        queue.submit(op, next * u64::from(args.block), args.block, &[], &[]);
    };
    while queue.has_room() {
        submit(queue);
    }
    let (began, time) = (Instant::now(), Duration::from_secs_f64(args.seconds));
    queue.announce();
    let (mut done, mut failed, mut turns) = (0u64, 0u64, 0u64);
    while began.elapsed() < time {
        let before = done;
        while let Some(ended) = queue.ended() {
            done += 1;
            failed += u64::from(ended.status != 0);
            submit(queue);
        }
        if done > before {
            turns += 1;
            queue.announce();
        } else if !args.poll {
            ensure!(queue.wait(Duration::from_secs(10))?, "no notification in 10 s");
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    let rate = done as f64 / seconds;
    println!(
        "{{\"ios\":{done},\"failed\":{failed},\"turns\":{turns},\"seconds\":{seconds:.3},\"per_second\":{rate:.0}}}"
    );
    Ok(())
}
