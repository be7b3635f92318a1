//! The control law of the governor: how many operations are worth having in flight, learnt by comparing
//! throughputs. Knows neither ring nor request. Its only clock is its caller's, so that tests can replay any
//! backing.
//!
//! # Design
//!
//! Two windows, `low` and `high`, are held in turn for a short epoch each. The difference of their
//! throughputs, over the mean of both, is the gain. Pairs of epochs follow each other until the mean gain is
//! on one side of the threshold by more than its error, or until a [`Trial`] has had its time. One pair that
//! differs by far decides at once, so a backing that scales is climbed at one epoch a step.
//!
//! - *Up*: `high` is four times `low`. It is taken when it moves at least [`RISE`] more. Four, not two,
//!   because on the smooth shoulder of a real backing doubling gains little and four times shows what is
//!   still to be had.
//! - *Down*: `low` is half of `high`. It is taken when `high` moves less than [`FALL`] more.
//!
//! A round climbs up while that pays and then down while that costs nothing. Then the window rests, at first
//! for [`REST`], each time twice as long up to [`LONGEST_REST`], unless the round found a changed backing.
//! Both thresholds belong together: four times is two halvings, and two halvings that cost less than `FALL`
//! each lose together what `RISE` asks for. So no window is taken in one direction and given up in the other
//! for ever. A trial whose time is up without an answer leaves the window as it was, so noise does not make
//! it wander.
//!
//! Time counts only while the window was full. Operations that were begun under another window are waited for
//! first. Epochs begin and end with turns of the I/O thread, so that operations that finish together count
//! together. An epoch has several windows' worth of completions.
//!
//! Sources: Heiss and Wagner, *Adaptive Load Control in Transaction Processing Systems* (VLDB 1991), hold the
//! load where throughput no longer rises, by incremental steps. Hellerstein, Morrison and Eilebrecht,
//! *Applying Control Theory in the Real World: Experience with Building a Controller for the .NET Thread
//! Pool* (2009), show why a hill climber must compare against noise. Here this is a paired comparison with
//! its standard error. Laws by latency (TCP Vegas, Netflix's concurrency-limits) need the latency of an idle
//! backing, and requests of 512 bytes and of 1 MiB have none in common. Additive increase with multiplicative
//! decrease was tried (docs/decisions/0080-law-of-the-governor.md).

/// A fourfold window must move so much more, as a gain, to be taken.
const RISE: f64 = 0.04;
/// A doubled window that moves less than this more is given up.
const FALL: f64 = 0.02;
/// A gain beyond which, and beyond its error, one pair of epochs is enough.
const PLAIN: f64 = 0.18;
/// Distance from the threshold, in standard errors, that decides.
const SURE: f64 = 2.5;
/// Error of an epoch with one completion, where nothing better is known: what operations of mixed sizes show.
const SPREAD: f64 = 0.3;
/// The same for operations whose lengths are random.
const WILD: f64 = 1.0;
/// Pairs of epochs whose differences show the error by themselves.
const PAIRS_THAT_SHOW: u32 = 6;
/// The window that nothing is known about.
const FIRST_WINDOW: u16 = 2;
/// Shortest epoch: its time in nanoseconds and its completions.
const EPOCH: u64 = 5_000_000;
const EPOCH_COUNT: u32 = 4;
/// The same in windows: in the first round, which is in a hurry, and later, when the waves in which
/// operations that began together end together are to weigh less.
const FIRST_WINDOWS: u32 = 2;
const LATER_WINDOWS: u32 = 8;
/// An epoch of so many nanoseconds ends with fewer.
const LONG_EPOCH: u64 = 200_000_000;
/// Time of a trial in nanoseconds: in the first round, and later. It has two pairs of epochs at least.
const FIRST_TRIAL: u64 = 100_000_000;
const LATER_TRIAL: u64 = 2_000_000_000;
/// How long the window rests after a round, in nanoseconds: at first, and at most.
const REST: u64 = 250_000_000;
const LONGEST_REST: u64 = 4_000_000_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Up,
    Down,
}

