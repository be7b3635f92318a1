//! System call filters: lists of calls that are let through, as programs for the kernel.
//! It never says which calls those are, and a filter that is installed cannot be taken away.

use std::io;

use libc::{sock_filter, sock_fprog};

/// Where `struct seccomp_data` keeps the call's number, its architecture, and the lower half of each
/// argument.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = if cfg!(target_endian = "big") { 20 } else { 16 };
const ARGUMENT: u32 = 8;

/// `AUDIT_ARCH_*` of this architecture; of others no filter is known.
#[cfg(target_arch = "x86_64")]
const OURS: Option<u32> = Some(0xc000_003e);
#[cfg(target_arch = "aarch64")]
const OURS: Option<u32> = Some(0xc000_00b7);
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const OURS: Option<u32> = None;
/// Calls of x86's third interface have this bit and mean something else.
const FOREIGN: u32 = 0x4000_0000;

/// What becomes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is carried out.
    Allow,
    /// It fails with this errno.
    Refuse(u16),
    /// The process ends, as by a signal that cannot be caught.
    Kill,
}

impl Verdict {
    const fn code(self) -> u32 {
        match self {
            Verdict::Allow => libc::SECCOMP_RET_ALLOW,
            Verdict::Refuse(errno) => libc::SECCOMP_RET_ERRNO | errno as u32,
            Verdict::Kill => libc::SECCOMP_RET_KILL_PROCESS,
        }
    }
}

/// Which calls of a number are meant, by the lower 32 bits of one argument: all that the kernel looks at in
/// the calls here (commands, protections, flags).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When<'a> {
    /// All.
    Always,
    /// The argument is one of these.
    Is(u8, &'a [u32]),
    /// The argument has all of these bits.
    Has(u8, u32),
    /// The argument has none of these bits.
    HasNot(u8, u32),
}

/// That this kernel filters system calls.
///
/// # Errors
/// `ENOSYS` or `EINVAL`: it was built without that.
pub fn available() -> io::Result<()> {
    let action = libc::SECCOMP_RET_ERRNO;
    // SAFETY: the kernel reads one number, which lives until the call returns.
    let result =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0, &raw const action) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A program that judges calls. What no rule is about fails with `EPERM`.
#[derive(Debug, Clone)]
pub struct Filter {
    program: Vec<sock_filter>,
}

impl Filter {
    /// A filter that lets nothing through and kills who makes calls of another architecture's.
    ///
    /// # Errors
    /// `Unsupported`: the numbers of calls are not known for this architecture.
    pub fn new() -> io::Result<Filter> {
        let ours = OURS.ok_or(io::ErrorKind::Unsupported)?;
        let mut program =
            vec![load(ARCHITECTURE), jump(libc::BPF_JEQ, ours, 1, 0), verdict(Verdict::Kill), load(NUMBER)];
        if cfg!(target_arch = "x86_64") {
            program.extend([jump(libc::BPF_JSET, FOREIGN, 0, 1), verdict(Verdict::Kill)]);
        }
        Ok(Filter { program })
    }

    /// The next rule: the action for calls of `number` when the condition holds; otherwise they are refused.
    /// Of rules about one number the first counts.
    #[must_use]
    pub fn rule(mut self, number: libc::c_long, when: When<'_>, then: Verdict) -> Filter {
        let refuse = Verdict::Refuse(libc::EPERM as u16);
        let body = match when {
            When::Always => vec![verdict(then)],
            When::Is(argument, values) => {
                let mut body = vec![argument_of(argument)];
                // Each comparison skips the later ones and the refusal behind them.
                for (index, value) in values.iter().enumerate() {
                    body.push(jump(libc::BPF_JEQ, *value, (values.len() - index) as u8, 0));
                }
                body.extend([verdict(refuse), verdict(then)]);
                body
            }
            When::Has(argument, bits) => vec![
                argument_of(argument),
                statement(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, bits),
                jump(libc::BPF_JEQ, bits, 1, 0),
                verdict(refuse),
                verdict(then),
            ],
            When::HasNot(argument, bits) => {
                vec![argument_of(argument), jump(libc::BPF_JSET, bits, 0, 1), verdict(refuse), verdict(then)]
            }
        };
        // Numbers are small, and a rule is far shorter than the farthest jump: some ten values at most.
        self.program.push(jump(libc::BPF_JEQ, number as u32, 0, body.len() as u8));
        self.program.extend(body);
        self
    }