/// A comparison under way.
#[derive(Debug)]
struct Trial {
    direction: Direction,
    low: u16,
    high: u16,
    began: u64,
    /// Throughput of the lower window, once its epoch is over.
    low_rate: Option<f64>,
    /// Of the pairs of epochs: how many, the sum of their gains, and the sum of the squares.
    pairs: u32,
    gains: f64,
    squares: f64,
    /// Completions under each window.
    low_count: u32,
    high_count: u32,
}

impl Trial {
    fn add(&mut self, low: f64, high: f64) {
        // By the mean of both, so that a gain and the loss on the way back are the same number.
        let gain = 2.0 * (high - low) / (high + low);
        self.pairs += 1;
        self.gains += gain;
        self.squares += gain * gain;
    }

    /// Whether to move: `None` while in doubt.
    fn verdict(&self, now: u64, first_round: bool) -> Option<bool> {
        let pairs = f64::from(self.pairs);
        let mean = self.gains / pairs;
        let counted =
            (1.0 / f64::from(self.low_count.max(1)) + 1.0 / f64::from(self.high_count.max(1))).sqrt();
        if self.pairs < 3 {
            let plain = mean.abs() > PLAIN + WILD * counted;
            return plain.then_some((mean > 0.0) == (self.direction == Direction::Up));
        }
        let variance = (self.squares - self.gains * mean).max(0.0) / (pairs - 1.0);
        let shown = (variance / pairs).sqrt();
        let error = if self.pairs < PAIRS_THAT_SHOW { shown.max(SPREAD * counted) } else { shown };
        // How far the gain speaks for moving.
        let lean = match self.direction {
            Direction::Up => mean - RISE,
            Direction::Down => FALL - mean,
        };
        if lean.abs() > SURE * error {
            return Some(lean > 0.0);
        }
        let time = if first_round { FIRST_TRIAL } else { LATER_TRIAL };
        (now.saturating_sub(self.began) >= time).then_some(false)
    }
}

/// What one epoch has counted.
#[derive(Debug, Default)]
struct Epoch {
    /// Nanoseconds in which the window was full.
    time: u64,
    work: u64,
    count: u32,
}

/// Finds the window of one kind of operation.
#[derive(Debug)]
pub(super) struct Law {
    ceiling: u16,
    /// What is held to be best.
    best: u16,
    /// What is allowed now: the best, or what a trial compares it with.
    window: u16,
    trial: Option<Trial>,
    epoch: Epoch,
    /// Completions to wait for until the window's own are seen.
    stale: u16,
    /// The last turn, by the ring's clock.
    last: u64,
    /// The window was full between the last turn and the one before.
    counts: bool,
    /// When the next round begins.
    due: u64,
    rest: u64,
    /// The best window before this round, and where the last move went.
    round: u16,
    moved: Option<Direction>,
    first_round: bool,
}

impl Law {
    /// A law that allows at most `ceiling`.
    pub(super) fn new(ceiling: u16) -> Law {
        let ceiling = ceiling.max(1);
        let first = FIRST_WINDOW.min(ceiling);
        Law {
            ceiling,
            best: first,
            window: first,
            trial: None,
            epoch: Epoch::default(),
            stale: 0,
            last: 0,
            counts: false,
            due: 0,
            rest: REST,
            round: first,
            moved: None,
            first_round: true,
        }
    }

    /// How many may be in flight.
    pub(super) fn window(&self) -> u16 {
        self.window
    }

    /// Takes note that it is `now` and that `in_flight` were under way since the last call.
    pub(super) fn turn(&mut self, now: u64, in_flight: u16) {
        let passed = now.saturating_sub(self.last);
        if passed == 0 {
            return;
        }
        self.last = now;
        if self.is_whole() {
            self.conclude();
        }
        if self.trial.is_none() && now >= self.due && in_flight >= self.window {
            self.round = self.best;
            self.begin(Direction::Up, None);
        }
        // More than the lower window shows what the higher one is worth, even where demand does not fill it.
        let full = match &self.trial {
            Some(trial) if self.window == trial.high => trial.low + 1,
            _ => self.window,
        };
        self.counts = self.stale == 0 && in_flight >= full;
        if self.counts {
            self.epoch.time += passed;
        }
    }

    /// One operation has ended in this turn, with so much work done.
    pub(super) fn completed(&mut self, work: u64) {
        if self.stale > 0 {
            self.stale -= 1;
        } else if self.counts {
            self.epoch.work += work;
            self.epoch.count += 1;
        }
    }

    fn is_whole(&self) -> bool {
        let Epoch { time, count, .. } = self.epoch;
        let windows = if self.first_round { FIRST_WINDOWS } else { LATER_WINDOWS };
        let enough = time >= EPOCH && count >= EPOCH_COUNT.max(windows * u32::from(self.window));
        self.trial.is_some() && (enough || (time >= LONG_EPOCH && count > 1))
    }

    /// Begins to compare the best window with a higher or a lower one; without room there, goes on to what
    /// follows. `known` is what an epoch of the lower one has shown just now: its rate and its completions.
    fn begin(&mut self, direction: Direction, known: Option<(f64, u32)>) {
        let (low, high) = match direction {
            Direction::Up => (self.best, self.best.saturating_mul(4).min(self.ceiling)),
            Direction::Down => (self.best / 2, self.best),
        };
        if low == 0 || low == high {
            return self.end_of(direction);
        }
        let first = if known.is_some() { high } else { low };
        let (low_rate, low_count) = known.map_or((None, 0), |(rate, count)| (Some(rate), count));
        let began = self.last;
        self.trial = Some(Trial {
            direction,
            low,
            high,
            began,
            low_rate,
            pairs: 0,
            gains: 0.0,
            squares: 0.0,
            low_count,
            high_count: 0,
        });
        self.hold(first);
    }

    /// There is nothing more to be had in this direction.
    fn end_of(&mut self, direction: Direction) {
        match direction {
            Direction::Up => self.begin(Direction::Down, None),
            Direction::Down => {
                self.trial = None;
                self.hold(self.best);
                let went = match self.best.cmp(&self.round) {
                    std::cmp::Ordering::Greater => Some(Direction::Up),
                    std::cmp::Ordering::Less => Some(Direction::Down),
                    std::cmp::Ordering::Equal => None,
                };
                // A window that goes back where it came from is of no use either way: look less often.
                let news = went.is_some() && (self.moved.is_none() || self.moved == went);
                self.rest = if news { REST } else { (2 * self.rest).min(LONGEST_REST) };
                self.moved = went.or(self.moved);
                self.first_round = false;
                self.due = self.last + self.rest;
            }
        }
    }

    /// Sets the window and waits for what the other had begun.
    fn hold(&mut self, window: u16) {
        self.stale = if window == self.window { 0 } else { window.max(self.window).saturating_mul(2) };
        self.window = window;
        self.epoch = Epoch::default();
        self.counts = false;
    }

    /// Draws the conclusion from a whole epoch.
    fn conclude(&mut self) {
        let Some(trial) = &mut self.trial else { return };
        // In doubles: the numbers are far from where they lose a unit that matters.
        let rate = self.epoch.work as f64 / self.epoch.time.max(1) as f64;
        let Some(low_rate) = trial.low_rate.take().filter(|_| self.window == trial.high) else {
            trial.low_rate = Some(rate);
            trial.low_count += self.epoch.count;
            let high = trial.high;
            return self.hold(high);
        };
        trial.high_count += self.epoch.count;
        trial.add(low_rate, rate);
        let (direction, low, high) = (trial.direction, trial.low, trial.high);
        match (trial.verdict(self.last, self.first_round), direction) {
            (None, _) => self.hold(low),
            (Some(false), _) => self.end_of(direction),
            (Some(true), Direction::Up) => {
                let known = (rate, self.epoch.count);
                self.best = high;
                self.begin(direction, Some(known));
            }
            (Some(true), Direction::Down) => {
                self.best = low;
                self.begin(direction, None);
            }
        }
    }
}

#[cfg(test)]
mod tests;