    /// Puts all threads of the process under the filter, those that they start, and what they execute. The
    /// kernel logs in its audit log the processes that it kills. It does not log calls that fail, because
    /// asking for one that a kernel may lack is not an attack.
    ///
    /// The calling thread must have set `no_new_privs`.
    ///
    /// # Errors
    /// `EINVAL` or `ENOSYS` if the kernel has no filters. `Other`: a thread is under a filter that the caller
    /// is not under.
    pub fn install(mut self) -> io::Result<()> {
        self.program.push(verdict(Verdict::Refuse(libc::EPERM as u16)));
        let len = u16::try_from(self.program.len()).map_err(io::Error::other)?;
        let program = sock_fprog { len, filter: self.program.as_mut_ptr() };
        // The last: threads go on as fast as before on kernels that slow filtered ones down. No foreign
        // programs run here that would have to be kept from guessing at each other's memory.
        let flags = libc::SECCOMP_FILTER_FLAG_TSYNC | libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW;
        // SAFETY: the kernel copies the program, which lives and has that length until the call returns.
        let result = unsafe {
            libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program)
        };
        match result {
            0 => Ok(()),
            ..0 => Err(io::Error::last_os_error()),
            thread => Err(io::Error::other(format!("thread {thread} is under another filter"))),
        }
    }

    /// What becomes of a call of this architecture's, by carrying the program out here: for tests.
    #[must_use]
    pub fn judge(&self, number: libc::c_long, arguments: [u32; 6]) -> u32 {
        let refused = Verdict::Refuse(libc::EPERM as u16).code();
        let (mut at, mut value) = (0, 0);
        while let Some(step) = self.program.get(at) {
            let (code, operand) = (u32::from(step.code), step.k);
            at += 1;
            let holds = match code & 0x07 {
                libc::BPF_RET => return operand,
                libc::BPF_LD => {
                    value = match operand {
                        NUMBER => number as u32,
                        ARCHITECTURE => OURS.unwrap_or(0),
                        argument => {
                            arguments.get(((argument - ARGUMENTS) / ARGUMENT) as usize).copied().unwrap_or(0)
                        }
                    };
                    continue;
                }
                libc::BPF_ALU => {
                    value &= operand;
                    continue;
                }
                _ => match code & 0xf0 {
                    libc::BPF_JEQ => value == operand,
                    _ => value & operand != 0,
                },
            };
            at += usize::from(if holds { step.jt } else { step.jf });
        }
        refused
    }
}

fn statement(code: u32, k: u32) -> sock_filter {
    sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

fn load(offset: u32) -> sock_filter {
    statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset)
}

fn argument_of(index: u8) -> sock_filter {
    load(ARGUMENTS + ARGUMENT * u32::from(index))
}

/// How many steps to skip when the condition holds, and when it does not.
fn jump(condition: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { jt, jf, ..statement(libc::BPF_JMP | condition | libc::BPF_K, k) }
}

fn verdict(verdict: Verdict) -> sock_filter {
    statement(libc::BPF_RET | libc::BPF_K, verdict.code())
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::Command;

    use super::*;

    const PERM: Verdict = Verdict::Refuse(libc::EPERM as u16);

    fn filter() -> Filter {
        Filter::new()
            .unwrap()
            .rule(7, When::Always, Verdict::Allow)
            .rule(8, When::Is(1, &[3, 5]), Verdict::Allow)
            .rule(9, When::Has(0, 6), Verdict::Allow)
            .rule(10, When::HasNot(2, 4), Verdict::Allow)
            .rule(11, When::Always, Verdict::Kill)
            .rule(12, When::Always, Verdict::Refuse(38))
            .rule(7, When::Always, Verdict::Kill)
    }

    #[test]
    fn the_first_rule_about_a_call_counts() {
        let filter = filter();
        let judged = |number, arguments| filter.judge(number, arguments);
        let with = |index: usize, value| {
            let mut arguments = [0; 6];
            arguments[index] = value;
            arguments
        };
        assert_eq!(judged(7, [9; 6]), Verdict::Allow.code());
        for (value, then) in [(3, Verdict::Allow), (5, Verdict::Allow), (4, PERM), (0, PERM)] {
            assert_eq!(judged(8, with(1, value)), then.code(), "{value}");
        }
        for (value, then) in [(6, Verdict::Allow), (7, Verdict::Allow), (4, PERM), (2, PERM)] {
            assert_eq!(judged(9, with(0, value)), then.code(), "{value}");
        }
        for (value, then) in [(0, Verdict::Allow), (3, Verdict::Allow), (4, PERM), (7, PERM)] {
            assert_eq!(judged(10, with(2, value)), then.code(), "{value}");
        }
        assert_eq!(judged(11, [0; 6]), Verdict::Kill.code());
        assert_eq!(judged(12, [0; 6]), Verdict::Refuse(38).code());
        assert_eq!(judged(13, [0; 6]), PERM.code());
        if cfg!(target_arch = "x86_64") {
            assert_eq!(judged(7 | i64::from(FOREIGN), [0; 6]), Verdict::Kill.code());
        }
    }

    /// The kernel's verdict is ours, in a process of its own: the filter is all threads'.
    #[test]
    fn the_kernel_judges_likewise() {
        const CHILD: &str = "BECKET_TEST_SECCOMP";
        if let Some(how) = std::env::var_os(CHILD) {
            let umask = libc::SYS_umask;
            // None that AddressSanitizer's search for leaks makes at the end: it would be killed, and waited
            // for.
            // SAFETY: neither call takes memory.
            let (named, mask) = unsafe { (libc::SYS_getsid, libc::umask(0o077)) };
            let all = (0..1024).filter(|number| ![umask, named].contains(number));
            let open = all.fold(Filter::new().unwrap(), |filter, number| {
                filter.rule(number, When::Always, Verdict::Allow)
            });
            let filter = open.rule(umask, When::Is(0, &[mask]), Verdict::Allow).rule(
                named,
                When::Always,
                Verdict::Kill,
            );
            let (hold, held) = std::sync::mpsc::channel::<()>();
            let other = std::thread::spawn(move || {
                held.recv().unwrap();
                // SAFETY: takes no memory.
                unsafe { libc::syscall(libc::SYS_umask, 0o111) }
            });
            rustix::thread::set_no_new_privs(true).unwrap();
            filter.install().unwrap();
            hold.send(()).unwrap();
            assert_eq!(other.join().unwrap(), -1, "a thread that ran already");
            // SAFETY: as above.
            assert_eq!(unsafe { libc::syscall(libc::SYS_umask, mask) }, 0o077);
            if how == "kill" {
                // SAFETY: as above.
                unsafe { libc::syscall(named, 0) };
                unreachable!("it is dead");
            }
            return;
        }
        let run = |how: &str| {
            let mut test = Command::new(std::env::current_exe().unwrap());
            test.args(["the_kernel_judges_likewise", "--nocapture"]).env(CHILD, how).output().unwrap()
        };
        let went = run("refuse");
        assert!(went.status.success(), "{went:?}");
        assert_eq!(run("kill").status.signal(), Some(libc::SIGSYS));
    }
}
